"""Gradients: against float64, for every subset of inputs, with every kind of incoming gradient, and what is refused.

Tolerances against float64 come from the rounding of E4M3 codes, 2^-4 of each operand at most; attention64.tolerance
says how many operands each result has and adds them in quadrature.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attention64 import MODES, TOLERANCE, bf16, clone, error, gradients64, inputs, same_bits
from delta_matching import dm_attn_func

CASES = {
    "causal": dict(q_len=150, causal=True),
    "full": dict(q_len=150, causal=False),
    "more keys": dict(q_len=70, k_len=150, causal=True),
    "more queries": dict(q_len=150, k_len=70, causal=True),
    "one KV head": dict(q_len=150, kv_heads=1, causal=True),
    "D 128": dict(q_len=150, head_dim=128, causal=True),
    "D 256": dict(q_len=150, head_dim=256, causal=False),
    "paper, D 24": dict(q_len=150, head_dim=24, causal=True, numerics="paper"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_against_float64(case, mode):
    sizes = dict(CASES[case])
    causal, numerics = sizes.pop("causal"), sizes.pop("numerics", "hopper")
    q, k, v = inputs(**sizes)
    d_o = bf16(*q.shape)
    o = dm_attn_func(q, k, v, causal=causal, mode=mode, numerics=numerics)
    grads = torch.autograd.grad(o, (q, k, v), d_o)
    exact_o, _, *exact = gradients64(q, k, v, d_o, causal)
    errors = {"o": error(o.detach(), exact_o)}
    errors |= {name: error(g, x) for name, g, x in zip(("dq", "dk", "dv"), grads, exact, strict=True)}
    for name, value in errors.items():
        # The floor tells FP8 from a library that quietly computes in BF16.
        assert 1e-2 < value < TOLERANCE[name], errors


def test_softmax_scale_reaches_the_backward():
    q, k, v = inputs()
    d_o = bf16(*q.shape)
    grads = torch.autograd.grad(dm_attn_func(q, k, v, softmax_scale=0.03), (q, k, v), d_o)
    for name, g, exact in zip(("dq", "dk", "dv"), grads, gradients64(q, k, v, d_o, False, 0.03)[2:], strict=True):
        assert error(g, exact) < TOLERANCE[name]


def test_modes_differ_where_they_should():
    """delta enters dS alone: dV is the same but for onepass, whose row sum is that of the rounded P."""
    q, k, v = inputs(q_len=150)
    d_o = bf16(*q.shape)
    results = {m: torch.autograd.grad(dm_attn_func(q, k, v, causal=True, mode=m), (q, k, v), d_o) for m in MODES}
    for a, b in itertools.combinations(MODES, 2):
        assert not same_bits(results[a][0], results[b][0]), (a, b)
        assert not same_bits(results[a][1], results[b][1]), (a, b)
    for mode in ("consistent", "stale"):
        assert same_bits(results[mode][2], results["matched"][2])


def _with_sink(length: int = 512, head_dim: int = 128):
    """A key that holds most of every long row (docs/method.md, the sink demonstration)."""
    q, k, v = (torch.randn(1, length, 2, head_dim) for _ in range(3))
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, 0] = 0.0
    share = 0.87
    k[:, 0, :, 0] = (math.log(length * share / (1 - share)) + 0.5) * math.sqrt(head_dim) / 4
    return tuple(x.to(torch.bfloat16).requires_grad_() for x in (q, k, v))


@pytest.mark.parametrize("numerics", ["hopper", "paper"])
def test_stale_delta_costs_accuracy_at_a_sink(numerics):
    q, k, v = _with_sink()
    d_o = bf16(*q.shape)
    _, _, exact, *_ = gradients64(q, k, v, d_o, True)
    errors = {}
    for mode in MODES:
        (dq,) = torch.autograd.grad(dm_attn_func(q, k, v, causal=True, mode=mode, numerics=numerics), (q,), d_o)
        errors[mode] = error(dq, exact)
    assert errors["stale"] > 1.5 * errors["consistent"] and errors["stale"] > 1.5 * errors["matched"], errors
    assert errors["onepass"] < 1.3 * errors["matched"], errors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("needed", [x for x in itertools.product([False, True], repeat=3) if any(x)])
def test_only_what_needs_a_gradient(needed, mode):
    q, k, v = inputs(q_len=70)
    d_o = bf16(*q.shape)
    full = torch.autograd.grad(dm_attn_func(q, k, v, causal=True, mode=mode), (q, k, v), d_o)
    leaves = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needed, strict=True)]
    dm_attn_func(*leaves, causal=True, mode=mode).backward(d_o)
    for leaf, need, expected in zip(leaves, needed, full, strict=True):
        if need:
            assert same_bits(leaf.grad, expected)
        else:
            assert leaf.grad is None


def test_the_library_is_spared_what_is_not_needed(monkeypatch):
    """A gradient that nobody needs is a null pointer, not computed and thrown away."""
    from delta_matching import _library

    seen, call = [], _library.call

    def spy(function, problem, args):
        if function == "backward":
            seen.append(tuple(bool(getattr(args._obj, name).data) for name in ("dq", "dk", "dv")))
        return call(function, problem, args)

    monkeypatch.setattr(_library, "call", spy)
    q, k, v = inputs(q_len=5)
    dm_attn_func(q.detach(), k, v.detach()).sum().backward()
    dm_attn_func(q, k.detach(), v).sum().backward()
    assert seen == [(False, True, False), (True, False, True)]


def test_no_graph_without_need():
    q, k, v = inputs(q_len=5, grad=False)
    o, lse = dm_attn_func(q, k, v, return_lse=True)
    assert not o.requires_grad and not lse.requires_grad
    q, k, v = inputs(q_len=5)
    with torch.no_grad():
        o, lse = dm_attn_func(q, k, v, return_lse=True)
    assert not o.requires_grad and not lse.requires_grad
    with torch.inference_mode():
        assert dm_attn_func(q, k, v).shape == q.shape


def test_incoming_gradients():
    """Expanded, transposed, sliced and zero: strides of d_o differ from those of o."""
    q, k, v = inputs(q_len=33)

    def grads(loss):
        leaves = clone((q, k, v))
        o = dm_attn_func(*leaves, causal=True, mode="onepass")
        return torch.autograd.grad(loss(o), leaves)

    ones = grads(lambda o: (o * torch.ones_like(o)).sum())
    assert all(same_bits(a, b) for a, b in zip(grads(lambda o: o.sum()), ones, strict=True))  # stride 0 everywhere

    w = bf16(*q.shape)
    dense = grads(lambda o: (o * w).sum())
    heads_first = w.transpose(1, 2).contiguous()
    assert all(
        same_bits(a, b) for a, b in zip(grads(lambda o: (o.transpose(1, 2) * heads_first).sum()), dense, strict=True)
    )
    last_first = w.permute(3, 0, 1, 2).contiguous()
    assert all(
        same_bits(a, b) for a, b in zip(grads(lambda o: (o.permute(3, 0, 1, 2) * last_first).sum()), dense, strict=True)
    )

    half = w.clone()
    half[:, 10:] = 0
    assert all(
        same_bits(a, b)
        for a, b in zip(grads(lambda o: (o[:, :10] * w[:, :10]).sum()), grads(lambda o: (o * half).sum()), strict=True)
    )
    assert not any(g.any() for g in grads(lambda o: (o * 0).sum()))


@pytest.mark.parametrize("mode", MODES)
def test_saved_tensors_are_those_of_the_docs(mode):
    """docs/python.md lists them with their bytes; q, k, v and o are not copied."""
    q, k, v = inputs(batch=2, q_len=33, k_len=47)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o = dm_attn_func(q, k, v, mode=mode)
    pointers = {x.data_ptr() for x in (q, k, v, o)}
    shared = [x for x in kept if x.data_ptr() in pointers]
    assert len(shared) == 4
    rows = 2 * 4 * 33
    own = 3 * 4 * rows + (2 * rows * 64 if mode == "onepass" else 0)
    assert sum(x.nbytes for x in kept) - sum(x.nbytes for x in shared) == own


class _NoGradient(torch.autograd.Function):
    """Passes a value on and hands nothing back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_gradient_that_is_not_there_is_not_a_zero():
    q, k, v = inputs(q_len=5)
    o, lse = dm_attn_func(q, k, v, return_lse=True)
    (o.sum() + _NoGradient.apply(lse).sum()).backward()
    assert q.grad.any()
    only_k = k.detach().requires_grad_()
    o = dm_attn_func(q.detach(), only_k, v.detach())
    _NoGradient.apply(o).sum().backward()
    assert only_k.grad is None


def test_gradients_accumulate():
    q, k, v = inputs(q_len=33)
    once = torch.autograd.grad(dm_attn_func(q, k, v).sum(), (q, k, v))
    for _ in range(2):
        dm_attn_func(q, k, v).sum().backward()
    assert all(torch.equal(x.grad, 2 * g) for x, g in zip((q, k, v), once, strict=True))


def test_the_same_tensor_three_times():
    x = bf16(1, 33, 2, 64, grad=True)
    dm_attn_func(x, x, x, causal=True).float().square().sum().backward()
    parts = clone((x, x, x))
    dm_attn_func(*parts, causal=True).float().square().sum().backward()
    assert error(x.grad, sum(p.grad.double() for p in parts)) < 1e-2  # added in BF16


def test_backward_twice_needs_retain_graph():
    q, k, v = inputs(q_len=5)
    loss = dm_attn_func(q, k, v).sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    assert all(same_bits(a, b) for a, b in zip(first, torch.autograd.grad(loss, (q, k, v)), strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_changed_inputs_are_noticed():
    q, k, v = inputs(q_len=5)
    scaled = q * 1
    o = dm_attn_func(scaled, k, v)
    scaled += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("loss", ["lse alone", "with o", "through a function of it"])
def test_lse_gradient_is_refused(loss):
    q, k, v = inputs(q_len=5)
    o, lse = dm_attn_func(q, k, v, return_lse=True)
    asked = {
        "lse alone": lse.sum(),
        "with o": o.sum() + lse.sum(),
        "through a function of it": (o.sum() * lse.exp().mean()),
    }
    with pytest.raises(RuntimeError, match="lse is not differentiable"):
        asked[loss].backward()


def test_lse_may_be_used_without_its_gradient():
    q, k, v = inputs(q_len=5)
    o, lse = dm_attn_func(q, k, v, return_lse=True)
    (o.float() * lse.detach().mean()).sum().backward()
    assert q.grad.any()
    # lse returned and left alone costs the gradients nothing.
    other = clone((q, k, v))
    o, _ = dm_attn_func(*other, return_lse=True)
    plain = clone((q, k, v))
    for x, y in zip(
        torch.autograd.grad(o.sum(), other), torch.autograd.grad(dm_attn_func(*plain).sum(), plain), strict=True
    ):
        assert same_bits(x, y)


def test_double_backward_is_refused():
    q, k, v = inputs(q_len=5)
    (dq,) = torch.autograd.grad(dm_attn_func(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.float().square().sum().backward()


def test_forward_mode_is_refused():
    q, k, v = inputs(q_len=5, grad=False)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(dm_attn_func, (q, k, v), (q, k, v))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(RuntimeError, match="v carries a tangent"):
            dm_attn_func(q, k, dual)
        assert dm_attn_func(q, k, v).shape == q.shape


def test_functorch():
    q, k, v = inputs(q_len=5, grad=False)
    with pytest.raises(RuntimeError, match=r"torch\.func\.grad and its relatives are not supported"):
        torch.func.grad(lambda q: dm_attn_func(q, k, v).float().sum())(q)
    stacked = [torch.stack([x, x * 2]) for x in (q, k, v)]
    mapped = torch.func.vmap(dm_attn_func)(*stacked)  # by Torch's loop
    assert all(same_bits(mapped[i], dm_attn_func(*(x[i] for x in stacked))) for i in range(2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_every_bit(mode, reentrant):
    q, k, v = inputs(q_len=70)

    def block(q, k, v):
        return dm_attn_func(q * 1.5, k, v.relu(), causal=True, mode=mode).float().square()

    plain = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    leaves = clone((q, k, v))
    checkpoint(block, *leaves, use_reentrant=reentrant).sum().backward()
    assert all(same_bits(x.grad, g) for x, g in zip(leaves, plain, strict=True))


def test_autocast_casts_to_bf16():
    q, k, v = (torch.randn(1, 33, 2, 64, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = dm_attn_func(q, k, v, causal=True)
        loss = o.float().square().sum()
    loss.backward()
    half = [x.detach().to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    expected = dm_attn_func(*half, causal=True)
    expected.float().square().sum().backward()
    assert same_bits(o, expected)
    for x, y in zip((q, k, v), half, strict=True):
        assert x.grad.dtype == torch.float32 and torch.equal(x.grad, y.grad.float())


def test_autocast_casts_mixed_inputs_and_refuses_fp64():
    q, k, v = (torch.randn(1, 5, 2, 64) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.float16):
        o = dm_attn_func(q, k.half(), v.bfloat16())
        assert same_bits(o, dm_attn_func(q.bfloat16(), k.half().bfloat16(), v.bfloat16()))
        with pytest.raises(TypeError, match=r"k: expected torch\.bfloat16, got torch\.float64"):
            dm_attn_func(q, k.double(), v)
