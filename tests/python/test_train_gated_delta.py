"""train/gated_delta.py: the chunked form against the recurrence, the layer, and the guard around Triton on Hopper."""

from __future__ import annotations

import math
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train import gated_delta
from train.config import AttentionConfig, ModelConfig
from train.gated_delta import GatedDeltaNet, chunked, miscompiled, pick_backend, recurrent
from train.model import Decoder, cross_entropy


def problem(length: int, heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, length, heads, head_dim, dtype=dtype) for _ in range(3))
    q, k = (functional.normalize(x, dim=-1) for x in (q, k))
    g = -torch.rand(2, length, heads, dtype=dtype)
    g[:, length // 2] = -200.0  # forgets all but everything: exp(-g) would overflow in FP32
    return [x.requires_grad_() for x in (q, k, v, g, torch.rand(2, length, heads, dtype=dtype))]


def outcome(form, tensors: list[Tensor]) -> list[Tensor]:
    o = form(*tensors)
    torch.manual_seed(0)
    return [o, *torch.autograd.grad((o * torch.randn(o.shape, dtype=torch.float64).to(o.dtype)).sum(), tensors)]


def distance(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunked_equals_the_recurrence(length):
    tensors = problem(length)
    for got, wanted in zip(outcome(chunked, tensors), outcome(recurrent, tensors), strict=True):
        assert got.shape == wanted.shape
        # FP64 round-off. (Where the gradient itself is zero, as of g in the first token, both are.)
        assert (got - wanted).norm() <= 1e-12 * max(1.0, wanted.norm())


def test_fp32_is_near_fp64():
    wanted = outcome(chunked, problem(200))
    tensors = [x.detach().float().requires_grad_() for x in problem(200)]
    for form in (chunked, recurrent):
        got = outcome(form, tensors)
        assert got[0].dtype == torch.float32
        for name, one, other in zip("o q k v g beta".split(), got, wanted, strict=True):
            assert distance(one, other) < 5e-6, (form.__name__, name)


def test_recurrence_by_hand():
    """Two tokens, one channel a head, in numbers: S1 = b1 k1 v1, S2 = e S1 + k2 b2 (v2 - e S1 k2)."""
    q, k, v, g, beta = (
        torch.tensor(x, dtype=torch.float64) for x in ([2.0, 3.0], [1.0, 0.5], [4, -1], [-9.0, -1.0], [0.5, 0.25])
    )
    o = recurrent(*(x.view(1, 2, 1, 1) for x in (q, k, v)), *(x.view(1, 2, 1) for x in (g, beta))).flatten()
    first = 0.5 * 1.0 * 4.0
    kept = math.exp(-1.0) * first
    second = kept + 0.5 * 0.25 * (-1.0 - kept * 0.5)
    assert o.tolist() == pytest.approx([2.0 * first, 3.0 * second], rel=1e-12)


def test_autocast_does_not_reach_the_recurrence():
    tensors = [x.detach().float() for x in problem(70)]
    wanted = chunked(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunked(*tensors), wanted)


def test_no_tokens():
    tensors = [x[:, :0].detach() for x in problem(3)]
    assert chunked(*tensors).shape == recurrent(*tensors).shape == (2, 0, 2, 16)


def test_shapes_are_checked():
    q, k, v, g, beta = problem(5)
    with pytest.raises(ValueError, match=r"^beta: expected \[2, 5, 2\], as q says, got \[2, 5, 1\]$"):
        chunked(q, k, v, g, beta[..., :1])
    with pytest.raises(ValueError, match=r"^q: expected \[batch, length, heads, head_dim\]"):
        recurrent(q[0], k, v, g, beta)


# --- The layer -------------------------------------------------------------------------------------------------------


def layer(**others) -> GatedDeltaNet:
    torch.manual_seed(1)
    return GatedDeltaNet(24, 2, 16, 1e-5, **others)


def test_the_layer_is_causal_and_sees_all_before():
    net = layer().double()
    x = torch.randn(1, 70, 24, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x)[0, 66].square().sum(), x)
    reach = gradient[0].norm(dim=-1)
    assert torch.all(reach[67:] == 0)
    assert torch.all(reach[:67] > 0)


def test_every_parameter_learns_and_is_the_same_twice():
    def once() -> list[Tensor]:
        net = layer()
        torch.manual_seed(2)
        net(torch.randn(2, 70, 24)).square().sum().backward()
        return [p.grad for p in net.parameters()]

    first, second = once(), once()
    assert len(first) == 13
    for one, other in zip(first, second, strict=True):
        assert torch.isfinite(one).all() and one.abs().max() > 0
        assert torch.equal(one, other)


def test_the_layer_against_its_formulas():
    """Convolution, norms and gates written another way, with the recurrence token by token."""
    net, x = layer(), torch.randn(2, 9, 24)

    def branch(projection, convolution):
        channels = convolution.weight.shape[0]
        y = functional.conv1d(projection(x).mT, convolution.weight, padding=3, groups=channels)[..., :9].mT
        return functional.silu(y).reshape(2, 9, 2, 16)

    q, k = (functional.normalize(branch(p, c), dim=-1) for p, c in ((net.q, net.q_conv), (net.k, net.k_conv)))
    g = -net.decay_log.exp() * functional.softplus(net.a(x) + net.decay_bias)
    o = recurrent(q, k, branch(net.v, net.v_conv), g, net.b(x).sigmoid())
    o = functional.rms_norm(o, (16,), net.norm, 1e-5) * functional.silu(net.gate(x)).view(2, 9, 2, 16)
    # L2 norms have an epsilon of 1e-6 under the root.
    torch.testing.assert_close(net(x), net.o(o.flatten(-2)), rtol=1e-3, atol=1e-4)


def test_decays_start_in_their_ranges():
    net = GatedDeltaNet(8, 500, 4)
    rate, step = net.decay_log.exp(), functional.softplus(net.decay_bias)
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16.001
    assert 0.000999 <= step.min() < 0.0012 and 0.08 < step.max() <= 0.1001


def test_only_matrices_have_two_dimensions():
    """Optimisers tell matrices by that."""
    names = [name for name, p in layer().named_parameters() if p.ndim == 2]
    assert names == [f"{name}.weight" for name in ("q", "k", "v", "gate", "a", "b", "o")]


def test_bfloat16_autocast_runs_and_is_near():
    net, x = layer(), torch.randn(2, 70, 24)
    wanted = net(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = net(x)
    assert got.dtype == torch.bfloat16
    assert distance(got, wanted) < 0.02


def test_a_hybrid_decoder():
    """Layers 1 and 3 attend, the others are Gated DeltaNet; without positions it still tells orders apart."""
    torch.manual_seed(5)
    config = ModelConfig(width=32, layers=4, heads=2, position="none", hybrid_every=2, delta_head_dim=16, context=80)
    model = Decoder(config, AttentionConfig(), 11)
    assert [isinstance(getattr(one, "delta", None), GatedDeltaNet) for one in model.layers] == [True, False] * 2
    ids = torch.randint(0, 11, (2, 70))
    logits = model(ids)
    cross_entropy(logits[:, :-1], ids[:, 1:]).backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
    swapped = ids.clone()
    swapped[:, :2] = (ids[:, :2] + torch.tensor([3, 5])) % 11
    reordered = swapped[:, [1, 0, *range(2, 70)]]
    assert (model(swapped)[:, 5] - model(reordered)[:, 5]).abs().max() > 1e-4
    later = torch.cat((ids[:, :40], (ids[:, 40:] + 1) % 11), 1)
    assert torch.allclose(model(ids)[:, :40], model(later)[:, :40], atol=1e-5)


@pytest.mark.parametrize("sizes, name", [((0, 1, 1), "width"), ((1, 0, 1), "heads"), ((1, 1, -3), "head_dim")])
def test_sizes_are_checked(sizes, name):
    with pytest.raises(ValueError, match=f"^{name}: expected at least 1, got"):
        GatedDeltaNet(*sizes)


def test_what_the_kernels_are_given(monkeypatch):
    """BF16 for q, k and v, FP32 for the gates, in the order and scale of flash-linear-attention."""

    def kernels(q, k, v, g, beta, scale):
        assert [x.dtype for x in (q, k, v, g, beta)] == [torch.bfloat16] * 3 + [torch.float32] * 2
        assert scale == 16**-0.5
        return chunked(q, k, v, g, beta).bfloat16(), None

    net, x = layer(), torch.randn(2, 70, 24)
    wanted = net(x)
    monkeypatch.setattr(gated_delta, "pick_backend", lambda device, backend: "fla")
    monkeypatch.setattr(gated_delta, "_fla", lambda: kernels)
    assert 0 < distance(net(x), wanted) < 0.01


# --- Which form runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, capability, wrong",
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.4", (9, 0), True),
        ("3.6.0", (9, 0), True),
        ("3.6.0+git1234", (9, 0), True),
        ("3.7.0", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.7.1rc1", (9, 0), False),
        ("3.10.0", (9, 0), False),
        ("4.0.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_which_triton_is_wrong(version, capability, wrong):
    assert miscompiled(version, capability) is wrong


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU with flash-linear-attention and Triton 3.6, as far as pick_backend can see."""
    gated_delta._fla.cache_clear()
    gated_delta._tilelang.cache_clear()
    gated_delta._warn.cache_clear()
    module = types.ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = lambda *a, **k: None
    triton = types.ModuleType("triton")
    triton.__version__ = "3.6.0"
    for name, one in (("fla", types.ModuleType("fla")), ("fla.ops", types.ModuleType("fla.ops")), ("triton", triton)):
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield triton
    for function in (gated_delta._fla, gated_delta._tilelang, gated_delta._warn):
        function.cache_clear()


CUDA = torch.device("cuda", 0)


def test_wrong_triton_means_torch_and_one_warning(gpu):
    with pytest.warns(RuntimeWarning, match=r"Triton 3\.6\.0 computes wrong gradients") as seen:
        assert pick_backend(CUDA) == pick_backend(CUDA) == "torch"
    assert len(seen) == 1
    with pytest.raises(
        RuntimeError, match=r"^Gated DeltaNet: Triton 3\.6\.0 computes wrong gradients.*backend 'torch'$"
    ):
        pick_backend(CUDA, "fla")


def test_tilelang_or_a_newer_triton_means_fla(gpu, monkeypatch):
    with monkeypatch.context() as patch:
        backend = types.SimpleNamespace(can_use=lambda: True)
        for name in ("fla.ops.common", "fla.ops.common.backends", "fla.ops.common.backends.tilelang"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["fla.ops.common.backends.tilelang"].CommonTileLangBackend = backend
        assert pick_backend(CUDA) == "fla"
        gated_delta._tilelang.cache_clear()
        patch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
        with pytest.raises(RuntimeError, match="computes wrong gradients"):
            pick_backend(CUDA, "fla")
    gpu.__version__ = "3.7.1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pick_backend(CUDA) == "fla"


def test_without_the_package(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    with pytest.raises(RuntimeError) as refused:
        pick_backend(CUDA)
    line = str(refused.value)
    assert "\n" not in line and "flash-linear-attention" in line and "delta-matching[train]" in line
    assert pick_backend(CUDA, "torch") == "torch"


def test_on_a_cpu():
    assert pick_backend(torch.device("cpu")) == "torch"
    with pytest.raises(
        RuntimeError, match=r"^backend: flash-linear-attention needs a CUDA device, got cpu; use 'torch'$"
    ):
        pick_backend(torch.device("cpu"), "fla")
    with pytest.raises(ValueError, match=r"^backend: expected one of auto, fla, torch, got 'triton'$"):
        layer(backend="triton")
