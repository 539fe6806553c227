"""Small models for the live probe's tests: they keep what their attention was given, to be probed offline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from delta_matching import dm_attn_func, dm_attn_varlen_func

WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 64


class RMSNorm(nn.Module):
    """A QK-norm: the weight is the gain, or 1 + weight in the subclass that is named like Gemma's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def gain(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * self.gain()


class Gemma3RMSNorm(RMSNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        nn.init.zeros_(self.weight)

    def gain(self) -> Tensor:
        return 1 + self.weight


class Attention(nn.Module):
    """``kind``: "dm", "varlen" (the batch as one packed sequence) or "sdpa"."""

    def __init__(self, kind: str = "dm", norm: type[nn.Module] | None = None, **options: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(Q_HEADS * HEAD_DIM, WIDTH, bias=False)
        if norm is not None:
            self.q_norm, self.k_norm = norm(HEAD_DIM), norm(HEAD_DIM)
        self.kind, self.options = kind, {"causal": True, **options}
        self.kept: list[tuple[Tensor, ...]] = []  # q, k, v, o of each call

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind == "sdpa":
            options = {"is_causal": self.options["causal"], "enable_gqa": True}
            options.update({name: value for name, value in self.options.items() if name != "causal"})
            o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            return o.transpose(1, 2)
        if self.kind == "varlen":
            lengths = torch.tensor([0, 5, 5, 5 + q.shape[1]], dtype=torch.int32)
            q, k, v = (torch.cat((x[0, :5], x[1])) for x in (q, k, v))
            longest = int(lengths[-1])
            o = dm_attn_varlen_func(q, k, v, lengths, lengths, longest, longest, **self.options)
            self.kept.append((q, k, v, o))
            return torch.stack((o[5:], o[5:]))
        return dm_attn_func(q, k, v, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).to(torch.bfloat16).unflatten(-1, (Q_HEADS + 2 * KV_HEADS, HEAD_DIM))
        q, k, v = packed.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=2)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q).to(torch.bfloat16), self.k_norm(k).to(torch.bfloat16)
        o = self.attend(q, k, v)
        if self.kind != "varlen":
            self.kept.append((q, k, v, o))
        if self.kept[-1][3].requires_grad:
            self.kept[-1][3].retain_grad()
        return x + self.out(o.flatten(2).float())


class Model(nn.Module):
    """``kinds``: of its layers; ``checkpointed``: None, or use_reentrant."""

    def __init__(self, *kinds: str, checkpointed: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(kind, **options) for kind in kinds)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        return x


def batch(tokens: int = 24, size: int = 2) -> Tensor:
    return torch.randn(size, tokens, WIDTH, requires_grad=True)


def train_step(model: nn.Module, tokens: int = 24, size: int = 2) -> None:
    """Forward and backward on random input; the gradients stay."""
    model(batch(tokens, size)).square().mean().backward()
