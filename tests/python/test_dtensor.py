"""DTensor inputs over two processes: shards of the batch or of heads keep every bit, other placements are refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from delta_matching import dm_attn_func, dm_attn_varlen_func
from dtensor_cases import agree, draw, packed, tensor_parallel
from ranks import Ranks, words


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


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
    return words(calls)


def test_refused(two):
    expected = [
        "RuntimeError: q: the sequence is sharded, placements (Shard(dim=1),): shard heads or batch, or use "
        "delta_matching.parallel.dm_attn_ulysses on the local tensors",
        "RuntimeError: q: expected placements Replicate or a Shard of heads or batch, got (Shard(dim=3),)",
        "RuntimeError: q: expected placements Replicate or a Shard of heads or batch, got (Partial(",
        "TypeError: q, k and v: expected DTensors all three or none, got DTensor, DTensor, Tensor",
        "RuntimeError: k: expected q's mesh and placements (Shard(dim=2),), got (Replicate(),)",
        "RuntimeError: k and v have 1 heads over 2 shards: expected a multiple of the shards",
        "ValueError: q has 3 heads, k and v have 2",
        "TypeError: q: expected torch.bfloat16, got torch.float32",
        "RuntimeError: q: the sequence is sharded, placements (Shard(dim=0),): shard heads or batch, or use "
        "delta_matching.parallel.dm_attn_ulysses_varlen on the local tensors",
        "RuntimeError: cu_seqlens: expected a plain tensor or Replicate, got (Shard(dim=0),)",
        "RuntimeError: lse is not differentiable",
    ]
    for messages in two.run(refusals):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), message


@pytest.mark.parametrize("local", [True, False], ids=["local tensors", "DTensors"])
def test_tensor_parallel_over_heads(two, local):
    for distance, same in two.run(tensor_parallel, local):
        # The output is a sum of two BF16 parts, each rounded, and rounded once more: three times 2^-9 on average.
        assert distance < 3 * 2.0**-9 and same == [True] * 3, (distance, same)
