"""A small transformer on ``dm_attn_func`` and the ways to train it on several ranks; FP32 weights, BF16 autocast."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from attention64 import same_bits
from delta_matching import dm_attn_func
from ranks import here

HIDDEN, HEAD_DIM, Q_HEADS, KV_HEADS = 64, 64, 2, 1


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN) for _ in range(2)])
        self.qkv = nn.Linear(HIDDEN, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(Q_HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.gate = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=2)
        x = x + self.out(dm_attn_func(q, k, v, causal=True, mode=self.mode).flatten(2))
        y = self.norms[1](x)
        # Not silu: compiled by PyTorch 2.9 it rounds its BF16 gradient at other places than eagerly.
        return x + self.down(relu(self.gate(y)) * self.up(y))


class Checkpointed(nn.Module):
    """A block whose backward runs its forward again."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Model(nn.Module):
    """Two blocks that predict the next of 16 symbols."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.blocks = nn.ModuleList([Block(mode) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, 16, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.embed(symbols)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(mode: str, device: torch.device, how: str) -> nn.Module:
    """The model with the weights of seed 0.

    Args:
        how: "plain", "ddp", or "fsdp" with any of " checkpoint" and " compile" after it.
    """
    torch.manual_seed(0)
    model: nn.Module = Model(mode).to(device)
    if how == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if how == "plain":
        return model
    for index, block in enumerate(model.blocks):
        if "checkpoint" in how:
            block = Checkpointed(block)
        if "compile" in how:
            # On the CPU inductor would spend minutes on C++.
            block.compile(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
        model.blocks[index] = block
        fully_shard(block)
    fully_shard(model)
    return model


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device, length: int = 33) -> Tensor:
    """On the sequence that belongs to ``step`` and ``rank``: symbols that go up by one or two, which can be learned."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    strides = torch.randint(1, 3, (1, length + 1), generator=generator)
    symbols = (strides.cumsum(1) % 16).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(symbols[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), symbols[:, 1:].flatten())


def train(mode: str, how: str, steps: int) -> list[float]:
    """This rank's losses."""
    torch._dynamo.reset()
    rank, where = dist.get_rank(), here()
    model = build(mode, where, how)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, rank, where)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_agree(mode: str, how: str) -> list[str]:
    """The parameters whose gradient has other bits than the mean of what one process gets for each rank's sequence."""
    torch._dynamo.reset()
    rank, where = dist.get_rank(), here()
    model = build(mode, where, how)
    loss_of(model, 0, rank, where).backward()
    means: list[Tensor] = []
    for other in range(dist.get_world_size()):
        plain = build(mode, where, "plain")
        loss_of(plain, 0, other, where).backward()
        parts = [p.grad / dist.get_world_size() for p in plain.parameters()]
        means = [a + b for a, b in zip(means, parts, strict=True)] if means else parts
    differ = []
    for (name, parameter), mean in itertools.zip_longest(model.named_parameters(), means):
        full = getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)()
        if not same_bits(full, mean):
            differ.append(name)
    return differ
