"""E4M3 codes and layouts of simulated.py: what docs/numerics.md, section 1, does to blocks, on whole tensors.

Codes are held dequantised, FP32. A block whose largest magnitude is NaN or infinite becomes NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64  # queries and keys of a tile; keys of K and V that share a scale; keys of a row that share P's reference
E4M3_MAX = 448.0
AMAX_FLOOR = 2.0**-110  # keeps 448 / amax finite
# A tensor: a number would be multiplied by 1 / amax, whose two roundings flip codes of BF16 values that lie on a tie.
_LARGEST = torch.tensor(E4M3_MAX, device="cpu")


def cast(x: Tensor) -> Tensor:
    """The nearest E4M3 number, saturating. NaN stays, an infinity does not: scales turn it into NaN before."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def rounded(x: Tensor, amax: Tensor) -> Tensor:
    """x as codes with scale amax / 448 hold it. Where amax is NaN or infinite all of the block is NaN: 0 x inf."""
    amax = amax.clamp_min(AMAX_FLOOR)
    return cast(x * (_LARGEST / amax)) * (amax / E4M3_MAX)


def _pad(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows)) if rows else x


def _rounded_by_powers(x: Tensor, amax: Tensor) -> Tensor:
    """x as codes with the power of two at or above amax / 448 for a scale hold it; NaN as in ``rounded``."""
    unit = next_power(amax.clamp_min(AMAX_FLOOR) / E4M3_MAX) + amax * 0.0
    return cast(x / unit) * unit


def quantise(x: Tensor, block: int | None, powers: bool = False) -> Tensor:
    """[..., rows, C] as codes hold it, one scale for ``block`` rows or for the whole tensor: amax / 448, or with
    ``powers`` the power of two at or above it."""
    hold = _rounded_by_powers if powers else rounded
    if block is None:
        return hold(x, x.abs().amax())
    rows = x.shape[-2]
    blocks = _pad(x, -rows % block).unflatten(-2, (-1, block))
    return hold(blocks, blocks.abs().amax((-2, -1), keepdim=True)).flatten(-3, -2)[..., :rows, :]


def inverse(total: Tensor) -> Tensor:
    """1 / total, 0 for a row without keys."""
    return torch.where(total == 0, 0.0, 1.0 / total)


def next_power(x: Tensor) -> Tensor:
    """The smallest power of two at or above x > 0; 1 for 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.exp2((exponent - (mantissa == 0.5).to(exponent.dtype)).float())


def to_heads(x: Tensor, kv_heads: int, unit: int) -> Tensor:
    """[B, rows, heads, C] rounded to BF16 -> FP32 [H, G, rows, C], rows padded with zeros to a multiple of unit."""
    rows = x.shape[1]
    wide = x.bfloat16().transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return _pad(wide.unflatten(1, (kv_heads, -1)).flatten(0, 1), max(1, -(-rows // unit)) * unit - rows)


def from_heads(x: Tensor, like: Tensor) -> Tensor:
    """FP32 [H, G, padded rows, C] -> [B, rows, heads, C] with BF16 values in the dtype of ``like``."""
    batch, rows, heads, channels = like.shape
    return x[:, :, :rows].bfloat16().reshape(batch, heads, rows, channels).transpose(1, 2).to(like.dtype)


def quantise_tiles(x: Tensor, powers: bool) -> Tensor:
    """[..., N, K] as codes hold it, a scale for each 64 x 64 tile: amax / 448, or a power of two that brings amax into
    [128, 256)."""
    tiles = x.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))  # [..., N / 64, 64, K / 64, 64]
    amax = tiles.abs().amax((-3, -1), keepdim=True)
    if powers:
        unit = torch.exp2(torch.frexp(amax.clamp_min(AMAX_FLOOR))[1] - 8 + amax * 0.0)  # NaN if amax is not finite
        codes = cast(tiles / unit) * unit
    else:
        codes = rounded(tiles, amax)
    return codes.flatten(-2).flatten(-3, -2)
