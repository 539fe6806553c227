"""Can a model find in a long text what it has read there? Two measures beside the loss.

`recall`: a sentence such as "The code of Tamiro is 4821." stands at a known depth of held-out text; the text ends with
"The code of Tamiro is", and what the model gives the value's tokens is measured. The same prompt without the sentence
is measured too: what a model scores there it did not find, it guessed.

`copying`: random letters, then the same again; the loss on the second occurrence. A small model of bytes or characters
learns this long before it knows what a code is.

Prompts are a function of the arguments. Scores of a model that gives NaN are None, never a number.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cli import Parser
from .documents import draws, whole
from .tokens import Ids, Tokens

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CONSONANTS, VOWELS = "bdfgklmnprstv", "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = 4
SCHEMA = "dmattn.recall/1"
Model = Callable[[Tensor], Any]  # int64 [B, N] -> logits [B, N, V], or an object that has them as .logits


def _context(model: Model) -> int:
    """Tokens that a model of this package takes; of another, more than anyone asks for."""
    found = getattr(getattr(model, "config", None), "context", None)
    return found if isinstance(found, int) else 1 << 62


def _fits(name: str, length: int, most: int, context: int) -> None:
    if length > most:
        raise ValueError(f"{name}: expected lengths of at most {most} (the model's context is {context}), got {length}")


class Prompt:
    """A sample: pieces of tokens that every depth shares."""

    def __init__(self, tokens: Tokens, text: str, filler: Ids, length: int, key: tuple[int, int], sample: int) -> None:
        spans = [len(CONSONANTS), len(VOWELS)] * 3 + [9] + [10] * (DIGITS - 1) + [1 << 62]
        for attempt in range(1 << 16):
            drawn = draws(key, (sample << 16) + attempt, spans)
            letters = (VOWELS if i % 2 else CONSONANTS for i in range(6))
            name = "".join(kind[i] for kind, i in zip(letters, drawn[:6], strict=True)).title()
            if name not in text:  # a name that the text has would have two values
                break
        value = str(drawn[6] + 1) + "".join(map(str, drawn[7:-1]))
        stem = tokens.encode(f"\n\nThe code of {name} is")
        self.value, space = tokens.encode(f" {value}"), tokens.encode(" ")
        if np.array_equal(self.value[: len(space)], space):  # a token of its own, which anyone can guess
            stem, self.value = np.concatenate([stem, space]), self.value[len(space) :]
        if tokens.decode(np.concatenate([stem, self.value])) != f"\n\nThe code of {name} is {value}":
            raise ValueError(f"tokens: expected a vocabulary with the letters and digits of 'The code of {name} is "
                             f"{value}', got one without")  # fmt: skip
        # In pieces, so that the value has the same tokens where it is told and where it is asked for.
        self.sentence = np.concatenate([stem, self.value, tokens.encode(".\n\n")])
        self.question = np.concatenate([stem, self.value])
        self.room = length - len(self.sentence) - len(self.question)
        if self.room < 0:
            least = length - self.room
            raise ValueError(
                f"lengths: expected at least {least} tokens for the sentence and the question, got {length}"
            )
        if len(filler) < length:
            raise ValueError(f"text: expected at least {length} tokens to fill the prompt with, got {len(filler)}")
        start = drawn[-1] * (len(filler) - length + 1) >> 62
        self.filler = filler[start : start + length]

    def ids(self, depth: float | None) -> Ids:
        """The prompt with its answer; depth None: more of the text where the sentence would be."""
        if depth is None:
            return np.concatenate([self.filler[: len(self.filler) - len(self.question)], self.question])
        at = round(depth * self.room)
        return np.concatenate([self.filler[:at], self.sentence, self.filler[at : self.room], self.question])


def _scores(
    model: Model, rows: list[Ids], last: list[int], device: torch.device, batch: int
) -> list[tuple[float, float]]:
    """For each row (share of its `last` tokens that the model would choose, their mean log-likelihood in nats).

    Both are NaN where a logit that decides is.
    """
    found = []
    for start in range(0, len(rows), batch):
        ids = torch.from_numpy(np.stack(rows[start : start + batch]).astype(np.int64)).to(device)
        answer = model(ids)
        logits: Tensor = answer if isinstance(answer, Tensor) else answer.logits
        for row, count in enumerate(last[start : start + batch]):
            wanted = ids[row, -count:]
            # FP32 only of what is measured: all of a long prompt's logits would be gigabytes.
            part = logits[row, -count - 1 : -1].float().log_softmax(-1)
            likelihood = float(part.gather(-1, wanted[:, None]).double().mean())
            right = float((part.argmax(-1) == wanted).double().mean())
            found.append((right if math.isfinite(likelihood) else math.nan, likelihood))
    return found


def _summary(scores: list[tuple[float, float]]) -> dict[str, float | int | None]:
    """Means, None with a score that is no number; `whole`: the share of samples with every token right."""
    broken = sum(not math.isfinite(likelihood) for _, likelihood in scores)
    if broken:
        return {"accuracy": None, "whole": None, "likelihood": None, "not_finite": broken}
    count = len(scores)
    return {
        "accuracy": math.fsum(right for right, _ in scores) / count,
        "whole": sum(right == 1.0 for right, _ in scores) / count,
        "likelihood": math.fsum(likelihood for _, likelihood in scores) / count,
        "not_finite": 0,
    }


class _Evaluating:
    """No gradients, and a module in eval mode; its mode is put back."""

    def __init__(self, model: Model) -> None:
        self.module = model if isinstance(model, nn.Module) else None
        self.gradients = torch.no_grad()

    def __enter__(self) -> None:
        self.training = self.module is not None and self.module.training
        if self.module is not None:
            self.module.eval()
        self.gradients.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.gradients.__exit__(*error)
        if self.module is not None:
            self.module.train(self.training)


def recall(
    model: Model,
    tokens: Tokens,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    samples: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    batch: int = 4,
) -> dict[str, Any]:
    """Finds a key's value in held-out text, for prompts of so many tokens (answer included).

    Depth 0 is the start of the prompt, 1 just before the question; all depths of a length share names, values and text.
    Returns values for JSON: for each length the summaries of its depths and of `absent`, the prompt without the
    sentence. A summary: `accuracy` (share of the value's tokens that are the model's first choice, the tokens before
    them given), `whole` (share of samples with all of them), `likelihood` (nats a token, at most 0), `not_finite`
    (samples whose scores are no numbers; then the three are None). ValueError, one line, for a bad argument.
    """
    samples, seed = whole("samples", samples, 1, 1 << 20), whole("seed", seed, 0, 2**64 - 1)
    batch = whole("batch", batch, 1, 1 << 20)
    for depth in depths:
        if not isinstance(depth, int | float) or not 0 <= depth <= 1:
            raise ValueError(f"depths: expected numbers of 0 ... 1, got {depth!r:.40}")
    filler, where, results, context = tokens.encode(text), torch.device(device), [], _context(model)
    with _Evaluating(model):
        for length in lengths:
            length = whole("lengths", length, 1, 1 << 32)
            _fits("lengths", length, context, context)
            prompts = [Prompt(tokens, text, filler, length, (seed, 3), sample) for sample in range(samples)]
            last = [len(prompt.value) for prompt in prompts]
            rows = {depth: [prompt.ids(depth) for prompt in prompts] for depth in (*depths, None)}
            found = {depth: _summary(_scores(model, ids, last, where, batch)) for depth, ids in rows.items()}
            absent = found.pop(None)
            parts = [{"depth": depth, **summary} for depth, summary in found.items()]
            results.append({"length": length, "depths": parts, "absent": absent})
    return {"schema": SCHEMA, "samples": samples, "seed": seed, "lengths": results}


def check(tokens: Tokens, text: str, lengths: Sequence[int], samples: int = 16, seed: int = 0) -> None:
    """Errors: ValueError for what `recall` would refuse, without a model."""
    filler = tokens.encode(text)
    for length in lengths:
        for sample in range(samples):
            Prompt(tokens, text, filler, length, (seed, 3), sample)


def copying(
    model: Model,
    tokens: Tokens,
    lengths: Sequence[int],
    gap: int = 0,
    samples: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    batch: int = 4,
) -> dict[str, Any]:
    """Copies random letters: a segment, `gap` other random letters, the segment again; `lengths` are of the segment.

    Returns values for JSON: for each length the summary (as recall's) of the `second` occurrence without its first
    token, which nothing foretells, and of the `first` one, likewise. A model that copies has a likelihood near 0 in
    `second`; one that only knows the alphabet has -ln 26 in both. ValueError, one line, for a bad argument.
    """
    samples, seed = whole("samples", samples, 1, 1 << 20), whole("seed", seed, 0, 2**64 - 1)
    context = _context(model)
    gap, batch = whole("gap", gap, 0, max(0, min(1 << 32, context - 4))), whole("batch", batch, 1, 1 << 20)
    pairs = [(letter, tokens.encode(letter)) for letter in LETTERS]
    singles = [ids for letter, ids in pairs if len(ids) == 1 and tokens.decode(ids) == letter]
    alphabet = np.unique(np.concatenate(singles)) if singles else np.zeros(0, np.uint32)
    if len(alphabet) < 2:
        raise ValueError("tokens: expected a vocabulary with the letters a ... z, got one without")
    where, results = torch.device(device), []
    with _Evaluating(model):
        for length in lengths:
            length = whole("lengths", length, 2, 1 << 32)
            _fits("copying", length, (context - gap) // 2, context)
            firsts, both = [], []
            for sample in range(samples):
                drawn = alphabet[draws((seed, 4), sample, [len(alphabet)] * (length + gap))]
                firsts.append(drawn[:length])
                both.append(np.concatenate([drawn, drawn[:length]]))
            scores = [_scores(model, rows, [length - 1] * samples, where, batch) for rows in (firsts, both)]
            first, second = map(_summary, scores)
            results.append({"length": length, "first": first, "second": second})
    return {"schema": SCHEMA, "samples": samples, "seed": seed, "gap": gap, "copying": results}


def parser() -> argparse.ArgumentParser:
    """Arguments of `python -m train recall`."""
    made = Parser(
        prog="python -m train recall",
        description="Measures whether a trained model finds a key's value in held-out text, and whether it copies.",
        epilog="examples:\n"
        "  python -m train recall build/runs/small --data build/data/bytes --lengths 256 512\n"
        "  python -m train recall build/runs/small --data build/data/bytes --copying 64 128 --out build/recall.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    made.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote; its held-out text is used")
    made.add_argument("--lengths", type=int, nargs="+", default=[], help="tokens of the prompts of the recall test")
    made.add_argument("--copying", type=int, nargs="+", default=[], help="tokens of the segments to copy")
    made.add_argument("--depths", type=float, nargs="+", default=list(DEPTHS), help="0: the start, 1: the end")
    made.add_argument("--samples", type=int, default=16, help="prompts for each length and depth (%(default)s)")
    made.add_argument("--seed", type=int, default=0, help="draws the prompts (%(default)s)")
    made.add_argument("--device", default="cpu", help="auto (a GPU where there is one), cpu or cuda (%(default)s)")
    made.add_argument("--out", type=Path, help="JSON file to write; default: standard output")
    return made


def _model(run: Path, vocabulary: int, fingerprint: str, device: torch.device) -> nn.Module:
    """The model of a run's newest intact checkpoint, refused with another vocabulary."""
    from .. import checkpoint, config
    from ..model import Decoder

    state = checkpoint.load(checkpoint.found(run))
    if state.meta.get("tokens") not in (None, fingerprint):
        raise ValueError(f"data: expected the vocabulary that {run} was trained on, got another")
    if not isinstance(state.meta.get("config"), dict):
        raise ValueError(f"run: expected a checkpoint with its config, got {str(run)!r} without")
    loaded = config.from_document(state.meta["config"])
    model = Decoder(loaded.model, loaded.attention, vocabulary)
    try:
        model.load_state_dict(state.model)
    except RuntimeError as error:
        raise ValueError(f"run: the weights of {run} do not fit its config: {str(error).splitlines()[-1]}") from None
    return model.to(device)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m train recall`: returns the exit status; errors are raised."""
    from ..distributed import Ranks
    from . import data

    chosen = parser().parse_args(argv)
    if not chosen.lengths and not chosen.copying:
        raise ValueError("lengths: expected --lengths or --copying, got neither")
    device = Ranks().device(chosen.device)
    texts = data.open(chosen.data)
    model = _model(chosen.run, texts.tokens.size, texts.tokens.fingerprint, device)
    shared = {"samples": chosen.samples, "seed": chosen.seed, "device": device}
    result: dict[str, Any] = {"schema": SCHEMA}
    if chosen.lengths:
        result |= recall(model, texts.tokens, texts.text("valid"), chosen.lengths, chosen.depths, **shared)
    if chosen.copying:
        result |= copying(model, texts.tokens, chosen.copying, **shared)
    document = json.dumps(result, indent=1, allow_nan=False) + "\n"
    if chosen.out is None:
        print(document, end="")
    else:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(document, encoding="utf-8")
    return 0
