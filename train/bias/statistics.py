"""Noise and bias of a stream of vectors x_1 ... x_B, apart, without keeping the stream.

With a mean b and independent noise of E‖x - b‖² = s², a mean over n of them has E‖mean‖² = ‖b‖² + s²/n. Two views:

    curve   for n = 1, 2, 4 ... B the mean of ‖mean of n‖² over all B/n disjoint blocks of consecutive vectors; without
            a bias its root falls like 1/√n
    bias    G groups of consecutive vectors with means S_g. ⟨S_g, S_h⟩ of different groups has no noise in its
            expectation, so ‖b‖² is estimated without bias by (‖Σ S_g‖² - Σ ‖S_g‖²) / (G (G - 1)), which may come out
            below zero. Its 95 % interval is the jackknife's over groups with Student's t. Where there is no bias the
            jackknife counts the variance of such a product about twice, so that the interval is then too wide and
            covers 0 in more than 99 % of cases. A bias is covered in 92 to 100 % of them (simulated, 8 dimensions or
            more), in at least 85 % where all noise lies in one direction and the bias is hardly larger.

A binary counter merges blocks pairwise. Its blocks of B/G vectors are the groups, and longer blocks are sums of groups,
whose norms the G x G inner products know: log2(B/G) + G vectors are held, 20 for B = 256.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]

GROUPS = 16
LEAST = 4  # batches: fewer groups tell nothing of their spread
STUDENT = {4: 3.182446, 8: 2.364624, 16: 2.131450}  # by groups: 97.5 % of t with one degree of freedom less
_PIECE = 1 << 20  # elements converted to FP64 at a time


def check_batches(batches: int) -> None:
    if batches < LEAST or batches & (batches - 1):
        raise ValueError(f"--batches: expected a power of two, {LEAST} or more, got {batches}")


def copies(batches: int) -> int:
    """FP32 vectors that a BlockSums of so many batches holds at most."""
    groups = min(GROUPS, batches)
    return groups + (batches // groups).bit_length() - 1


@dataclass
class Moments:
    """What is known of a stream, or of several side by side (the concatenation of their vectors): sums of both.

    squares: by level l, ‖mean‖² of every block of 2^l consecutive vectors. gram: ⟨S_g, S_h⟩, [G, G].
    """

    squares: list[Array]
    gram: Array

    @property
    def mean_square(self) -> float:
        """‖mean of all‖²."""
        return float(self.squares[-1][0])

    @property
    def curve(self) -> Array:
        """Mean of ‖mean‖² over the blocks of each level."""
        return np.array([level.mean() for level in self.squares])

    @property
    def spread(self) -> Array:
        """Standard error of `curve`; NaN at the last level, which has one block."""
        sizes = [len(level) for level in self.squares]
        return np.array(
            [
                level.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
                for level, n in zip(self.squares, sizes, strict=True)
            ]
        )


def pooled(parts: Iterable[Moments]) -> Moments:
    """Moments of the concatenated vectors."""
    every = list(parts)
    levels = zip(*(part.squares for part in every), strict=True)
    return Moments([np.sum(level, axis=0) for level in levels], np.sum([part.gram for part in every], axis=0))


class BlockSums:
    """The counter: ``add`` each vector (FP32, ``size`` elements), in order; ``moments`` after the last.

    Sums are FP32, at most 2 B/G of them added in a chain of log2(B/G); norms and products are FP64. The result is a
    function of the vectors alone: nothing depends on time or on what else runs.
    """

    def __init__(self, size: int, batches: int, device: torch.device) -> None:
        check_batches(batches)
        self.batches, self.count = batches, 0
        self.groups = min(GROUPS, batches)
        self.depth = (batches // self.groups).bit_length() - 1  # level of the groups
        self._waiting: list[Tensor | None] = [None] * self.depth  # a block without its partner, by level
        self._means = torch.empty(self.groups, size, device=device)
        self._squares = [
            torch.zeros(batches >> level, dtype=torch.float64, device=device) for level in range(self.depth)
        ]
        self._gram = torch.zeros(self.groups, self.groups, dtype=torch.float64, device=device)

    def add(self, vector: Tensor) -> None:
        """Takes the next vector; the caller must not write to it afterwards."""
        if self.count == self.batches:
            raise ValueError(f"vector: expected {self.batches} of them, got one more")
        at, block = self.count, vector.reshape(-1)
        self.count += 1
        for level in range(self.depth):
            norm = torch.linalg.vector_norm(block, dtype=torch.float64)
            self._squares[level][at >> level] = (norm / 2**level).square()
            partner, self._waiting[level] = self._waiting[level], None
            if partner is None:
                self._waiting[level] = block
                return
            block = partner + block
        self._add_group(at >> self.depth, block / 2**self.depth)

    def _add_group(self, group: int, mean: Tensor) -> None:
        self._means[group] = mean
        products = torch.zeros(group + 1, dtype=torch.float64, device=mean.device)
        for start in range(0, mean.numel(), _PIECE):
            piece = self._means[: group + 1, start : start + _PIECE].double()
            products += piece @ piece[group]
        self._gram[group, : group + 1] = products
        self._gram[: group + 1, group] = products

    def moments(self) -> Moments:
        if self.count != self.batches:
            raise ValueError(f"vectors: expected {self.batches}, got {self.count}")
        gram = self._gram.cpu().numpy()
        squares = [level.cpu().numpy() for level in self._squares]
        length = 1
        while length <= self.groups:  # in groups
            sums = gram.reshape(self.groups // length, length, -1, length).sum((1, 3))
            squares.append(np.diagonal(sums) / length**2)
            length *= 2
        return Moments(squares, gram)


# ---- Estimates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Of a square such as ‖b‖²: unbiased, so it may be negative. ``error``: its standard error."""

    square: float
    error: float
    student: float

    @property
    def seen(self) -> bool:
        """Is it above zero, at 95 % (two-sided)?"""
        return self.square - self.student * self.error > 0

    # max(x, 0.0), in this order, leaves a NaN what it is.
    @property
    def root(self) -> float:
        return math.sqrt(max(self.square, 0.0))

    @property
    def low(self) -> float:
        return math.sqrt(max(self.square - self.student * self.error, 0.0))

    @property
    def high(self) -> float:
        """Of the root. An estimate below zero counts as zero: its luck must not make the limit look sharper."""
        return math.sqrt(max(self.square, 0.0) + self.student * self.error)


def _without_diagonal(gram: Array) -> float:
    groups = len(gram)
    return float((gram.sum() - np.trace(gram)) / (groups * (groups - 1)))


def _jackknife(estimates: Array) -> float:
    groups = len(estimates)
    return math.sqrt((groups - 1) / groups * float(np.square(estimates - estimates.mean()).sum()))


def _leaving_out(gram: Array) -> Array:
    kept = [np.delete(np.arange(len(gram)), group) for group in range(len(gram))]
    return np.array([_without_diagonal(gram[np.ix_(rest, rest)]) for rest in kept])


def squared_mean(moments: Moments) -> Estimate:
    """‖b‖² of the stream, by the products of different groups."""
    gram = moments.gram
    return Estimate(_without_diagonal(gram), _jackknife(_leaving_out(gram)), STUDENT[len(gram)])


def squared_ratio(errors: Moments, exact: Moments) -> Estimate | None:
    """‖b‖² of the errors over that of the exact stream, both unbiased; None where the latter is not seen."""
    if not squared_mean(exact).seen:
        return None
    below = _leaving_out(exact.gram)
    if (below <= 0).any():
        return None
    ratio = _without_diagonal(errors.gram) / _without_diagonal(exact.gram)
    return Estimate(ratio, _jackknife(_leaving_out(errors.gram) / below), STUDENT[len(exact.gram)])


def noise_square(moments: Moments) -> float:
    """s² = E‖x - b‖² of a single vector."""
    return float(moments.curve[0]) - squared_mean(moments).square
