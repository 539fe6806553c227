"""A decoder language model in the shape that most of them have, small enough to read in one sitting."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .attention import attend
from .config import AttentionConfig, ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean x² + eps) times learned gains, computed in FP32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.width, eps=config.norm_eps)
    return RMSNorm(config.width, config.norm_eps)


def rotary(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin ``[length, 1, dim]`` of rotary positions, FP32; channel c turns with channel c + dim/2."""
    rates = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rates
    angles = torch.cat((angles, angles), -1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x ``[batch, length, heads, dim]`` turned by its position."""
    cos, sin = turns
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; q_norm and k_norm are over head_dim, with gains that all heads share."""

    def __init__(self, model: ModelConfig, attention: AttentionConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = model.heads, model.kv, model.dim
        self.config = attention
        self.q = nn.Linear(model.width, self.heads * self.dim, bias=False)
        self.k = nn.Linear(model.width, self.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(model.width, self.kv_heads * self.dim, bias=False)
        self.o = nn.Linear(self.heads * self.dim, model.width, bias=False)
        self.q_norm = RMSNorm(self.dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(self.dim, model.norm_eps) if model.qk_norm else None

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.dim)
        k = self.k(x).view(batch, length, self.kv_heads, self.dim)
        v = self.v(x).view(batch, length, self.kv_heads, self.dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        return self.o(self.core(q, k, v).reshape(batch, length, -1))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What stands between the projections; an experiment may look at its tensors here."""
        return attend(q, k, v, self.config)


class MLP(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.kind = model.mlp
        if model.mlp == "swiglu":
            self.gate = nn.Linear(model.width, model.hidden, bias=model.mlp_bias)
        self.up = nn.Linear(model.width, model.hidden, bias=model.mlp_bias)
        self.down = nn.Linear(model.hidden, model.width, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(functional.silu(self.gate(x)) * self.up(x))
        activation = functional.silu if self.kind == "silu" else functional.gelu
        return self.down(activation(self.up(x)))


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); in a hybrid some layers mix tokens by Gated DeltaNet."""

    def __init__(self, model: ModelConfig, attention: AttentionConfig, attends: bool) -> None:
        super().__init__()
        self.norm_attention = make_norm(model)
        if attends:
            self.attention = Attention(model, attention)
        else:
            from .gated_delta import GatedDeltaNet

            heads = model.delta_heads or max(1, model.width // model.delta_head_dim)
            self.delta = GatedDeltaNet(model.width, heads, model.delta_head_dim, model.norm_eps)
        self.attends = attends
        self.norm_mlp = make_norm(model)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        normed = self.norm_attention(x)
        x = x + (self.attention(normed, turns) if self.attends else self.delta(normed))
        return x + self.mlp(self.norm_mlp(x))


class Decoder(nn.Module):
    """``ids [batch, length]`` int64 -> logits ``[batch, length, vocabulary]``.

    Errors: ValueError for sequences longer than ``model.context``.
    """

    def __init__(self, model: ModelConfig, attention: AttentionConfig, vocabulary: int) -> None:
        super().__init__()
        self.config, self.vocabulary = model, vocabulary
        self.embed = nn.Embedding(vocabulary, model.width)
        self.positions = nn.Embedding(model.context, model.width) if model.position == "learned" else None
        self.layers = nn.ModuleList(Layer(model, attention, _attends(model, at)) for at in range(model.layers))
        self.norm = make_norm(model)
        self.head = None if model.tie else nn.Linear(model.width, vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; those that write into the residual stream smaller, so that depth does not raise it."""
        residual = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if ".delta" in name:  # has its own
                continue
            if isinstance(module, nn.Linear):
                last = name.endswith((".o", ".down"))
                nn.init.normal_(module.weight, std=residual if last else self.config.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.init_std)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length > self.config.context:
            raise ValueError(f"ids: expected at most {self.config.context} tokens (model.context), got {length}")
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions.weight[:length]
        turns = None
        if self.config.position == "rope":
            turns = rotary(length, self.config.dim, self.config.rope_theta, ids.device)
        for layer in self.layers:
            x = layer(x, turns)
        x = self.norm(x)
        return functional.linear(x, self.embed.weight) if self.head is None else self.head(x)

    def attention_layers(self) -> list[tuple[str, Attention]]:
        """The layers that attend, by the name of their module."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Attention)]

    def set_attention(self, attention: AttentionConfig) -> None:
        """Attend in another way from now on; weights stay."""
        for _, module in self.attention_layers():
            module.config = attention


def _attends(model: ModelConfig, at: int) -> bool:
    return not model.hybrid_every or at % model.hybrid_every == model.hybrid_every - 1


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats a token, FP32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
