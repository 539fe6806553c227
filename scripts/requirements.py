"""Prints what pip must bring for building and testing the Python package and for scripts/test: one requirement a line."""

import tomllib
from pathlib import Path

# Another version formats differently.
TOOLS = ["clang-format==14.0.6"]

project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
requirements = project["build-system"]["requires"] + project["project"]["dependencies"]
requirements += project["project"]["optional-dependencies"]["test"]
print("\n".join(requirements + TOOLS))
