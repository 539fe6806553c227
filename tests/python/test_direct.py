"""Eager calls that skip the dispatcher: only where nobody would have seen the operator, and with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from delta_matching import dm_attn_func, ops


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "delta_matching":
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


def _inputs():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, 40, 2, 64, generator=draw).to(torch.bfloat16).requires_grad_() for _ in range(3)]


def _step(inputs):
    o = dm_attn_func(*inputs, causal=True)
    return (o, *torch.autograd.grad(o, inputs, torch.ones_like(o)))


@pytest.fixture
def counted(monkeypatch):
    """Calls of the dispatcher's operators."""
    calls = []
    operator = torch.ops.delta_matching.forward.default
    original = type(operator).__call__

    def call(self, /, *args, **kwargs):
        if self.namespace == "delta_matching":
            calls.append(self._opname)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(operator), "__call__", call)
    return calls


def test_a_plain_step_skips_the_dispatcher(counted):
    _step(_inputs())
    with torch.no_grad():
        dm_attn_func(*_inputs())
    assert counted == []


def test_modes_see_the_operators_and_the_same_bits():
    plain = _step(_inputs())
    with Watch() as watch:
        watched = _step(_inputs())
    assert watch.seen == ["forward", "backward"]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_the_profiler_sees_the_operators():
    with torch.autograd.profiler.profile() as profile:
        _step(_inputs())
    names = {event.name for event in profile.function_events}
    assert {"delta_matching::forward", "delta_matching::backward"} <= names


def test_subclasses_go_through_the_dispatcher(counted):
    class Own(torch.Tensor):
        pass

    with torch.no_grad():
        o = dm_attn_func(*(x.detach().as_subclass(Own) for x in _inputs()))
    assert set(counted) == {"forward"}
    assert ops._nobody_watches((torch.zeros(1), None)) and not ops._nobody_watches((o.as_subclass(Own),))


def test_second_derivatives_are_still_refused():
    q, k, v = _inputs()
    (dq,) = torch.autograd.grad(dm_attn_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def test_what_only_the_dispatcher_resolves():
    """A sign that is not in memory, zeros without memory, and batches of gradients."""
    q, k, v = (x.detach() for x in _inputs())
    assert torch.equal(dm_attn_func(torch._neg_view(q), k, v), dm_attn_func(-q, k, v))
    inputs = _inputs()
    o = dm_attn_func(*inputs, causal=True)
    seeds = torch.stack([torch.ones_like(o), torch.full_like(o, 0.5)])
    batched = torch.autograd.grad(o, inputs, seeds, is_grads_batched=True, retain_graph=True)
    for index in range(2):
        alone = torch.autograd.grad(o, inputs, seeds[index], retain_graph=True)
        assert all(torch.equal(a[index], b) for a, b in zip(batched, alone, strict=True))
    zeros = torch.autograd.grad(o, inputs, torch._efficientzerotensor(o.shape, dtype=o.dtype))
    assert not any(bool(x.any()) for x in zeros)


@pytest.mark.parametrize("scale", [torch.tensor(0.125), torch.nn.Parameter(torch.tensor(0.125)), "1", [1.0]])
def test_a_scale_is_a_number(scale):
    """A tensor would lose its gradient, and its value would be remembered."""
    with pytest.raises(TypeError, match="softmax_scale: expected a number or None, got"):
        dm_attn_func(*_inputs(), softmax_scale=scale)


def test_the_gradient_of_lse_is_refused_under_vmap():
    q, k, v = _inputs()
    stacked = torch.stack([q.detach(), q.detach()]).requires_grad_()
    o, lse = torch.func.vmap(lambda x: dm_attn_func(x, k, v, return_lse=True))(stacked)
    with pytest.raises(RuntimeError, match="lse is not differentiable"):
        (o.float().sum() + lse.sum()).backward()
