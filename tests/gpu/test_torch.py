"""The operators inside Torch: opcheck, torch.compile, checkpointing, autocast, what needs a gradient, memory."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import DEVICE, MODES, ON_GPU, gaussian, square
from gpu_compare import same_bits
from torch.utils.checkpoint import checkpoint

from delta_matching import dm_attn_func, dm_attn_varlen_func

ops = torch.ops.delta_matching
CASE = square("matched", 64, 130, (4, 2), batch=2)
OPTIONS = (None, True, "onepass", "hopper", None)


@pytest.fixture
def leaves():
    return [t.to(DEVICE).requires_grad_() for t in gaussian(CASE)[:3]]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _layer(q, k, v, mode="matched"):
    """Work before and after, so that strides and gradients inside a graph are not the caller's."""
    o = dm_attn_func((q * 2).transpose(1, 2).contiguous().transpose(1, 2), k, v, causal=True, mode=mode)
    return o.float().sin()


def _run(function, leaves, *args):
    out = function(*leaves, *args)
    return (out.detach(), *torch.autograd.grad(out.sum(), leaves))


def _same(a, b) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_opcheck(leaves, mode):
    options = (None, True, mode, "hopper", None)
    torch.library.opcheck(ops.forward.default, (*leaves, None, None, 0, 0, *options))
    q, k, v = (t.detach() for t in leaves)
    o, _, *saved = ops.forward(q, k, v, None, None, 0, 0, *options)
    torch.library.opcheck(
        ops.backward.default, (torch.randn_like(o), q, k, v, o, *saved, None, None, *options, True, True, True)
    )


def test_opcheck_of_packed_sequences():
    q, k, v = (torch.randn(40, h, 64, device=DEVICE).to(torch.bfloat16).requires_grad_() for h in (4, 2, 2))
    offsets = torch.tensor([0, 13, 13, 37], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(ops.forward.default, (q, k, v, offsets, offsets, 24, 24, *OPTIONS))
    o, _, *saved = ops.forward(*(t.detach() for t in (q, k, v)), offsets, offsets, 24, 24, *OPTIONS)
    arguments = (torch.randn_like(o), q.detach(), k.detach(), v.detach(), o, *saved, offsets, offsets, *OPTIONS)
    torch.library.opcheck(ops.backward.default, (*arguments, True, True, True, 24, 24))


@pytest.mark.parametrize("mode", MODES)
def test_traced(leaves, mode):
    compiled = torch.compile(_layer, fullgraph=True, backend="aot_eager")
    assert _same(_run(compiled, leaves, mode), _run(_layer, leaves, mode))


@pytest.mark.parametrize("how", [{}, {"mode": "reduce-overhead"}], ids=["inductor", "inductor with CUDA graphs"])
def test_inductor(leaves, how):
    """The operator alone: inductor's own kernels around it may round otherwise."""

    def attention(q, k, v):
        return dm_attn_func(q, k, v, causal=True, mode="onepass") * 2

    compiled = torch.compile(attention, fullgraph=True, backend="inductor", **how)
    expected = _run(attention, leaves)
    for _ in range(4):  # the graphs are recorded in the second call
        assert _same([t.clone() for t in _run(compiled, leaves)], expected)


def test_lse_is_returned_and_has_no_gradient(leaves):
    o, lse = dm_attn_func(*leaves, causal=True, return_lse=True)
    assert lse.isfinite().all() and lse.device == o.device
    with pytest.raises(RuntimeError, match="lse is not differentiable"):
        (o.float().sum() + lse.sum()).backward()

    def layer(q, k, v):
        return dm_attn_func(q, k, v, causal=True, return_lse=True)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    o, lse = compiled(*leaves)
    o.sum().backward()
    o, lse = compiled(*leaves)
    with pytest.raises(RuntimeError, match="lse is not differentiable"):
        (o.float().sum() + lse.sum()).backward()


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoint(leaves, mode, reentrant):
    def again(*leaves):
        return checkpoint(_layer, *leaves, mode, use_reentrant=reentrant)

    out = [torch.zeros(()), torch.zeros(())]
    gradients = []
    for index, function in enumerate((again, lambda *leaves: _layer(*leaves, mode))):
        for leaf in leaves:
            leaf.grad = None
        out[index] = function(*leaves)
        out[index].sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert same_bits(out[0].detach(), out[1].detach()) and _same(*gradients)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_needs_a_gradient(leaves, needed):
    chosen = [t.detach().requires_grad_(need) for t, need in zip(leaves, needed, strict=True)]
    _layer(*chosen).sum().backward()
    _layer(*leaves).sum().backward()
    for leaf, need, full in zip(chosen, needed, leaves, strict=True):
        assert same_bits(leaf.grad, full.grad) if need else leaf.grad is None


@pytest.mark.quick
def test_autocast(leaves):
    expected = dm_attn_func(*leaves, causal=True)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert same_bits(dm_attn_func(*(t.float() for t in leaves), causal=True), expected)


@pytest.mark.quick
def test_inference_mode(leaves):
    expected = dm_attn_func(*leaves, causal=True)
    with torch.inference_mode():
        assert same_bits(dm_attn_func(*leaves, causal=True), expected)
        packed = [t.flatten(0, 1) for t in leaves]
        offsets = torch.tensor([0, 130, 260], dtype=torch.int32, device=DEVICE)  # an inference tensor
        for _ in range(2):
            o = dm_attn_varlen_func(*packed, offsets, offsets, 130, 130, causal=True)
            assert same_bits(o, expected.detach().flatten(0, 1))


@pytest.mark.cuda_only
def test_memory_comes_back(judge, leaves):
    """Nothing is kept between calls, and nothing is allocated behind Torch's back."""
    for _ in range(2):
        _run(_layer, leaves)
    torch.cuda.synchronize()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for mode in MODES:
        for _ in range(20):
            _run(_layer, leaves, mode)
    torch.cuda.synchronize()
    judge.at_most("growth in bytes", torch.cuda.memory_allocated() - allocated, 0, None, "property")
    judge.at_most("growth of what Torch holds", torch.cuda.memory_reserved() - free, 64 << 20, None, "property")


@pytest.mark.skipif(not ON_GPU, reason="the operators of the twin are tested in tests/python")
def test_gradients_on_both_devices(judge):
    """The whole path through autograd against the CPU's."""
    case = square("matched", 64, 300, (4, 2))
    x = gaussian(case)
    results = []
    for device in (DEVICE, torch.device("cpu")):
        leaves = [t.to(device).detach().requires_grad_() for t in x[:3]]
        o = dm_attn_func(*leaves, causal=True)
        results.append((o.detach(), *torch.autograd.grad(o, leaves, x.d_o.to(device))))
    for name, a, b in zip(("o", "dq", "dk", "dv"), *results, strict=True):
        a, b = a.cpu().double(), b.double()
        judge.at_most(name, float((a - b).norm() / b.norm()), 2e-3, case)
