"""The attention of a model, by name: PyTorch's, this project's, or a simulation of it."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from delta_matching import dm_attn_func

from ..config import REFERENCE, AttentionConfig


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by PyTorch's ``scaled_dot_product_attention``, in the dtype of q."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # In FP32 the fused backward on a GPU has no fixed order of its sums.
    fixed = q.device.type == "cuda" and q.dtype == torch.float32
    with sdpa_kernel(SDPBackend.MATH) if fixed else contextlib.nullcontext():
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    return o.transpose(1, 2)


def rounded(x: Tensor) -> Tensor:
    """BF16's value of x in FP32; its gradient passes unrounded."""
    wide = x.float()
    return wide + (x.to(torch.bfloat16).float() - wide).detach()


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention in FP32 of q, k and v rounded to BF16, by plain operations: N x N floats a head."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (rounded(x).transpose(1, 2) for x in (q, k, v))
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (torch.softmax(s.masked_fill(hidden, -math.inf), -1) @ v).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig) -> Tensor:
    """Causal attention with a scale of ``1 / sqrt(head_dim)``.

    Args:
        q: ``[batch, length, heads, head_dim]``, FP32 or BF16.
        k, v: ``[batch, length, kv_heads, head_dim]`` in q's dtype.
        config: which attention. All but ``exact`` round q, k and v to BF16 first.

    Returns: ``o`` in q's shape and dtype.
    """
    if config.mode == "exact":
        return exact(q, k, v)
    if config.mode == REFERENCE:
        return reference(q, k, v).to(q.dtype)
    if config.by_torch or (config.numerics == "paper" and q.device.type == "cuda"):
        from .simulated import Recipe, attention

        centre = config.centre or ("qk" if config.numerics == "hopper" else "k")
        recipe = Recipe(config.mode, config.numerics, centre, config.normaliser)
        return attention(q, k, v, recipe, causal=True, softmax_scale=1.0 / math.sqrt(q.shape[-1]))
    low = (x.to(torch.bfloat16) for x in (q, k, v))
    o = dm_attn_func(*low, causal=True, mode=config.mode, numerics=config.numerics, centre=config.centre)
    return o.to(q.dtype)
