"""`train import` and `train export`: the command lines of models.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .. import checkpoint
from ..cli import Parser
from ..config import Config, from_document
from ..text import tokens
from .convert import ARCHITECTURES, build, their_config, their_name
from .models import EXACT, export, import_model

EXPORT = """examples:
  python -m train export build/runs/toy --out build/toy_transformers
  python -m train export build/runs/toy/checkpoints/step-00000300 --data build/data/characters --out build/step_300
"""
IMPORT = """examples:
  python -m train import models/SmolLM2-135M --out build/smollm2
  python -m train import models/qwen3-0.6b.gguf --out build/qwen
  python -m train prepare build/corpus/anarchism --tokens transformers --tokenizer build/smollm2 --out build/data/words
"""


def main_export(arguments: Sequence[str]) -> int:
    """``python -m train export``."""
    parser = Parser(
        prog="python -m train export",
        description="Write a trained model as a folder of Transformers: Llama or Qwen3.",
        epilog=EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a folder of `train run` or `train import`, or one checkpoint in it")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; new or empty")
    parser.add_argument("--data", type=Path, help="folder of `train prepare`, for the tokenizer; default: data.path")
    chosen = parser.parse_args(arguments)
    state = checkpoint.load(checkpoint.found(chosen.run))
    config = from_document(state.meta.get("config") or {})
    embed = state.model.get("embed.weight")
    if embed is None or embed.ndim != 2:
        raise ValueError(f"{chosen.run}: expected a model with the weight embed.weight")
    their_config(config.model, embed.shape[0], embed.dtype, None)  # refuses before anything large happens
    weights = {their_name(name): tensor for name, tensor in state.model.items()}
    model = build(config.model, embed.shape[0], weights, EXACT)
    export(model, _tokens_of(chosen, config, state), chosen.out)
    print(f"{ARCHITECTURES['qwen3' if config.model.qk_norm else 'llama']} in {chosen.out}")
    return 0


def _tokens_of(chosen: argparse.Namespace, config: Config, state: checkpoint.State) -> tokens.Tokens | None:
    """The tokenizer that a model was trained with, if it can be had."""
    places = [chosen.data] if chosen.data else [chosen.run, *([Path(config.data.path)] if config.data.path else [])]
    for place in places:
        if chosen.data or (place / "tokens.json").is_file():
            texts = tokens.load(place / "tokens.json")
            if state.meta.get("tokens") not in (None, texts.fingerprint):
                raise ValueError(f"--data: the model was trained on another vocabulary than that of {place}")
            return texts
    print("no tokenizer: say --data FOLDER to write one too")
    return None


def main_import(arguments: Sequence[str]) -> int:
    """``python -m train import``."""
    parser = Parser(
        prog="python -m train import",
        description="Turn a Llama or Qwen3 into weights that a training starts from.",
        epilog=IMPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a folder of Transformers, or a .gguf file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; new or empty")
    chosen = parser.parse_args(arguments)
    saved, lines = import_model(chosen.source, chosen.out)
    for line in lines:
        print(line)
    print(f"# weights in {saved.parent}; a config that starts from them says\n")
    print((chosen.out / "model.toml").read_text(encoding="utf-8"))
    print(f"[train]\nstart = {json.dumps(str(chosen.out))}")
    return 0
