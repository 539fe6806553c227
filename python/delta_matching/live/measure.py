"""From what was recorded of a step to the numbers of its line in the log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._probe import probe_tensors
from .capture import Recorded
from .gain import concentration
from .window import NotMeasured

#: Modes that an attention other than ours is measured in, where none are asked for: the shortcut and its repair.
_FOREIGN_MODES = ("stale", "matched")

#: Most pushed channels of a head and mode that a line names.
_MOST_PUSHED = 4


class Pushes:
    """How steadily each key channel is pushed one way: signed and absolute column sums since the probe began."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int, str], tuple[list[float], list[float]]] = {}

    def add(self, layer: str, head: int, mode: str, columns: Sequence[float | None]) -> list[dict[str, Any]]:
        """Take a step's ``columns_after_cast``, and return the channels with the largest signed sums, largest first:
        ``{"channel", "share", "consistency"}``, share being this step's, consistency |sum| / sum of magnitudes."""
        signed, absolute = self._sums.setdefault((layer, head, mode), ([0.0] * len(columns), [0.0] * len(columns)))
        if len(signed) != len(columns) or any(value is None for value in columns):
            return []
        for channel, value in enumerate(columns):
            signed[channel] += value or 0.0
            absolute[channel] += abs(value or 0.0)
        order = sorted(range(len(columns)), key=lambda c: -abs(signed[c]))
        return [
            {"channel": c, "share": columns[c], "consistency": abs(signed[c]) / absolute[c]}
            for c in order[:_MOST_PUSHED]
            if absolute[c] > 0
        ]


def _head(
    document: dict[str, Any], layer: str, head: int, recorded: Recorded, norms: tuple[Tensor, Tensor] | None,
    pushes: Pushes,
) -> dict[str, Any]:  # fmt: skip
    modes = {}
    for mode, numbers in document["modes"].items():
        kept = {name: value for name, value in numbers.items() if name != "worst_head"}
        kept["pushed"] = pushes.add(layer, head, mode, numbers["columns_after_cast"])
        modes[mode] = kept
    sample = recorded.sample
    gain = None
    if norms is not None:
        gain = concentration(norms, sample.q.shape[2], sample.q_heads, sample.kv_heads, head)
    return {"head": head, "entropy": document["entropy"], "gain": gain, "modes": modes}


def measured(
    layer: str,
    recorded: Recorded,
    calls: int,
    norms: tuple[Tensor, Tensor] | None,
    modes: Sequence[str] | None,
    numerics: str,
    centre: str | None,
    threads: int,
    pushes: Pushes,
) -> dict[str, Any]:
    """One entry of a line's ``layers`` (docs/schemas.md), from tensors on the CPU.

    Errors: NotMeasured for what the numerics does not offer, in the library's own words.
    """
    sample = recorded.sample
    if modes is None:
        modes = _FOREIGN_MODES if recorded.mode is None else (recorded.mode,)
    if recorded.numerics is not None:
        numerics, centre = recorded.numerics, recorded.centre
    scale = 1.0 / math.sqrt(sample.q.shape[2]) if recorded.softmax_scale is None else recorded.softmax_scale
    try:
        document = probe_tensors(
            sample.q,
            sample.k,
            sample.v,
            sample.d_o,
            causal=sample.causal,
            softmax_scale=scale,
            numerics=numerics,
            centre=centre,
            modes=modes,
            threads=threads,
        )
    except (ValueError, RuntimeError) as error:
        raise NotMeasured(str(error)) from None
    tokens, k_tokens = sample.q.shape[0], sample.k.shape[0]
    return {
        "layer": layer,
        "source": recorded.source,
        "calls": calls,
        "numerics": document["numerics"],
        "centre": document["centre"],
        "mode": recorded.mode,
        "tokens": tokens,
        "k_tokens": k_tokens,
        "cut_from": None if (tokens, k_tokens) == (sample.q_len, sample.k_len) else [sample.q_len, sample.k_len],
        "q_heads": sample.q_heads,
        "kv_heads": sample.kv_heads,
        "head_dim": sample.q.shape[2],
        "softmax_scale": document["input"]["softmax_scale"],
        "causal": sample.causal,
        "nonfinite_heads": [sample.heads[at] for at in document["nonfinite_heads"]],
        "heads": [
            _head(one, layer, head, recorded, norms, pushes)
            for one, head in zip(document["heads"], sample.heads, strict=True)
        ],
    }
