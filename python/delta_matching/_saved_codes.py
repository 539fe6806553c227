"""Whether the forward on a GPU leaves the FP8 codes of q, k and v for the backward: a setting of the process.

Nothing here needs Torch; ops.py acts on it.
"""

from __future__ import annotations

import os
from typing import Final

#: Environment variable with 0 or 1, for what :func:`set_save_codes` has not set.
SAVE_VARIABLE: Final = "DELTA_MATCHING_SAVE_CODES"

#: Kinds of devices whose forward leaves codes. The twin makes its own again.
KEEPERS: Final = ("cuda",)

_save: bool | None = None


def set_save_codes(save: bool | None) -> None:
    """Say whether a forward on a GPU leaves the FP8 codes of q, k and v for its backward.

    With them the backward skips making the same codes again, and k and v are not kept. That takes time off every step
    and never changes a bit of the result. It costs memory between forward and backward: 3 bytes per element of k, one
    per element of q, and 4 bytes per mean block of queries (of 128 rows; at most 64 a sequence), key and query head, in
    place of the 4 bytes per element of k that k and v take. Eager calls on plain tensors alone: compiled ones, those
    that a dispatch mode or a live probe watches, and those whose saved tensors go through hooks (activation checkpoints
    without reentry, ``save_on_cpu``) keep k and v.

    A call keeps what was set when its forward ran.

    Args:
        save: True or False; None means the environment variable ``DELTA_MATCHING_SAVE_CODES`` (0 or 1) if it is set,
            else True.

    Raises:
        TypeError: neither a bool nor None.
    """
    global _save
    if save is not None and not isinstance(save, bool):
        raise TypeError(f"save: expected True, False or None, got {type(save).__name__}")
    _save = save


def save_codes() -> bool:
    """Whether the next forward on a GPU leaves codes for its backward (:func:`set_save_codes`).

    Raises:
        ValueError: the environment variable ``DELTA_MATCHING_SAVE_CODES`` is in use and is neither 0 nor 1.
    """
    if _save is not None:
        return _save
    text = os.environ.get(SAVE_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{SAVE_VARIABLE}: expected 0 or 1, got {text!r}")
    return text != "0"
