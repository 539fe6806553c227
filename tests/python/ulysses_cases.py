"""Ulysses against one process, in the processes of :mod:`ranks`: on GPUs under NCCL, else on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from attention64 import bf16, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func
from delta_matching.parallel import dm_attn_ulysses, dm_attn_ulysses_varlen
from ranks import here

# BF16 has 8 significant bits.
BF16 = 2.0**-8


def draw(batch: int, length: int, q_heads: int, kv_heads: int, head_dim: int = 64):
    """q, k, v and dO of the whole sequence, the same in every process."""
    torch.manual_seed(1)
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    return [bf16(batch, length, count, head_dim).to(here()) for count in heads]


def whole(tensors, function=dm_attn_func, *arguments, **options):
    """What one process gets: o, dq, dk, dv."""
    *leaves, d_o = (x.detach().clone().requires_grad_() for x in tensors)
    o = function(*leaves, *arguments, **options)
    return o.detach(), *torch.autograd.grad(o, leaves, d_o.detach())


def slices(tensors, lengths, dim):
    rank = dist.get_rank()
    first = sum(lengths[:rank])
    # Not contiguous, as slices of a layer's output are.
    return [x.narrow(dim, first, lengths[rank]) for x in tensors]


def sliced(tensors, lengths, dim, function, /, *arguments, **options):
    *leaves, d_o = (x.detach().requires_grad_() for x in slices(tensors, lengths, dim))
    o = function(*leaves, *arguments, **options)
    assert o.shape == leaves[0].shape and o.is_contiguous()
    return o.detach(), *torch.autograd.grad(o, leaves, d_o.detach())


def attend(sizes, mode, causal, lengths, equal, **more):
    """Ulysses against one process; returns the names of the tensors whose bits differ and the tensors themselves."""
    x = draw(*sizes)
    given = {} if equal else {"lengths": lengths}
    mine = sliced(x, lengths, 1, dm_attn_ulysses, mode=mode, causal=causal, **given, **more)
    one = slices(whole(x, mode=mode, causal=causal), lengths, 1)
    return [name for name, a, b in zip(("o", "dq", "dk", "dv"), mine, one, strict=True) if not same_bits(a, b)]


def divided(sizes, mode):
    """How far split groups are from one process, as a share of the bound; and which outputs keep their bits."""
    x = draw(*sizes)
    world = dist.get_world_size()
    lengths = (sizes[1] // world,) * world
    mine = sliced(x, lengths, 1, dm_attn_ulysses, mode=mode, causal=True, split_groups=True)
    one = slices(whole(x, mode=mode, causal=True), lengths, 1)
    same = [same_bits(a, b) for a, b in zip(mine, one, strict=True)]
    # The parts alone, as the ranks compute them: as many query heads of the one group each.
    share = sizes[2] // world
    parts = [
        whole([x[0][:, :, a : a + share], x[1], x[2], x[3][:, :, a : a + share]], mode=mode, causal=True)
        for a in range(0, sizes[2], share)
    ]
    worst = 0.0
    for index in (2, 3):
        pieces = [slices([part[index]], lengths, 1)[0].double() for part in parts]
        a, b = mine[index].double(), one[index].double()
        # A rounding of each part, one of their sum, one of what one process has. FP32 sums differ by their order alone,
        # some 2^-24 of the same magnitudes each: 1 % is room for four million of them.
        bound = BF16 * (sum(piece.abs() for piece in pieces) + a.abs() + b.abs()) * 1.01
        worst = max(worst, ((a - b).abs() / bound.clamp_min(1e-30)).max().item())
    return same, worst


ENDS = (0, 13, 13, 50, 60)


def packed(sizes, mode, lengths, padding=0):
    """Slices of a pack that cut through its sequences; NaN past the last offset."""
    length = sizes[1]
    x = [t[0] for t in draw(*sizes)]
    for t in x:
        t[length - padding :] = torch.nan
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    mine = sliced(x, lengths, 0, dm_attn_ulysses_varlen, offsets, 37, lengths=lengths, mode=mode, causal=True)
    one = whole(x, dm_attn_varlen_func, offsets, offsets, 37, 37, mode=mode, causal=True)
    return [same_bits(a, b) for a, b in zip(mine, slices(one, lengths, 0), strict=True)]
