"""probe(model): what it records of a training, and that its numbers are those of the offline probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from attention64 import bf16
from delta_matching import probe
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
