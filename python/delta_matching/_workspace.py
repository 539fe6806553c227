"""How much device memory the backward may hold for dS at a time: a limit of the process, for CUDA tensors alone."""

from __future__ import annotations

import os
from typing import Final

#: Environment variable with the limit in bytes, for what :func:`set_workspace_cap` has not set.
CAP_VARIABLE: Final = "DELTA_MATCHING_WORKSPACE_CAP"

_MOST: Final = 2**63 - 1
_cap: int | None = None


def set_workspace_cap(nbytes: int | None) -> None:
    """Limit the dS that a backward on a GPU holds at a time.

    The backward works through KV heads, query heads of their groups and ranges of keys, so that a lower limit means
    more and smaller launches. It never changes a bit of the result. A query head (of packed sequences: a group of them)
    against 128 keys is held even where that takes more; the operands' codes and FP32 sums between launches, linear in
    the lengths, come on top.

    Args:
        nbytes: bytes, above 0; None means the environment variable ``DELTA_MATCHING_WORKSPACE_CAP`` if it is set, else
            the library's own limit of 1 GiB.

    Raises:
        TypeError: not an int. ValueError: not above 0.
    """
    global _cap
    if nbytes is not None:
        if not isinstance(nbytes, int) or isinstance(nbytes, bool):
            raise TypeError(f"nbytes: expected an int or None, got {type(nbytes).__name__}")
        if not 0 < nbytes <= _MOST:
            raise ValueError(f"nbytes: expected 1 ... 2^63 - 1, got {nbytes}")
    _cap = nbytes


def workspace_cap() -> int:
    """The limit in bytes that the next backward on a GPU keeps to; 0 stands for the library's own, 1 GiB.

    Raises:
        ValueError: the environment variable ``DELTA_MATCHING_WORKSPACE_CAP`` is in use and holds no number above 0.
    """
    if _cap is not None:
        return _cap
    text = os.environ.get(CAP_VARIABLE, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST):
        raise ValueError(f"{CAP_VARIABLE}: expected a number of bytes above 0, got {text!r}")
    return int(text)
