"""A live probe beside a training: it changes no bit, takes everything off again, keeps nothing, and costs little."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack

from attention64 import bf16, same_bits
from delta_matching import _record, probe
from delta_matching.live import LiveProbe
from live_models import Model, train_step


def trained(steps: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(5)
    model = Model("dm", "sdpa", "varlen")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    live = probe(model, **options) if options else None
    if live is not None:
        live.__enter__()
    for _ in range(steps):
        train_step(model)
        optimiser.step()
        optimiser.zero_grad()
        if live is not None:
            live.step()
    if live is not None:
        live.__exit__(None, None, None)
    return [x.detach() for x in model.parameters()]


def test_training_keeps_its_bits():
    for a, b in zip(trained(4), trained(4, every=2), strict=True):
        assert same_bits(a, b)


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_other_steps_run_without_the_probe():
    model = Model("dm", "sdpa")
    with probe(model, every=3, start=1) as live:
        for step in range(1, 8):
            due = step % 3 == 0
            assert live.recording is due and (_record.active is not None) is due
            assert hooks_on(model) == (2 * len(list(model.modules())) if due else 0)
            train_step(model)
            assert _len_torch_function_stack() == 0
            live.step()
            assert (live.last is None) is (step < 3)
    assert live.last["step"] == 6


@pytest.mark.parametrize("where", ["training", "attention"])
def test_an_exception_takes_everything_off(where):
    model = Model("dm", "sdpa")
    if where == "attention":
        model.layers[1].options["nonsense"] = 1
    with pytest.raises((KeyboardInterrupt, TypeError)), probe(model) as live:
        train_step(model)
        raise KeyboardInterrupt
    assert hooks_on(model) == 0 and _record.active is None and _len_torch_function_stack() == 0
    assert live.last is None  # a step that was not concluded
    with pytest.raises(RuntimeError, match="outside the with block"):
        live.step()


def test_nothing_of_the_model_is_kept():
    model = Model("dm", "sdpa")
    with probe(model, every=1) as live:
        train_step(model)
        live.step()
        train_step(model)  # left open
    for layer in model.layers:
        layer.kept.clear()
    gone = [weakref.ref(model), *(weakref.ref(x) for x in model.parameters())]
    del model, layer
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert live.last["step"] == 0


def test_a_graph_that_outlives_its_step_is_ignored():
    model = Model("sdpa")
    with probe(model, every=2) as live:
        capture = live._capture
        loss = model(torch.randn(1, 8, 32)).sum()
        live.step()
        loss.backward()
        live.step()
    assert capture.recorded == {}
    assert live.last["step"] == 0 and live.last["layers"] == []


def test_one_probe_at_a_time():
    model = Model("dm")
    with probe(model) as live, pytest.raises(RuntimeError, match="another live probe is recording"), probe(model):
        pass
    with pytest.raises(RuntimeError, match="one with block"):
        live.__enter__()
    assert _record.active is None


def test_the_background_measures_the_same():
    lines = []
    for background in (False, True):
        torch.manual_seed(6)
        model = Model("dm", "sdpa")
        with probe(model, every=2, background=background) as live:
            for _ in range(3):
                train_step(model)
                live.step()
        assert live.last["step"] == 2
        lines.append(live.last)
    assert lines[0]["layers"] == lines[1]["layers"]


def test_cost_is_small_at_every_100():
    """What a probed step costs more, over a hundred steps, is below 2 % of the hundred steps. One thread, since two
    would wait for each other where the machine is busy; the best of five, since others only add."""
    model = Model("dm", "dm")
    for _ in range(3):
        train_step(model, 128)

    def best(measure: bool) -> float:
        times = []
        for _ in range(5):
            with probe(model, start=0 if measure else 1, threads=1) as live:
                began = time.perf_counter()
                train_step(model, 128)
                live.step()
                times.append(time.perf_counter() - began)
        return min(times)

    plain, probed = best(False), best(True)
    assert (probed - plain) / (100 * plain) < 0.02, (plain, probed)


# ---- arguments -----------------------------------------------------------------------------------------------------


def test_both_forms_have_one_name():
    assert isinstance(probe(nn.Linear(1, 1)), LiveProbe)
    tensors = {name: bf16(8, 2, 64) for name in ("q", "k", "v", "d_o")}
    assert probe(**tensors) == probe(*tensors.values())
    with pytest.raises(TypeError, match="every"):
        probe(**tensors, every=3)
    with pytest.raises(TypeError, match="causal"):
        probe(nn.Linear(1, 1), causal=True)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"every": 0}, ValueError, "every: expected at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every: expected an int, got float"),
        ({"every": True}, TypeError, "every: expected an int, got bool"),
        ({"max_tokens": 1}, ValueError, "max_tokens: expected at least 2"),
        ({"heads": 0}, ValueError, "heads: expected at least 1"),
        ({"heads": []}, ValueError, "heads: expected different head numbers"),
        ({"heads": [1, 1]}, ValueError, "heads: expected different head numbers"),
        ({"heads": [-1]}, ValueError, "heads: expected at least 0"),
        ({"heads": "all"}, TypeError, "heads: expected a number or a list"),
        ({"modes": ["mached"]}, ValueError, "modes: expected one of"),
        ({"modes": []}, ValueError, "modes: expected at least one"),
        ({"numerics": "fp8"}, ValueError, "numerics: expected one of"),
        ({"centre": "q"}, ValueError, "centre: expected one of"),
        ({"start": -1}, ValueError, "start: expected at least 0"),
        ({"threads": -1}, ValueError, "threads: expected at least 0"),
    ],
)
def test_bad_arguments_are_named(options, error, says):
    with pytest.raises(error, match=says):
        probe(nn.Linear(1, 1), **options)
