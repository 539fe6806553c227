"""The decoder: its parameters by name and number, its attention, its positions, and that two are the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from train import config, optim
from train.attention import attend
from train.config import AttentionConfig, ModelConfig, OptimConfig
from train.model import Decoder, cross_entropy, rotary, rotate

from train_runs import ROOT, torch_as_it_was

EXACT = AttentionConfig()


def made(vocabulary: int = 11, attention: AttentionConfig = EXACT, seed: int = 0, **keys: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(ModelConfig(**{"width": 32, "layers": 2, "heads": 4, "context": 16, **keys}), attention, vocabulary)


def some_ids(length: int = 12, batch: int = 2, vocabulary: int = 11) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(5))


# ---- Parameters -----------------------------------------------------------------------------------------------------


def test_the_toy_has_as_many_parameters_as_the_article_says() -> None:
    toy = config.load(ROOT / "train" / "configs" / "toy.toml")
    model = Decoder(toy.model, toy.attention, 97)
    assert sum(weight.numel() for weight in model.parameters()) == 428_928


def test_names_and_shapes() -> None:
    full = made(kv_heads=2, qk_norm=True, mlp="gelu", mlp_bias=True, norm="layernorm", position="learned")
    layer = {
        "attention.q.weight": (32, 32), "attention.k.weight": (16, 32), "attention.v.weight": (16, 32),
        "attention.o.weight": (32, 32), "attention.q_norm.weight": (8,), "attention.k_norm.weight": (8,),
        "norm_attention.weight": (32,), "norm_attention.bias": (32,), "norm_mlp.weight": (32,), "norm_mlp.bias": (32,),
        "mlp.up.weight": (128, 32), "mlp.up.bias": (128,), "mlp.down.weight": (32, 128), "mlp.down.bias": (32,),
    }  # fmt: skip
    outside = {
        "embed.weight": (11, 32), "positions.weight": (16, 32), "norm.weight": (32,), "norm.bias": (32,),
        "head.weight": (11, 32),
    }  # fmt: skip
    wanted = {f"layers.{at}.{name}": shape for at in range(2) for name, shape in layer.items()} | outside
    assert {name: tuple(weight.shape) for name, weight in full.state_dict().items()} == wanted
    plain = made(tie=True)
    names = {
        f"layers.{at}.{name}"
        for at in range(2)
        for name in (
            *(f"attention.{part}.weight" for part in "qkvo"), "norm_attention.weight", "norm_mlp.weight",
            *(f"mlp.{part}.weight" for part in ("gate", "up", "down")),
        )
    }  # fmt: skip
    assert set(plain.state_dict()) == names | {"embed.weight", "norm.weight"}
    assert [name for name, _ in plain.attention_layers()] == ["layers.0.attention", "layers.1.attention"]


def test_a_hybrid_attends_in_every_fourth() -> None:
    model = made(layers=8, hybrid_every=4, delta_head_dim=16)
    assert [name for name, _ in model.attention_layers()] == ["layers.3.attention", "layers.7.attention"]
    model(some_ids()).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_first_loss_is_that_of_a_guess() -> None:
    model = made(vocabulary=97)
    loss = cross_entropy(model(some_ids(16, 8, 97)), some_ids(16, 8, 97))
    assert loss.item() == pytest.approx(math.log(97), abs=0.05)
    assert cross_entropy(torch.zeros(1, 3, 5).bfloat16(), torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.float32


def test_the_same_seed_makes_the_same_bits() -> None:
    first, second, third = made(), made(), made(seed=1)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.embed.weight, third.embed.weight)
    assert torch.equal(first(some_ids()), second(some_ids()))


def test_what_writes_into_the_residual_stream_is_smaller() -> None:
    model = made(width=128, layers=8, init_std=0.1)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            last = name.endswith((".o.weight", ".down.weight"))
            assert weight.std().item() == pytest.approx(0.1 / (4 if last else 1), rel=0.1), name


# ---- What it computes -----------------------------------------------------------------------------------------------


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FP64, head by head and row by row."""
    o = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            for row in range(q.shape[1]):
                keys, values = (x[batch, : row + 1, head // group].double() for x in (k, v))
                p = torch.softmax(keys @ q[batch, row, head].double() / math.sqrt(q.shape[-1]), 0)
                o[batch, row, head] = p @ values
    return o


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mode", ["exact", "reference", "matched"])
def test_grouped_attention_is_the_naive_one(mode: str, kv_heads: int) -> None:
    q = torch.randn(2, 9, 4, 16)
    k, v = torch.randn(2, 9, kv_heads, 16), torch.randn(2, 9, kv_heads, 16)
    if mode != "exact":
        q, k, v = (x.bfloat16().float() for x in (q, k, v))
    o = attend(q, k, v, AttentionConfig(mode=mode, numerics="paper"))
    assert o.shape == q.shape and o.dtype == q.dtype
    error = (o.double() - naive(q, k, v)).norm() / naive(q, k, v).norm()
    assert error < {"exact": 1e-6, "reference": 1e-6, "matched": 0.08}[mode], error
    if mode == "matched":
        assert error > 1e-3  # FP8, and no other


def test_tokens_see_no_later_ones() -> None:
    model = made(position="rope", qk_norm=True, kv_heads=2)
    ids = some_ids()
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 11
    a, b = model(ids), model(other)
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.equal(a[:, 7], b[:, 7])


def test_rotary_positions() -> None:
    turns = rotary(6, 8, 10000.0, torch.device("cpu"))
    x = torch.randn(1, 6, 2, 8)
    turned = rotate(x, turns)
    assert torch.equal(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    # Channel c and channel c + 4 as one complex number, turned by position * theta^(-2c / 8).
    rates = 10000.0 ** (-torch.arange(4).double() / 4)
    angle = torch.arange(6).double()[:, None] * rates
    wanted = (
        torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    torch.testing.assert_close(turned.double(), torch.cat((wanted.real, wanted.imag), -1), rtol=1e-5, atol=1e-5)
    # What q and k have in common depends on their distance alone.
    q, k = torch.randn(8).expand(1, 6, 1, 8), torch.randn(8).expand(1, 6, 1, 8)
    scores = (rotate(q, turns)[0, :, 0] @ rotate(k, turns)[0, :, 0].T).diagonal(-2)
    torch.testing.assert_close(scores, scores[:1].expand(4), rtol=1e-4, atol=1e-5)


def test_positions_matter_where_there_are_any() -> None:
    """Without positions the last token sees a set: any order of those before it."""
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    shuffled = torch.tensor([[3, 1, 4, 2, 5]])
    for position, same in (("none", True), ("rope", False), ("learned", False)):
        model = made(position=position, layers=1, init_std=0.3)
        a, b = model(ids)[0, -1], model(shuffled)[0, -1]
        assert torch.allclose(a, b, atol=1e-5) == same, position


@pytest.mark.parametrize("position", ["rope", "learned", "none"])
def test_longer_than_its_context(position: str) -> None:
    model = made(position=position)
    assert model(some_ids(16)).shape == (2, 16, 11)
    with pytest.raises(ValueError, match=r"ids: expected at most 16 tokens \(model\.context\), got 17"):
        model(some_ids(17))


def test_tied_embeddings() -> None:
    model = made(tie=True)
    before = model(some_ids())
    with torch.no_grad():
        model.embed.weight[3] *= 2
    assert not torch.equal(model(some_ids())[..., 3], before[..., 3])
    assert model.head is None


@pytest.mark.parametrize("mlp", ["swiglu", "silu", "gelu"])
def test_the_mlp(mlp: str) -> None:
    block = made(mlp=mlp).layers[0].mlp
    x = torch.randn(2, 3, 32)
    up = x @ block.up.weight.T
    if mlp == "swiglu":
        gate = x @ block.gate.weight.T
        inner = gate * torch.sigmoid(gate) * up
    else:
        inner = up * torch.sigmoid(up) if mlp == "silu" else functional.gelu(up)
    torch.testing.assert_close(block(x), inner @ block.down.weight.T)


def test_another_attention_from_now_on() -> None:
    model = made()
    exact = model(some_ids())
    model.set_attention(AttentionConfig("stale", "paper"))
    low = model(some_ids())
    assert not torch.equal(exact, low) and torch.allclose(exact, low, atol=0.05)
    model.set_attention(EXACT)
    assert torch.equal(model(some_ids()), exact)


# ---- Optimisers -----------------------------------------------------------------------------------------------------


def test_schedules() -> None:
    def rates(steps: int, **keys: Any) -> list[float]:
        return [optim.scale_at(step, steps, OptimConfig(**keys)) for step in range(steps)]

    assert rates(4) == [1, 1, 1, 1]
    assert rates(6, warmup=3) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(4, schedule="cosine") == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)])
    assert rates(10, schedule="wsd", decay=0.5) == pytest.approx([1] * 6 + [0.8, 0.6, 0.4, 0.2])
    assert rates(4, schedule="wsd", decay=1.0, final=0.5) == pytest.approx([1, 0.875, 0.75, 0.625])
    for keys in ({"schedule": "cosine", "final": 0.1}, {"schedule": "wsd", "decay": 0.0}, {"warmup": 1000}):
        assert all(0 <= rate <= 1 for rate in rates(50, **keys))


def test_what_is_decayed_and_what_muon_takes() -> None:
    model = made(norm="layernorm", mlp_bias=True, qk_norm=True)
    [adamw] = optim.make(model, OptimConfig(weight_decay=0.1))
    for group in adamw.param_groups:
        assert {weight.dim() >= 2 for weight in group["params"]} == {group["weight_decay"] > 0}
    muon, rest = optim.make(model, OptimConfig("muon", weight_decay=0.1))
    taken = {id(weight) for group in muon.param_groups for weight in group["params"]}
    names = {name for name, weight in model.named_parameters() if id(weight) in taken}
    assert names == {
        f"layers.{at}.{name}.weight"
        for at in range(2)
        for name in ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    left = sum(len(group["params"]) for group in rest.param_groups)
    assert left + len(taken) == len(list(model.parameters()))
    optim.set_scale([muon, rest], 0.5)
    optim.set_scale([muon, rest], 0.25)
    assert muon.param_groups[0]["lr"] == 0.25 * 0.02 and rest.param_groups[0]["lr"] == 0.25 * 3e-4


def test_torch_is_left_as_it_was() -> None:
    """The tests' own: a training in the process of another test must not change it."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    with torch_as_it_was():
        torch.set_num_threads(before[0] + 1)
        torch.use_deterministic_algorithms(not before[1])
        torch.rand(3)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
