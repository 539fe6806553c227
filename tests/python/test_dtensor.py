"""DTensor inputs over two processes: shards of the batch or of heads keep every bit, other placements are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attention64 import bf16, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func
from ranks import Ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def draw(batch=3, length=34, q_heads=8, kv_heads=2, head_dim=64):
    torch.manual_seed(1)
    return [bf16(batch, length, heads, head_dim) for heads in (q_heads, kv_heads, kv_heads, q_heads)]


def agree(placements, compiled=False, mode="matched"):
    """o, lse, dq, dk, dv of DTensors against one process's, in bits, and where o and the gradients are."""
    mesh = init_device_mesh("cpu", (2, 1))
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


PLACEMENTS = {
    "heads": [Shard(2), Replicate()],
    "batch, uneven": [Shard(0), Replicate()],
    "batch and heads": [Shard(0), Shard(2)],
    "replicated": [Replicate(), Replicate()],
}


@pytest.mark.parametrize("mode", ["matched", "onepass"])
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_the_bits_of_one_process(two, placements, mode):
    assert two.run(agree, PLACEMENTS[placements], False, mode) == [([True] * 5, True, True)] * 2


def test_compiled(two):
    assert two.run(agree, PLACEMENTS["heads"], True) == [([True] * 5, True, True)] * 2


def packed():
    mesh = init_device_mesh("cpu", (2,))
    offsets = torch.tensor([0, 13, 13, 34], dtype=torch.int32)
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


def test_packed_sequences(two):
    assert two.run(packed) == [[True] * 10] * 2


def refusals():
    mesh = init_device_mesh("cpu", (2,))
    q, k, v, _ = draw(2)

    def on(placement, *tensors):
        return [distribute_tensor(x, mesh, [placement]) for x in tensors]

    def offsets(placement):
        return distribute_tensor(torch.tensor([0, 34], dtype=torch.int32), mesh, [placement])

    partial = [DTensor.from_local(x, mesh, [Partial()]) for x in (q, k, v)]
    lse_leaf = [t.requires_grad_() for t in on(Shard(2), q, k, v)]
    calls = [
        lambda: dm_attn_func(*on(Shard(1), q, k, v)),
        lambda: dm_attn_func(*on(Shard(3), q, k, v)),
        lambda: dm_attn_func(*partial),
        lambda: dm_attn_func(*on(Shard(2), q, k), v),
        lambda: dm_attn_func(*on(Shard(2), q), *on(Replicate(), k, v)),
        lambda: dm_attn_func(*on(Shard(2), q, k[:, :, :1], v[:, :, :1])),
        # Parts that agree, 2 and 1 heads with one of k each, where the whole does not.
        lambda: dm_attn_func(*on(Shard(2), q[:, :, :3], k, v)),
        lambda: dm_attn_func(*(t.float() for t in on(Shard(2), q, k, v))),
        lambda: dm_attn_varlen_func(*on(Shard(0), q[0], k[0], v[0]), *([offsets(Replicate())] * 2), 34, 34),
        lambda: dm_attn_varlen_func(*on(Shard(1), q[0], k[0], v[0]), *([offsets(Shard(0))] * 2), 34, 34),
        lambda: dm_attn_func(*lse_leaf, return_lse=True)[1].sum().backward(),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("not refused")
    return messages


def test_refused(two):
    expected = [
        "RuntimeError: q: the sequence is sharded, S(1) of (Shard(dim=1),): shard heads or batch, or use "
        "delta_matching.parallel.dm_attn_ulysses on the local tensors",
        "RuntimeError: q: expected placements Replicate or a Shard of heads or batch, got (Shard(dim=3),)",
        "RuntimeError: q: expected placements Replicate or a Shard of heads or batch, got (Partial(",
        "TypeError: q, k and v: expected DTensors all three or none, got DTensor, DTensor, Tensor",
        "RuntimeError: k: expected q's mesh and placements (Shard(dim=2),), got (Replicate(),)",
        "RuntimeError: k and v have 1 heads over 2 shards: expected a multiple of the shards",
        "ValueError: q has 3 heads, k and v have 2",
        "TypeError: q: expected torch.bfloat16, got torch.float32",
        "RuntimeError: q: the sequence is sharded, S(0) of (Shard(dim=0),): shard heads or batch, or use "
        "delta_matching.parallel.dm_attn_ulysses_varlen on the local tensors",
        "RuntimeError: cu_seqlens: expected a plain tensor or Replicate, got (Shard(dim=0),)",
        "RuntimeError: lse is not differentiable",
    ]
    for messages in two.run(refusals):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), message


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
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = bf16(2, 33, 32)
    one, many = (Attention().to(torch.bfloat16) for _ in range(2))
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


@pytest.mark.parametrize("local", [True, False], ids=["local tensors", "DTensors"])
def test_tensor_parallel_over_heads(two, local):
    for distance, same in two.run(tensor_parallel, local):
        # The output is a sum of two BF16 parts, each rounded, and rounded once more: three times 2^-9 on average.
        assert distance < 3 * 2.0**-9 and same == [True] * 3, (distance, same)
