"""The bias experiment: what of the gradient's error averages out over mini-batches, and what does not.

The weights of a trained model stay as they are. For each of B mini-batches the gradient of every attention weight is
computed exactly and in each mode (measure.py says what exact is), and statistics.py splits the difference
into noise, which training averages out, and bias, which it follows. table.py makes the document and its text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from delta_matching import version

from .. import checkpoint, config, distributed
from ..checkpoint import durable
from ..cli import Parser
from ..config import ABLATIONS, MODES, AttentionConfig
from ..loop import repeatable
from ..model import Decoder
from ..text import data
from . import table
from .measure import measure
from .statistics import check_batches

SCHEMA = "dmattn.bias/1"

EPILOG = """examples:
  python -m train bias build/runs/toy --data build/data/characters --numerics paper --context 64 --out build/bias.json
  python -m train bias build/smollm2 --data build/data/smollm2 --modes stale matched --batches 64 --out build/bias.json
  python -m train bias build/qwen --data build/data/qwen --layers 15 --context 2048 --batch 1 --out build/bias.json
"""


def load_model(path: Path, texts: data.Data) -> tuple[Decoder, dict[str, Any]]:
    """The model of a checkpoint in FP32 on the CPU, and the checkpoint's meta.

    Errors: ValueError for another vocabulary than the data's, and for weights that are not those of the model's config.
    """
    state = checkpoint.load(checkpoint.found(path))
    document = state.meta.get("config")
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise ValueError(f"{path}: its state has no config of a model")
    theirs = state.meta.get("tokens")
    if theirs is not None and theirs != texts.tokens.fingerprint:
        raise ValueError(
            f"--data: {path} was trained on another vocabulary "
            f"(tokens {str(theirs)[:12]}, those of the data are {texts.tokens.fingerprint[:12]})"
        )
    shape = config.from_document({"model": document["model"], "train": {"context": 1}}).model
    there = len({name.split(".")[1] for name in state.model if name.startswith("layers.")})
    if there != shape.layers:
        raise ValueError(f"{path}: its config has {shape.layers} layers, its weights {there}")
    vocabulary = len(state.model["embed.weight"]) if "embed.weight" in state.model else 0
    if vocabulary < texts.tokens.size:
        raise ValueError(f"--data: has {texts.tokens.size} tokens, {path} knows {vocabulary}")
    with torch.device("meta"):  # nothing of that size exists before its shape is known to be right
        model = Decoder(shape, AttentionConfig(), vocabulary)
    expected = model.state_dict()
    for name in sorted(expected.keys() | state.model.keys()):
        wanted, got = (list(side[name].shape) if name in side else None for side in (expected, state.model))
        if wanted != got:
            raise ValueError(f"{path}: weight {name}: expected {wanted or 'none'}, got {got or 'none'}")
    model.load_state_dict({name: weight.float() for name, weight in state.model.items()}, assign=True)
    return model, state.meta


def attention_of(mode: str, numerics: str, centre: str | None, simulated: bool) -> AttentionConfig:
    """Ablations are offered in paper numerics alone, so they are measured in those."""
    if mode not in (*MODES, *ABLATIONS):
        raise ValueError(f"--modes: expected some of {', '.join((*MODES, *ABLATIONS))}, got {mode!r}")
    return AttentionConfig(mode, "paper" if mode in ABLATIONS else numerics, centre, simulated)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m train bias",
        description="Fixed weights, many mini-batches: what of each mode's gradient error averages out over them, "
        "and what does not. Prints a table and writes a JSON document (schema dmattn.bias/1).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("checkpoint", type=Path, help="a folder that `train run` or `train import` made")
    top.add_argument("--data", type=Path, required=True, help="a folder that `train prepare` made, of the same tokens")
    top.add_argument("--out", type=Path, required=True, help="the JSON document")
    top.add_argument("--modes", nargs="+", default=["stale", "consistent", "matched", "onepass"], metavar="MODE",
                     help=f"of {', '.join((*MODES, *ABLATIONS))}; exact is FP32 without rounded inputs")  # fmt: skip
    top.add_argument("--against", default="matched", metavar="MODE",
                     help="measure the other modes' differences to this one too, if it is among --modes; none: do not "
                     "(default: matched)")  # fmt: skip
    top.add_argument("--batches", type=int, default=256, help="mini-batches, a power of two (default: 256)")
    top.add_argument("--batch", type=int, default=2, help="sequences of a mini-batch (default: 2)")
    top.add_argument("--context", type=int, default=512, help="tokens of a sequence (default: 512)")
    top.add_argument("--layers", nargs="+", type=int, metavar="N", help="measure these layers alone (default: all)")
    top.add_argument("--numerics", default="hopper", choices=("hopper", "paper"))
    top.add_argument("--centre", choices=("none", "k", "qk"), help="default: qk in hopper numerics, k in paper")
    top.add_argument("--simulated", action="store_true", help="by Torch operations instead of the library")
    top.add_argument("--split", default="train", choices=("train", "valid"), help="of the data (default: train)")
    top.add_argument("--seed", type=int, default=1000, help="which mini-batches (default: 1000)")
    top.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu or cuda")
    top.add_argument("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's own choice")
    top.add_argument("--quiet", action="store_true", help="no progress bar")
    return top


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """The document of a command. Errors: ValueError, RuntimeError, OSError, each in one line."""
    check_batches(chosen.batches)
    if not 0 <= chosen.threads <= config.THREADS:
        raise ValueError(f"--threads: expected 0 to {config.THREADS}, got {chosen.threads}")
    if chosen.against not in (*MODES, *ABLATIONS, "none"):
        raise ValueError(f"--against: expected a mode or none, got {chosen.against!r}")
    attentions = {
        mode: attention_of(mode, chosen.numerics, chosen.centre, chosen.simulated) for mode in chosen.modes
    }  # fmt: skip
    device = distributed.Ranks().device(chosen.device)
    repeatable(device)
    torch.set_float32_matmul_precision("highest")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    texts = data.open(chosen.data)
    model, meta = load_model(chosen.checkpoint, texts)
    if chosen.context > model.config.context:
        raise ValueError(f"--context: expected at most {model.config.context} (model.context), got {chosen.context}")
    model.to(device)

    def batch(at: int) -> tuple[Tensor, Tensor]:
        return texts.batch(at, chosen.seed, chosen.batch, chosen.context, split=chosen.split)

    against = chosen.against if chosen.against in attentions else None
    measured = measure(
        model, batch, attentions, chosen.batches, against=against, layers=chosen.layers, quiet=chosen.quiet
    )
    settings = {name: getattr(chosen, name) for name in ("batches", "batch", "context", "seed", "split", "layers")}
    trained = meta["config"].get("attention")
    return {
        "schema": SCHEMA,
        "version": version(),
        "torch": torch.__version__,
        "device": distributed.name(device),
        "checkpoint": {"name": chosen.checkpoint.name, "step": meta.get("step"), "trained_in": trained},
        "model": meta["config"]["model"],
        "tokens": texts.tokens.fingerprint,
        "data": texts.fingerprint,
        "settings": settings,
        "attention": {mode: {"numerics": a.numerics, "centre": a.centre, "simulated": a.simulated}
                      for mode, a in attentions.items()},
        "loss": measured.loss,
        **table.rows(measured.moments, measured.elements, measured.magnitudes),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(argv)
    if chosen.out.is_dir():
        raise ValueError(f"--out: expected a file, got the folder {chosen.out}")
    document = run(chosen)
    durable.replace(chosen.out, (json.dumps(document, allow_nan=False) + "\n").encode(), "--out")
    print(table.markdown(document))
    print(chosen.out)
    return 0
