"""The guide does what it says: its Python blocks run in order, in one process, and their results are looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import PreTrainedModel


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_guide(root: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # it saves a model
    text = (root / "docs" / "guide.md").read_text(encoding="utf-8")
    found = blocks(text)
    # A fence that the pattern misses would be a block that nobody runs.
    assert len(found) == text.count("```python") and found
    space: dict = {}
    for index, block in enumerate(found):
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, f"docs/guide.md, block {index}", "exec"), space)
    model = space["model"]
    assert isinstance(model, PreTrainedModel) and model.config._attn_implementation == "delta_matching_onepass"
    # Without attention the best loss of the task is ln 17 = 2.8.
    assert space["losses"][-1] < 2.5
    lines = [json.loads(line) for line in Path("probe.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2] and lines[-1]["not_measured"] == []
    assert all(len(line["layers"]) == 2 for line in lines)
    assert "row sum of dS" in capsys.readouterr().out
