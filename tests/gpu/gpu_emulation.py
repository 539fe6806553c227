"""P and dP of one head as the backward forms them, tile by tile, on the tests' device.

The operands come from tests/python/oracle (NumPy, written from docs/numerics.md); the tensor core's products are
summed here in FP32 with its 13 fraction bits, exactly: every term is an integer below 2^14 times a power of two. So
rows can be long, and dS can be looked at before its cast with the very P and dP that a backward used, given what was
saved. exp2 is the device's own, at most 2e-7 from the contract's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from gpu_calls import DEVICE, Case, Inputs, Result
from torch import Tensor

from oracle import hopper
from oracle import quantise as blocks
from oracle.tensor_core import FRACTION, STEP

TILE, INTERVAL, GROUP = hopper.TILE, blocks.FLUSH_ROWS, hopper.EXPONENT_KEYS
_NEVER = -1000  # exponent of a code that is zero


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in FP32 for integers of normal range."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _exponent(x: Tensor) -> Tensor:
    """Exponents of normal FP32 numbers; _NEVER for zero."""
    found = ((x.contiguous().view(torch.int32) >> 23) & 255) - 127
    return torch.where(x == 0, _NEVER, found)


class Codes:
    """E4M3 numbers [rows, channels] in FP32 and their exponents (a subnormal has -6), channels first."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = torch.from_numpy(np.ascontiguousarray(values.T, np.float32)).to(DEVICE)
        exponent = torch.frexp(self.values)[1].clamp(min=-5) - 1
        self.exponents = torch.where(self.values == 0, _NEVER, exponent).to(torch.int32)

    def rows(self, span: slice) -> Codes:
        part = object.__new__(Codes)
        part.values, part.exponents = self.values[:, span], self.exponents[:, span]
        return part


def _add_step(total: Tensor, a: Codes, b: Codes, first: int) -> Tensor:
    """One step of 32 channels from ``first``; total [M, N]."""
    channels = range(first, first + STEP)
    largest = _exponent(total)
    for c in channels:
        pair = a.exponents[c][:, None] + b.exponents[c][None, :]
        largest = torch.maximum(largest, pair)
    # With a zero operand a pair stays far below any real exponent; where nothing is left, any unit will do.
    largest = torch.where(largest < -100, 0, largest)
    unit, inverse = _power(largest - FRACTION), _power(FRACTION - largest)
    units = torch.trunc(total * inverse)
    for c in channels:
        units += torch.trunc(a.values[c][:, None] * b.values[c][None, :] * inverse)
    surplus = (_exponent(units) - FRACTION).clamp(min=0)
    return torch.trunc(units * _power(-surplus)) * _power(surplus) * unit + 0.0


def product(a: Codes, b: Codes, extra: tuple[Codes, Codes] | None = None) -> Tensor:
    """a b^T [M, N] from zero, steps ascending, ``extra`` as one more step."""
    total = torch.zeros(a.values.shape[1], b.values.shape[1], device=a.values.device)
    for first in range(0, a.values.shape[0], STEP):
        total = _add_step(total, a, b, first)
    return total if extra is None else _add_step(total, *extra, 0)


def e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 number, saturating, in FP32."""
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


class Tile(NamedTuple):
    """64 queries against all keys."""

    rows: slice
    p: Tensor  # P~ of dS, FP64 [rows, keys]: from codes in onepass, else unrounded; times 2^k / Lambda it is not: see w
    dp: Tensor  # dP', FP64 [rows, keys]
    visible: Tensor


class Head:
    """One head of a call of equal lengths.

    Args:
        x: CPU tensors of the call; result: its saved statistics are read.
        head: query head of batch entry 0.
    """

    def __init__(self, case: Case, x: Inputs, result: Result, head: int = 0) -> None:
        assert not case.varlen
        kv = head // (case.q_heads // case.kv_heads)
        q, d_o = (t[0, :, head].float().numpy() for t in (x.q, x.d_o))
        k, v = (t[0, :, kv].float().numpy() for t in (x.k, x.v))
        self.case, self.d_o = case, d_o
        self.ops = blocks.operands(q, k, v, case.centre or "qk")
        reference = result.saved.reference[0, head].cpu().numpy()
        sums = result.saved.sum[:, 0, head].cpu().numpy()
        self.stats = hopper.row_statistics(reference, sums, case.mode)
        self.d_hat = blocks.quantise(self.stats.w[:, None] * d_o, INTERVAL)
        self.w = torch.from_numpy(self.stats.w).to(DEVICE)
        self.c = torch.from_numpy(self.stats.c).to(DEVICE)
        self._q, self._k, self._v, self._d = (Codes(x.codes) for x in (self.ops.q, self.ops.k, self.ops.v, self.d_hat))
        self._weights = Codes(blocks.bias_weights(blocks.Q_ROWS))
        self._k_scale, self._v_scale = (
            torch.from_numpy(np.repeat(x.scale, TILE)[: case.k_len]).to(DEVICE) for x in (self.ops.k, self.ops.v)
        )
        self._groups = -(-case.k_len // GROUP)

    def d_o_hat(self) -> Tensor:
        """Dequantised w dO, FP64 [rows, head_dim]."""
        scale = np.repeat(self.d_hat.scale, INTERVAL)[: self.case.q_len]
        return torch.from_numpy(self.d_hat.codes.astype(np.float64) * scale[:, None]).to(DEVICE)

    def onepass_delta(self, o: Tensor) -> Tensor:
        """True delta of onepass from O in FP64, its products with O's codes as the tensor core adds them up."""
        codes = blocks.quantise(o.float().cpu().numpy(), 1, scale_of=blocks.power_scale_of)
        scale = torch.from_numpy(codes.scale).to(o)
        held = torch.from_numpy(codes.codes).to(o) * scale[:, None]
        hat, of_o, truncated = self.d_o_hat(), Codes(codes.codes), torch.empty_like(scale)
        for start in range(0, len(o), TILE):
            rows = slice(start, start + TILE)
            truncated[rows] = product(self._d.rows(rows), of_o.rows(rows)).diagonal().double()
        truncated *= torch.from_numpy(np.repeat(self.d_hat.scale, INTERVAL)[: len(o)]).to(o) * scale
        return (truncated + (hat * (o - held)).sum(dim=1)) / self.w.double()

    def scores(self, span: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(acc, factor, visible), [rows, keys], of rows that start a block of 128."""
        acc, factor = [], []
        scale = np.float32(np.float32(self.case.scale) * np.float32(hopper.LOG2E))
        for start in range(span.start, span.stop, blocks.Q_ROWS):
            block = start // blocks.Q_ROWS
            rows = slice(start, min(start + blocks.Q_ROWS, span.stop))
            bias = self.ops.bias[block]
            weights = self._weights.rows(slice(0, rows.stop - rows.start))
            acc.append(product(self._q.rows(rows), self._k, None if bias is None else (weights, Codes(bias))))
            f = (self._k_scale * float(self.ops.q.scale[block])) * float(scale)
            factor.append(f.expand(rows.stop - rows.start, -1))
        i = torch.arange(span.start, span.stop, device=DEVICE)[:, None]
        j = torch.arange(self.case.k_len, device=DEVICE)[None, :]
        offset = self.case.k_len - self.case.q_len
        visible = (j <= i + offset) if self.case.causal else torch.ones_like(i + j, dtype=torch.bool)
        return torch.cat(acc), torch.cat(factor), visible & (self.w[span] != 0)[:, None]

    def dp(self, span: slice) -> Tensor:
        """dP' in FP64, of rows within one interval."""
        d_scale = float(self.d_hat.scale[span.start // INTERVAL])
        return product(self._d.rows(span), self._v).double() * (self._v_scale * d_scale)

    def _by_group(self, x: Tensor) -> Tensor:
        """Largest of each 16 keys over the rows, [groups]."""
        largest = x.amax(dim=0)
        padding = self._groups * GROUP - largest.shape[0]
        return torch.nn.functional.pad(largest, (0, padding), value=-torch.inf).view(-1, GROUP).amax(dim=1)

    def _spread(self, of_group: Tensor) -> Tensor:
        return of_group.repeat_interleave(GROUP)[: self.case.k_len]

    def tiles(self) -> Iterator[Tile]:
        """All query tiles; P is what dS uses (docs/numerics.md, section 4)."""
        onepass = self.case.mode == "onepass"
        for start in range(0, self.case.q_len, INTERVAL):
            span = slice(start, min(start + INTERVAL, self.case.q_len))
            acc, factor, visible = self.scores(span)
            dp = self.dp(span)
            if start // INTERVAL in hopper.FORGETTING:
                e = torch.full((self._groups,), -torch.inf, device=DEVICE)
            for first in range(0, span.stop - span.start, TILE):
                part = slice(first, min(first + TILE, span.stop - span.start))
                rows = slice(span.start + part.start, span.start + part.stop)
                log2, seen = acc[part].double() * factor[part].double(), visible[part]
                if onepass:
                    p, e = self._rising(acc[part], factor[part], seen, self.c[rows], e)
                else:
                    p = torch.exp2(log2 - self.c[rows].double()[:, None])
                yield Tile(rows, torch.where(seen, p.double(), 0.0), torch.where(seen, dp[part], 0.0), seen)

    def _rising(self, acc: Tensor, factor: Tensor, seen: Tensor, c: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """P from codes, and the exponents of the groups of keys after this tile: they rise where a code is full."""
        own = self._by_group(torch.where(seen, torch.ceil(acc * factor) - c[:, None], -torch.inf)) + float(hopper.ROOM)
        e = torch.where(e.isneginf(), own, e)
        log2 = acc.double() * factor.double() - c.double()[:, None]
        for _ in range(2):
            exponent = torch.where(e.isneginf(), 0, e)
            codes = e4m3(torch.exp2(log2 + 8 - self._spread(exponent)))
            codes = torch.where(seen, codes, 0)
            e = torch.where(self._by_group(codes) == 448, torch.maximum(e, own), e)
        return codes.double() * torch.exp2(self._spread(exponent).double() - 8), e

    def residuals(self, delta: Tensor) -> Tensor:
        """|sum dS| / sum |dS| before the cast, by row, with a backward's true delta [rows]; NaN for rows of fewer than
        two keys and where dS is zero."""
        delta_prime = delta.to(DEVICE).double() * self.w.double()
        found = torch.full((self.case.q_len,), torch.nan, dtype=torch.float64, device=DEVICE)
        for tile in self.tiles():
            ds = tile.p * torch.where(tile.visible, tile.dp - delta_prime[tile.rows][:, None], 0.0)
            usual = (tile.visible.sum(dim=1) >= 2) & (ds != 0).any(dim=1)
            ratio = ds.sum(dim=1).abs() / ds.abs().sum(dim=1)
            found[tile.rows] = torch.where(usual, ratio, torch.nan)
        return found

    def dv_of_forward_codes(self) -> Tensor:
        """dV from the forward's own codes of P (one reference for a row and 64 keys) with exact sums: what no choice of
        exponents in the backward can beat by much. FP64 [keys, head_dim]; hopper's dO codes."""
        d_dv = blocks.quantise(self.stats.w_dv[:, None] * self.d_o, INTERVAL)
        right = torch.from_numpy(
            d_dv.codes.astype(np.float64) * np.repeat(d_dv.scale, INTERVAL)[: self.case.q_len, None]
        ).to(DEVICE)
        dv = torch.zeros(self.case.k_len, right.shape[1], dtype=torch.float64, device=DEVICE)
        tiles = -(-self.case.k_len // TILE)
        padding = tiles * TILE - self.case.k_len
        for start in range(0, self.case.q_len, INTERVAL):
            span = slice(start, min(start + INTERVAL, self.case.q_len))
            acc, factor, seen = self.scores(span)
            x = torch.where(seen, acc * factor, -torch.inf)
            b = torch.nn.functional.pad(x, (0, padding), value=-torch.inf).view(x.shape[0], tiles, TILE).amax(dim=2)
            b = torch.where(b.isneginf(), 0, b.ceil()).repeat_interleave(TILE, dim=1)[:, : self.case.k_len].double()
            log2 = torch.where(seen, acc.double() * factor.double(), -torch.inf)
            p = e4m3(torch.exp2(log2 + 8 - b)).double() * torch.exp2(b - 8 - self.c[span].double()[:, None])
            dv += torch.where(seen, p, 0.0).T @ right[span]
        return dv
