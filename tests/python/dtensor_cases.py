"""DTensors against one process, in the processes of :mod:`ranks`: on GPUs under NCCL, else on the CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attention64 import bf16, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func
from ranks import here


def draw(batch=3, length=34, q_heads=8, kv_heads=2, head_dim=64):
    torch.manual_seed(1)
    return [bf16(batch, length, heads, head_dim).to(here()) for heads in (q_heads, kv_heads, kv_heads, q_heads)]


def agree(placements, compiled=False, mode="matched"):
    """o, lse, dq, dk, dv of DTensors against one process's, in bits, and where o and the gradients are."""
    mesh = init_device_mesh(here().type, (2, 1))
    torch._dynamo.reset()

    def layer(q, k, v):
        o, lse = dm_attn_func(q, k, v, causal=True, return_lse=True, mode=mode)
        # A compiled graph's backward wants a DTensor for each output that has a gradient (Torch says so).
        return o, lse.detach()

    x = draw()
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    o, lse = layer(*leaves)
    one = (o, lse, *torch.autograd.grad(o, leaves, x[3]))
    *leaves, d_o = (distribute_tensor(t, mesh, placements) for t in x)
    leaves = [t.detach().requires_grad_() for t in leaves]
    if compiled:
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    o, lse = layer(*leaves)
    grads = torch.autograd.grad(o, leaves, d_o)
    same = [same_bits(a.full_tensor(), b) for a, b in zip((o, lse, *grads), one, strict=True)]
    placed = all(tuple(t.placements) == tuple(placements) for t in (o, *grads))
    return same, placed, o.shape == one[0].shape and lse.shape == one[1].shape and o.stride() == one[0].stride()


def packed():
    mesh = init_device_mesh(here().type, (2,))
    offsets = torch.tensor([0, 13, 13, 34], dtype=torch.int32, device=here())
    x = [t[0] for t in draw(1)]

    def layer(q, k, v, offsets):
        return dm_attn_varlen_func(q, k, v, offsets, offsets, 21, 21, causal=True, return_lse=True)

    leaves = [t.clone().requires_grad_() for t in x[:3]]
    o, lse = layer(*leaves, offsets)
    one = (o, lse, *torch.autograd.grad(o, leaves, x[3]))
    same = []
    for cu_seqlens in (offsets, distribute_tensor(offsets, mesh, [Replicate()])):
        *leaves, d_o = (distribute_tensor(t, mesh, [Shard(1)]) for t in x)
        leaves = [t.detach().requires_grad_() for t in leaves]
        o, lse = layer(*leaves, cu_seqlens)
        grads = torch.autograd.grad(o, leaves, d_o)
        same += [same_bits(a.full_tensor(), b) for a, b in zip((o, lse, *grads), one, strict=True)]
    return same


class Attention(nn.Module):
    """Four query heads, two KV heads; how many of them are here follows from what the projections return."""

    def __init__(self, hidden: int = 32, head_dim: int = 64) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden, 4 * head_dim, bias=False)
        self.k, self.v = (nn.Linear(hidden, 2 * head_dim, bias=False) for _ in range(2))
        self.o = nn.Linear(4 * head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        return self.o(dm_attn_func(q, k, v, causal=True).flatten(2))


def tensor_parallel(local: bool):
    """The distance from one process, and whether the gradients of the projections keep their bits."""
    mesh = init_device_mesh(here().type, (2,))
    torch.manual_seed(1)
    x = bf16(2, 33, 32).to(here())
    one, many = (Attention().to(here(), torch.bfloat16) for _ in range(2))
    many.load_state_dict(one.state_dict())
    column = {name: ColwiseParallel(use_local_output=local) for name in ("q", "k", "v")}
    parallelize_module(many, mesh, {**column, "o": RowwiseParallel()})
    outputs = []
    for model in (one, many):
        out = model(x)
        # A gradient that does not depend on the output, which the two round differently.
        out.backward(torch.ones_like(out))
        outputs.append(out.detach().double())
    distance = ((outputs[0] - outputs[1]).norm() / outputs[0].norm()).item()
    same = [same_bits(getattr(many, n).weight.grad.full_tensor(), getattr(one, n).weight.grad) for n in ("q", "k", "v")]
    return distance, same
