"""probe(model): what it records of a training, that it is what the offline probe says, and that it changes nothing."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from attention64 import bf16, same_bits
from delta_matching import _record, probe
from delta_matching.live import LiveProbe
from live_models import HEAD_DIM, Attention, Model, train_step


def one_line(model: nn.Module, tokens: int = 24, **options: Any) -> dict[str, Any]:
    with probe(model, **options) as live:
        train_step(model, tokens)
        live.step()
    assert live.last is not None
    return live.last


def offline(kept: tuple[Tensor, ...], live: dict[str, Any], rows: slice = slice(None), **options: Any) -> list[dict]:
    """The offline probe's entries for the heads of a live layer, from the tensors of the same call."""
    q, k, v, o = kept
    d_o = o.grad
    assert d_o is not None
    if q.dim() == 4:
        q, k, v, d_o = (x[0] for x in (q, k, v, d_o))
    modes = list(live["heads"][0]["modes"])
    heads = probe(*(x[rows] for x in (q, k, v, d_o)), modes=modes, **options)["heads"]
    return [heads[head["head"]] for head in live["heads"]]


def assert_same_numbers(live: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert len(live["heads"]) == len(expected)
    for mine, theirs in zip(live["heads"], expected, strict=True):
        assert mine["head"] == theirs["head"] and mine["entropy"] == theirs["entropy"]
        assert set(mine["modes"]) == set(theirs["modes"])
        for mode, numbers in theirs["modes"].items():
            shared = {name: value for name, value in mine["modes"][mode].items() if name != "pushed"}
            assert shared == {name: value for name, value in numbers.items() if name != "worst_head"}


# ---- what is recorded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["onepass", "stale"])
@pytest.mark.parametrize("causal", [True, False])
def test_numbers_are_those_of_the_offline_probe(mode, causal):
    model = Model("dm", "dm", mode=mode, causal=causal, softmax_scale=0.2)
    found = one_line(model, heads=3)
    assert [layer["layer"] for layer in found["layers"]] == ["layers.0", "layers.1"]
    for layer, module in zip(found["layers"], model.layers, strict=True):
        assert (layer["source"], layer["mode"], layer["calls"], layer["causal"]) == ("dm_attn_func", mode, 1, causal)
        assert (layer["q_heads"], layer["kv_heads"], layer["head_dim"]) == (4, 2, HEAD_DIM)
        assert (layer["tokens"], layer["k_tokens"], layer["cut_from"]) == (24, 24, None)
        assert [head["head"] for head in layer["heads"]] == [0, 1, 2]
        assert_same_numbers(layer, offline(module.kept[0], layer, causal=causal, softmax_scale=0.2))
    assert found["not_measured"] == []
    assert found["layers"][0]["softmax_scale"] == pytest.approx(0.2, rel=1e-6)  # the library's is FP32


def test_paper_numerics_are_measured_as_such():
    model = Model("dm", numerics="paper", centre="none")
    (layer,) = one_line(model)["layers"]
    assert (layer["numerics"], layer["centre"]) == ("paper", "none")
    assert_same_numbers(layer, offline(model.layers[0].kept[0], layer, numerics="paper", centre="none"))


def test_packed_sequences_give_their_longest():
    model = Model("varlen")  # sequences of 5, 0 and 24 rows
    (layer,) = one_line(model)["layers"]
    assert layer["source"] == "dm_attn_varlen_func" and layer["tokens"] == 24
    assert_same_numbers(layer, offline(model.layers[0].kept[0], layer, slice(5, None)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["dm", "sdpa", "varlen"])
def test_long_sequences_are_cut_to_their_first_tokens(kind, causal):
    model = Model(kind, causal=causal)
    (layer,) = one_line(model, max_tokens=16)["layers"]
    assert (layer["tokens"], layer["k_tokens"], layer["cut_from"]) == (16, 16, [24, 24])
    first = 5 if kind == "varlen" else 0
    assert_same_numbers(layer, offline(model.layers[0].kept[0], layer, slice(first, first + 16), causal=causal))


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"scale": 0.3}])
def test_sdpa_is_recorded(options):
    model = Model("sdpa", **options)
    (layer,) = one_line(model, heads=[3, 0])["layers"]
    assert (layer["source"], layer["mode"], layer["layer"]) == ("sdpa", None, "layers.0")
    assert [head["head"] for head in layer["heads"]] == [3, 0]
    assert list(layer["heads"][0]["modes"]) == ["stale", "matched"]
    arguments = {"causal": options.get("causal", True), "softmax_scale": options.get("scale")}
    assert_same_numbers(layer, offline(model.layers[0].kept[0], layer, **arguments))


class Sdpa(nn.Module):
    def forward(self, *args: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **options)


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ((8, 8, 2), {"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "attn_mask: expected None"),
        ((8, 8, 2), {"dropout_p": 0.5}, "dropout_p: expected 0, got 0.5"),
        ((8, 9, 2), {"is_causal": True}, "is_causal: expected as many queries as keys"),
    ],
)
def test_sdpa_that_cannot_be_reproduced_is_named(sizes, options, says):
    q_len, k_len, heads = sizes
    q, k = (torch.randn(1, heads, n, 64, requires_grad=True) for n in (q_len, k_len))
    model = Sdpa()
    with probe(model) as live:
        model(q, k, k, **options).sum().backward()
        live.step()
    assert live.last["layers"] == []
    assert [entry["layer"] for entry in live.last["not_measured"]] == ["Sdpa"]
    assert live.last["not_measured"][0]["reason"].startswith(says)


def test_sdpa_of_other_shapes_is_named():
    model = Sdpa()
    for shape, says in (((2, 8, 64), "expected 4 dimensions"), ((1, 2, 8, 32), "head_dim")):
        q = torch.randn(*shape, requires_grad=True)
        with probe(model) as live:
            model(q, q, q).sum().backward()
            live.step()
        assert says in live.last["not_measured"][0]["reason"]


def test_a_call_without_gradient_is_named_or_left_out():
    model = Model("sdpa")
    with probe(model) as live:
        with torch.no_grad():
            model(torch.randn(1, 8, 32))  # an evaluation is no part of training
        live.step()
    assert live.last["layers"] == live.last["not_measured"] == []
    with probe(model) as live:
        model(torch.randn(1, 8, 32))
        live.step()
    assert live.last["not_measured"] == [
        {"layer": "layers.0", "reason": "no gradient reached its output in this step"}
    ]  # fmt: skip


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_is_named(need_weights):
    model = nn.MultiheadAttention(64, 1, batch_first=True)
    x = torch.randn(2, 8, 64)
    with probe(model) as live:
        model(x, x, x, need_weights=need_weights)[0].sum().backward()
        with torch.no_grad():
            model(x, x, x, need_weights=need_weights)
        live.step()
    assert live.last["layers"] == []
    assert [entry["layer"] for entry in live.last["not_measured"]] == ["MultiheadAttention"]


def test_sdpa_can_be_left_alone():
    assert one_line(Model("sdpa"), sdpa=False)["layers"] == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["dm", "sdpa"])
def test_checkpointing_does_not_count_twice(kind, reentrant):
    torch.manual_seed(3)
    plain = Model(kind, kind)
    again = Model(kind, kind, checkpointed=reentrant)
    again.load_state_dict(plain.state_dict())
    lines = []
    for model in (plain, again):
        torch.manual_seed(4)
        lines.append(one_line(model))
    for line in lines:
        assert [layer["calls"] for layer in line["layers"]] == [1, 1] and line["not_measured"] == []
    assert lines[0]["layers"] == lines[1]["layers"]


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_checkpoint_that_ends_with_attention(early_stop):
    """Here the gradient comes before the recomputation, whose own output, if it gets that far, never gets one."""
    model = Sdpa()
    q = torch.randn(1, 2, 8, 64, requires_grad=True)
    with probe(model) as live, set_checkpoint_early_stop(early_stop):
        checkpoint(model, q, q, q, use_reentrant=False).sum().backward()
        live.step()
    assert [layer["calls"] for layer in live.last["layers"]] == [1] and live.last["not_measured"] == []


def test_micro_batches_measure_the_first_and_count_all():
    model = Model("dm", "sdpa")
    with probe(model) as live:
        for _ in range(3):
            train_step(model)
        live.step()
    for layer, module in zip(live.last["layers"], model.layers, strict=True):
        assert layer["calls"] == 3
        assert_same_numbers(layer, offline(module.kept[0], layer))


def test_a_layer_may_be_measured_and_refused():
    model = Sdpa()
    q = torch.randn(1, 2, 8, 64, requires_grad=True)
    with probe(model) as live:
        for mask in (torch.ones(8, 8, dtype=torch.bool), None):
            model(q, q, q, attn_mask=mask).sum().backward()
        live.step()
    assert live.last["layers"][0]["layer"] == live.last["not_measured"][0]["layer"] == "Sdpa"
    assert live.last["layers"][0]["calls"] == 1


def test_several_calls_of_one_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Attention()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (bf16(1, 8, 4, 64, grad=True) for _ in range(3))
            o = self.shared.attend(q, k, v) + self.shared.attend(k, q, v)  # both from this module's forward
            return self.shared(x) + o.float().mean()

    model = Twice()
    found = one_line(model)
    assert [layer["layer"] for layer in found["layers"]] == ["Twice", "Twice#1", "shared"]


def test_compiled_models_are_recorded_without_names():
    model = torch.compile(Model("dm", "dm"), backend="aot_eager")
    train_step(model)  # compiled before the probe comes
    with probe(model) as live:
        for _ in range(2):
            train_step(model)
        live.step()
    assert [layer["layer"] for layer in live.last["layers"]] == ["OptimizedModule", "OptimizedModule#1"]
    assert [layer["calls"] for layer in live.last["layers"]] == [2, 2]
    assert [entry["layer"] for entry in live.last["not_measured"]] == ["OptimizedModule"]
    torch._dynamo.reset()


def test_saved_tensors_that_were_moved_are_numbered():
    """What a backward gets is then no longer what its forward saved, though it may lie where another one did."""
    model = Model("dm", "dm", "dm")
    with probe(model) as live, torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        train_step(model)
        live.step()
    assert [layer["layer"] for layer in live.last["layers"]] == ["call 0", "call 1", "call 2"]
    for layer, module in zip(live.last["layers"], reversed(model.layers), strict=True):  # the backward's order
        assert_same_numbers(layer, offline(module.kept[0], layer))


def test_calls_outside_every_module_are_numbered():
    q, k, v = (bf16(1, 8, 2, 64, grad=True) for _ in range(3))
    attention = Attention()
    with probe(nn.Linear(1, 1)) as live:
        (attention.attend(q, k, v) + attention.attend(q, k, v)).sum().backward()
        live.step()
    assert [layer["layer"] for layer in live.last["layers"]] == ["call 0", "call 1"]


def test_nonfinite_heads_are_listed():
    attention = Attention()
    q, k, v = (bf16(1, 8, 4, 64) for _ in range(3))
    q[0, 3, 2, 5] = torch.nan
    with probe(attention, heads=[0, 2]) as live:
        attention.attend(q.requires_grad_(), k, v).sum().backward()
        live.step()
    (layer,) = live.last["layers"]
    assert layer["nonfinite_heads"] == [2]
    assert layer["heads"][1]["entropy"] is None and layer["heads"][1]["modes"]["matched"]["pushed"] == []


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (4, 40)])
def test_what_has_no_window_is_named(sizes):
    attention = Attention()
    q, k = bf16(1, sizes[0], 2, 64, grad=True), bf16(1, sizes[1], 2, 64, grad=True)
    with probe(attention, max_tokens=32) as live:
        attention.attend(q, k, k).sum().backward()
        live.step()
    assert live.last["layers"] == [] and len(live.last["not_measured"]) == 1


def test_heads_that_are_not_there_are_named():
    found = one_line(Model("dm"), heads=[1, 4])
    assert found["not_measured"][0]["reason"].startswith("heads: the layer has 4 query heads")


# ---- that it changes nothing ---------------------------------------------------------------------------------------


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
