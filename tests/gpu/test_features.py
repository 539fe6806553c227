"""What training frameworks do with the operators: dynamic graphs, transforms, streams, subsets of gradients, python -O.

The twins of tests/python/test_transforms.py, test_compile.py and test_errors.py, on the GPU.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from gpu_calls import DEVICE, MODES
from gpu_compare import same_bits
from torch import func
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from delta_matching import dm_attn_func, dm_attn_varlen_func

OFFSETS = [0, 13, 13, 130]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _draw(*size: int, heads=(4, 2, 2), dtype=torch.bfloat16):
    return [torch.randn(*size, h, 64, device=DEVICE).to(dtype).requires_grad_() for h in heads]


def _attend(q, k, v, mode="matched"):
    return dm_attn_func(q, k, v, causal=True, mode=mode)


def _packed(q, k, v, mode="matched"):
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=q.device)
    return dm_attn_varlen_func(q, k, v, offsets, offsets, 117, 117, causal=True, mode=mode)


def _run(function, leaves, *args):
    out = function(*leaves, *args)
    return (out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves))


def _same(a, b) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_dynamic_shapes_compile_once(mode):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attend, fullgraph=True, dynamic=True, backend=counter)
    # All sizes differ: Torch takes sizes that agree at first to agree always.
    for batch, q_len, k_len in [(5, 33, 47), (6, 70, 9), (7, 65, 66), (8, 128, 300)]:
        q, k, v = _draw(batch, k_len)
        q = _draw(batch, q_len)[0]
        assert _same(_run(compiled, (q, k, v), mode), _run(_attend, (q, k, v), mode))
    assert counter.frame_count == 1


def test_dynamic_packed_sequences_compile_once():
    def attend(q, k, v, offsets, longest):
        return dm_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=True, mode="onepass")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for ends in ([0, 13, 140], [0, 50, 51, 177]):
        offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        leaves = _draw(ends[-1] + 3)
        assert _same(_run(compiled, leaves, offsets, 127), _run(attend, leaves, offsets, 127))
    assert counter.frame_count == 1


@pytest.mark.parametrize("call", [_attend, _packed])
@pytest.mark.parametrize("mode", MODES)
def test_every_subset_of_gradients(mode, call):
    leaves = _draw(130) if call is _packed else _draw(2, 130)
    _, *full = _run(call, leaves, mode)
    for needed in itertools.product([False, True], repeat=3):
        chosen = [x.detach().requires_grad_(need) for x, need in zip(leaves, needed, strict=True)]
        out = call(*chosen, mode)
        assert out.requires_grad == any(needed)
        if any(needed):
            out.float().square().sum().backward()
        for leaf, need, expected in zip(chosen, needed, full, strict=True):
            assert same_bits(leaf.grad, expected) if need else leaf.grad is None


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("mode", MODES)
def test_fake_kernels_have_the_real_strides(mode, varlen):
    ops = torch.ops.delta_matching
    # Inputs that are not contiguous, so that strides could leak into the outputs.
    q, k, v = (
        x.detach().transpose(-3, -2).contiguous().transpose(-3, -2) for x in _draw(*(() if varlen else (2,)), 130)
    )
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=DEVICE) if varlen else None
    options = (None, True, mode, "hopper", None)
    real = ops.forward(q, k, v, offsets, offsets, 117, 117, *options)
    o, _, *saved = real
    d_o = torch.randn_like(o).transpose(-1, -2).contiguous().transpose(-1, -2)
    arguments = (d_o, q, k, v, o, *saved, offsets, offsets, *options, True, True, True, 117, 117)
    real = (*real, *ops.backward(*arguments))
    with FakeTensorMode() as fake_mode:
        fake = [fake_mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        q, k, v, offsets = *fake[1:4], fake[8]
        fake = (*ops.forward(q, k, v, offsets, offsets, 117, 117, *options), *ops.backward(*fake))
    for a, b in zip(real, fake, strict=True):
        assert a.is_contiguous()
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


@pytest.mark.quick
@pytest.mark.parametrize("batch,q_len,k_len", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_on_one_side(mode, batch, q_len, k_len):
    q, (_, k, v) = _draw(batch, q_len)[0], _draw(batch, k_len)
    o, lse = dm_attn_func(q, k, v, causal=True, mode=mode, return_lse=True)
    assert o.shape == q.shape and lse.shape == (batch, 4, q_len) and not o.any()
    for grad, leaf in zip(torch.autograd.grad(o.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


@pytest.mark.quick
@pytest.mark.parametrize(
    "transform,message",
    [
        (lambda loss, q: func.grad(loss)(q), "grad and its relatives are not supported"),
        (lambda loss, q: func.vjp(loss, q), "grad and its relatives are not supported"),
        (lambda loss, q: func.jvp(loss, (q,), (q,)), "forward-mode"),
        (lambda loss, q: func.hessian(loss)(q), "are not supported|forward-mode"),
        (lambda loss, q: torch.autograd.functional.hvp(loss, q, q), "double backward is not supported"),
    ],
    ids=["grad", "vjp", "jvp", "hessian", "hvp"],
)
def test_transforms_are_refused(transform, message):
    q, k, v = (x.detach() for x in _draw(1, 5))
    with pytest.raises(RuntimeError, match=message):
        transform(lambda q: _attend(q, k, v).float().sum(), q)


@pytest.mark.parametrize("mode", MODES)
def test_vmap_has_gradients(mode):
    q, k, v = _draw(1, 33)
    stack = torch.stack([q.detach(), q.detach() * 2]).requires_grad_()
    mapped = func.vmap(lambda q: _attend(q, k, v, mode))(stack)
    (gradient,) = torch.autograd.grad(mapped.float().square().sum(), stack)
    for index in range(2):
        alone = stack.detach()[index].requires_grad_()
        o, dq = _run(lambda q: _attend(q, k, v, mode), [alone])
        assert same_bits(mapped[index].detach(), o) and same_bits(gradient[index], dq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_bf16_and_nothing_else_does(dtype):
    leaves = _draw(2, 33, dtype=torch.float32)
    rounded = [x.detach().to(torch.bfloat16).requires_grad_() for x in leaves]
    with torch.autocast(DEVICE.type, dtype=dtype):
        o, *grads = _run(_attend, leaves)
    expected, *exact = _run(_attend, rounded)
    assert same_bits(o, expected)
    assert all(a.dtype == torch.float32 and torch.equal(a, b.float()) for a, b in zip(grads, exact, strict=True))
    with pytest.raises(TypeError, match=r"q: expected torch\.bfloat16, got torch\.float32"):
        _attend(*leaves)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_of_packed_sequences_under_autocast(mode, reentrant):
    leaves = _draw(130, dtype=torch.float32)
    results = []
    for again in (False, True):
        fresh = [x.detach().requires_grad_() for x in leaves]
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            out = checkpoint(_packed, *fresh, mode, use_reentrant=reentrant) if again else _packed(*fresh, mode)
        out.float().square().sum().backward()
        results.append([out.detach(), *(x.grad for x in fresh)])
    assert _same(*results)


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", MODES)
def test_two_streams_at_once(mode):
    """Calls that overlap on two streams share nothing: workspaces, tables and statistics are each call's own."""
    sets = [_draw(2, 800 + 64 * index) for index in range(2)]
    expected = [_run(_attend, leaves, mode) for leaves in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(5):
        for index, (stream, leaves) in enumerate(zip(streams, sets, strict=True)):
            with torch.cuda.stream(stream):
                results[index].append(_run(_attend, leaves, mode))
    torch.cuda.synchronize()
    assert all(_same(result, one) for many, one in zip(results, expected, strict=True) for result in many)


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", MODES)
def test_graphed_callable(mode):
    """Torch's own capture of a forward and its backward."""
    sample = _draw(2, 130)
    graphed = torch.cuda.make_graphed_callables(lambda q, k, v: _attend(q, k, v, mode), tuple(sample))
    for _ in range(3):
        leaves = _draw(2, 130)
        result = [x.clone() for x in _run(graphed, leaves)]
        assert _same(result, _run(_attend, leaves, mode))


OPTIMISED = """
import sys
import torch
from delta_matching import dm_attn_func, dm_attn_varlen_func
if __debug__: raise SystemExit("not optimised")
device = sys.argv[1]
x = torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16, device=device)
row = x[0]
offsets = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
calls = {
    "expected torch.bfloat16": lambda: dm_attn_func(x.float(), x, x),
    "expected k's shape": lambda: dm_attn_func(x, x, x[:, 1:]),
    "k is on meta": lambda: dm_attn_func(x, x.to("meta"), x),
    "head_dim": lambda: dm_attn_func(x[..., :60], x[..., :60], x[..., :60]),
    "never fall": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5, 3), offsets(0, 5, 5), 5, 5),
    "at most the 5 rows": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 6), offsets(0, 5), 6, 6),
    "max_seqlen_k": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5), offsets(0, 5), 5, 4),
    "lse is not": lambda: dm_attn_func(x.clone().requires_grad_(), x, x, return_lse=True)[1].sum().backward(),
}
for words, call in calls.items():
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        if words in str(error):
            continue
        raise SystemExit(f"{words}: {error}")
    raise SystemExit(f"{words}: not refused")
print("refused", len(calls))
"""


def test_checks_do_not_vanish_when_optimised():
    done = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMISED, DEVICE.type],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip() == "refused 8", done.stderr + done.stdout
