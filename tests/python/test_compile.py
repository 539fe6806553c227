"""torch.compile: one graph, the same bits, dynamic shapes, checkpointing, and refusals that survive tracing."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from attention64 import MODES, bf16, clone, inputs, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func

# Traces forward and backward as inductor does and then runs the graph as it is: seconds instead of minutes.
TRACED = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(q, k, v, mode="matched", causal=True):
    """Work before and after, so that strides and gradients inside the graph are not the caller's."""
    o = dm_attn_func((q * 2).transpose(1, 2).contiguous().transpose(1, 2), k, v, causal=causal, mode=mode)
    return o.float().sin()


def run(function, leaves, *args, **kwargs):
    out = function(*leaves, *args, **kwargs)
    return out.detach(), *torch.autograd.grad(out.sum(), leaves)


@pytest.mark.parametrize("mode", MODES)
def test_one_graph_and_the_same_bits(mode):
    leaves = inputs(q_len=33, k_len=47)
    compiled = torch.compile(layer, fullgraph=True, backend=TRACED)
    for a, b in zip(run(compiled, leaves, mode), run(layer, leaves, mode), strict=True):
        assert same_bits(a, b)


def test_inductor():
    leaves = inputs(q_len=33, k_len=47)
    attention = torch.compile(
        lambda q, k, v: dm_attn_func(q, k, v, causal=True, mode="onepass") * 2, fullgraph=True, backend="inductor"
    )
    expected = run(lambda q, k, v: dm_attn_func(q, k, v, causal=True, mode="onepass") * 2, leaves)
    for a, b in zip(run(attention, leaves), expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_needs_a_gradient(needed):
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs(q_len=33), needed, strict=True)]
    compiled = torch.compile(layer, fullgraph=True, backend=TRACED)
    compiled(*leaves).sum().backward()
    expected = clone(leaves)
    layer(*expected).sum().backward()
    for leaf, need, full in zip(leaves, needed, expected, strict=True):
        assert same_bits(leaf.grad, full.grad) if need else leaf.grad is None


def test_dynamic_shapes_compile_once():
    counter = CompileCounterWithBackend(TRACED)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    # All sizes differ: Torch takes sizes that agree at first to agree always.
    for batch, q_len, k_len in [(5, 33, 47), (6, 70, 9), (7, 65, 66), (8, 128, 129)]:
        leaves = inputs(batch, q_len, k_len)
        for a, b in zip(run(compiled, leaves), run(layer, leaves), strict=True):
            assert same_bits(a, b)
    assert counter.frame_count == 1


def test_automatic_dynamic_shapes():
    counter = CompileCounterWithBackend(TRACED)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for q_len in (33, 34, 35, 90):
        leaves = inputs(q_len=q_len)
        for a, b in zip(run(compiled, leaves), run(layer, leaves), strict=True):
            assert same_bits(a, b)
    assert counter.frame_count == 2  # the first length, then all of them


def test_varlen():
    def attend(q, k, v, offsets, longest):
        return dm_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=True, mode="onepass") * 2

    counter = CompileCounterWithBackend(TRACED)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for ends in ([0, 13, 40], [0, 50, 51, 77]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        leaves = [bf16(ends[-1] + 3, heads, 64, grad=True) for heads in (4, 2, 2)]
        for a, b in zip(run(compiled, leaves, offsets, 50), run(attend, leaves, offsets, 50), strict=True):
            assert same_bits(a, b)
    assert counter.frame_count == 1


def test_inference():
    compiled = torch.compile(layer, fullgraph=True, backend=TRACED)
    leaves = inputs(q_len=33)
    with torch.no_grad():
        assert same_bits(compiled(*leaves), layer(*leaves))


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_inside_a_compiled_function(mode):
    def block(q, k, v):
        return checkpoint(layer, q, k, v, mode, use_reentrant=False)

    leaves = inputs(q_len=33)
    compiled = torch.compile(block, fullgraph=True, backend=TRACED)
    for a, b in zip(run(compiled, leaves), run(layer, leaves, mode), strict=True):
        assert same_bits(a, b)


def test_autocast_inside_a_compiled_function():
    def block(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return dm_attn_func(q, k, v, causal=True)

    leaves = [torch.randn(1, 33, 2, 64, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(block, fullgraph=True, backend=TRACED)
    for a, b in zip(run(compiled, leaves), run(block, leaves), strict=True):
        assert same_bits(a, b)


def with_lse(q, k, v):
    return dm_attn_func(q, k, v, causal=True, return_lse=True)


def test_lse_is_returned():
    leaves = inputs(q_len=33)
    compiled = torch.compile(with_lse, fullgraph=True, backend=TRACED)
    o, lse = compiled(*leaves)
    expected_o, expected_lse = with_lse(*leaves)
    assert same_bits(o, expected_o) and same_bits(lse, expected_lse)
    expected = torch.autograd.grad(expected_o.sum(), leaves)
    for a, b in zip(torch.autograd.grad(o.sum(), leaves), expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("backend", [TRACED, "inductor"])
def test_lse_gradient_is_refused_outside_the_graph(backend):
    compiled = torch.compile(with_lse, fullgraph=True, backend=backend)
    o, lse = compiled(*inputs(q_len=33))
    with pytest.raises(RuntimeError, match="lse is not differentiable"):
        (o.sum() + lse.sum()).backward()


@pytest.mark.parametrize("backend", [TRACED, "inductor"])
def test_lse_gradient_is_refused_inside_the_graph(backend):
    def loss(q, k, v):
        o, lse = with_lse(q, k, v)
        return o.float().sum() + 1e-3 * lse.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match="lse is not differentiable"):
        compiled(*inputs(q_len=33)).backward()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda q, k, v: dm_attn_func(q.float(), k, v), "expected torch.bfloat16"),
        (lambda q, k, v: dm_attn_func(q, k, v, mode="exact"), "expected one of stale, consistent, matched, onepass"),
        (lambda q, k, v: dm_attn_func(q, k, v[:, 1:]), "expected k's shape"),
        (lambda q, k, v: dm_attn_func(q, k, v, softmax_scale=-1.0), "softmax_scale"),
        (lambda q, k, v: dm_attn_func(q[..., :60], k[..., :60], v[..., :60]), "head_dim"),
        (lambda q, k, v: dm_attn_func(q, k, v, dropout_p=0.1), "dropout_p"),
    ],
)
def test_refusals_survive_tracing(call, message):
    compiled = torch.compile(call, fullgraph=True, backend=TRACED)
    # Dynamo wraps what a traced function raises, and keeps the words.
    with pytest.raises(Exception, match=message):
        compiled(*inputs(q_len=5))


def test_forward_mode_is_refused_in_tracing():
    compiled = torch.compile(
        lambda q, k, v: torch.func.jvp(dm_attn_func, (q, k, v), (q, k, v)), fullgraph=True, backend=TRACED
    )
    with pytest.raises(Exception, match=r"Observed exception|forward-mode"):
        compiled(*inputs(q_len=5, grad=False))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return dm_attn_func(q, k, v, causal=True)

    leaves = inputs(q_len=33, grad=False)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Layer(), tuple(leaves), dynamic_shapes=({1: length},) * 3)
    other = inputs(q_len=70, grad=False)
    assert same_bits(program.module()(*other), Layer()(*other))
