"""Two ranks train a small model: gradients are the mean of one process's, and runs repeat bit by bit."""

from __future__ import annotations

import pytest

import tiny_model
from attention64 import MODES
from ranks import Ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp checkpoint", "fsdp checkpoint compile"])
def test_gradients_are_the_mean_of_one_process(two, how):
    """Two numbers have one sum in whatever order, and halving is exact: nothing is left to tolerate."""
    assert two.run(tiny_model.gradients_agree, "matched", how) == [[], []]


@pytest.mark.parametrize("mode", MODES)
def test_training_repeats(two, mode):
    how = "fsdp checkpoint compile" if mode == "onepass" else "fsdp checkpoint"
    first = two.run(tiny_model.train, mode, how, 5)
    assert first == two.run(tiny_model.train, mode, how, 5)
    assert first[0] != first[1] and all(losses[-1] < losses[0] - 0.3 for losses in first), first


def test_modes_and_ways_meet(two):
    """Sharding, checkpoints and graphs change no loss; the modes share the first one, as they share the forward."""
    expected = two.run(tiny_model.train, "matched", "ddp", 3)
    assert two.run(tiny_model.train, "matched", "fsdp checkpoint compile", 3) == expected
    stale = two.run(tiny_model.train, "stale", "ddp", 3)
    assert [x[0] for x in stale] == [x[0] for x in expected] and stale != expected
