"""Two GPUs under NCCL: sequence parallelism, DTensors, DDP and FSDP2; the twins of tests in tests/python.

Where the twin stands in for the GPU, Gloo stands in for NCCL.
"""

from __future__ import annotations

import pytest
import torch
from gpu_calls import MODES, ON_GPU
from torch.distributed.tensor import Replicate, Shard

import dtensor_cases
import tiny_model
import ulysses_cases
from attention64 import TOLERANCE
from ranks import Ranks

_TOO_FEW = ON_GPU and torch.cuda.device_count() < 2
pytestmark = pytest.mark.skipif(_TOO_FEW, reason=f"needs two GPUs, Torch finds {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def two():
    with Ranks(2, "nccl" if ON_GPU else "gloo") as ranks:
        yield ranks


SIZES = {
    "MHA": (1, 130, 4, 4),
    "GQA 4:1": (1, 130, 8, 2),
    "MQA: one rank idles": (1, 130, 4, 1),
    "MQA, batch 2": (2, 130, 2, 1),
    "GQA, uneven units": (1, 130, 6, 3),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_ulysses(two, mode, sizes, head_dim):
    assert two.run(ulysses_cases.attend, (*SIZES[sizes], head_dim), mode, True, (65, 65), True) == [[], []]


@pytest.mark.parametrize("lengths", [(100, 30), (130, 0), (1, 129)], ids=str)
def test_ulysses_of_uneven_lengths(two, lengths):
    assert two.run(ulysses_cases.attend, (2, 130, 4, 2), "matched", False, lengths, False) == [[], []]


@pytest.mark.parametrize("mode", MODES)
def test_ulysses_with_split_groups(two, mode):
    for same, worst in two.run(ulysses_cases.divided, (1, 130, 4, 1), mode):
        assert same[:2] == [True, True] and 0 < worst < 1, (same, worst)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_ulysses_of_packed_sequences(two, mode, kv_heads):
    """With NaN in the padding."""
    assert two.run(ulysses_cases.packed, (1, 64, 4, kv_heads), mode, (41, 23), 4) == [[True] * 4] * 2


PLACEMENTS = {
    "heads": [Shard(2), Replicate()],
    "batch, uneven": [Shard(0), Replicate()],
    "batch and heads": [Shard(0), Shard(2)],
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_dtensor(two, placements, compiled):
    results = two.run(dtensor_cases.agree, PLACEMENTS[placements], compiled, "onepass")
    assert results == [([True] * 5, True, True)] * 2


def test_dtensor_of_packed_sequences(two):
    assert two.run(dtensor_cases.packed) == [[True] * 10] * 2


@pytest.mark.parametrize("local", [True, False], ids=["local tensors", "DTensors"])
def test_tensor_parallel_over_heads(two, local):
    for distance, _ in two.run(dtensor_cases.tensor_parallel, local):
        # cuBLAS may round the projections otherwise where they are half as wide, so that both are FP8 attention of
        # nearly the same numbers: each within the tolerance of the exact one.
        assert distance < TOLERANCE["o"], distance


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp checkpoint"])
def test_gradients_are_the_mean_of_one_process(two, how):
    """Two numbers have one sum in whatever order, and halving is exact: nothing is left to tolerate."""
    assert two.run(tiny_model.gradients_agree, "matched", how) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_training_repeats(two, mode):
    """Checkpointed, compiled and sharded: twenty steps, twice, with the same bits in every loss."""
    first = two.run(tiny_model.train, mode, "fsdp checkpoint compile", 20)
    assert first == two.run(tiny_model.train, mode, "fsdp checkpoint compile", 20)
    assert first[0] != first[1] and all(losses[-1] < losses[0] - 0.3 for losses in first), first
