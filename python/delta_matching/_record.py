"""The seam between the operators and a live probe: the one name that the operators look at when they run.

It is looked at inside the real kernels, which run eagerly under torch.compile as well. While nothing records, a call
pays for one comparison with None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Call(NamedTuple):
    """What a backward was given. Layouts as in ops.py; the offsets are both there or both None."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor
    reference: Tensor  # of the forward: tells which call this is
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    softmax_scale: float | None
    causal: bool
    mode: str
    numerics: str
    centre: str | None


class Recorder(Protocol):
    """Sees calls of the operators, and must not write to what it is shown."""

    def forward(self, reference: Tensor) -> None:
        """A forward has run and saved ``reference``."""

    def backward(self, call: Call) -> None:
        """A backward has run."""


active: Recorder | None = None
