"""torch.func, autocast and checkpoints around the operators: they work, or they say that they do not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import func
from torch.utils.checkpoint import checkpoint

from attention64 import MODES, bf16, clone, inputs, same_bits
from delta_matching import dm_attn_func, dm_attn_varlen_func

OFFSETS = torch.tensor([0, 13, 13, 30], dtype=torch.int32)


def attend(q, k, v, mode="matched"):
    return dm_attn_func(q, k, v, causal=True, mode=mode)


def packed(q, k, v, mode="matched"):
    return dm_attn_varlen_func(q, k, v, OFFSETS, OFFSETS, 17, 17, causal=True, mode=mode)


def _vjp(loss, q):
    _, pull = func.vjp(loss, q)
    return pull(torch.ones(()))


FUNCTIONAL = "grad and its relatives are not supported by delta_matching"
FORWARD = "does not support forward-mode derivatives"
DOUBLE = "double backward is not supported"
REFUSED = {
    "grad": (lambda loss, q: func.grad(loss)(q), FUNCTIONAL),
    "grad_and_value": (lambda loss, q: func.grad_and_value(loss)(q), FUNCTIONAL),
    "vjp": (_vjp, FUNCTIONAL),
    "jacrev": (lambda loss, q: func.jacrev(loss)(q), FUNCTIONAL),
    "vmap of grad": (lambda loss, q: func.vmap(func.grad(loss))(torch.stack([q, q])), FUNCTIONAL),
    "jvp": (lambda loss, q: func.jvp(loss, (q,), (q,)), FORWARD),
    "jacfwd": (lambda loss, q: func.jacfwd(loss)(q), FORWARD),
    "hessian": (lambda loss, q: func.hessian(loss)(q), f"{FUNCTIONAL}|{FORWARD}"),
    "hvp": (lambda loss, q: torch.autograd.functional.hvp(loss, q, q), DOUBLE),
    "create_graph twice": (lambda loss, q: torch.autograd.functional.hessian(loss, q), DOUBLE),
}


@pytest.mark.parametrize("call", [attend, packed])
@pytest.mark.parametrize("transform", REFUSED)
def test_refused(transform, call):
    q, k, v = inputs(batch=1, q_len=30, grad=False)
    if call is packed:
        q, k, v = q[0], k[0], v[0]
    transformed, message = REFUSED[transform]
    with pytest.raises(RuntimeError, match=message) as caught:
        transformed(lambda q: call(q, k, v).float().sum(), q)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [attend, packed])
@pytest.mark.parametrize("mode", MODES)
def test_vmap_has_gradients(call, mode):
    """By Torch's loop over the batch: the bits of the loop, keys shared by all of it included."""
    q, k, v = inputs(batch=1, q_len=30)
    if call is packed:
        q, k, v = (x.detach()[0].requires_grad_() for x in (q, k, v))
    stack = torch.stack([q.detach(), q.detach() * 2]).requires_grad_()
    mapped = func.vmap(lambda q: call(q, k, v, mode))(stack)
    gradient, dk = torch.autograd.grad(mapped.float().square().sum(), (stack, k))
    for index in range(2):
        alone = stack.detach()[index].requires_grad_()
        o = call(alone, k, v, mode)
        assert same_bits(mapped[index].detach(), o.detach())
        assert same_bits(gradient[index], torch.autograd.grad(o.float().square().sum(), alone)[0])
    assert dk.shape == k.shape and dk.any()


@pytest.mark.parametrize("call", [attend, packed])
@pytest.mark.parametrize("dtypes", [*itertools.product([torch.float32, torch.bfloat16], repeat=3)])
def test_autocast_of_any_mixture(call, dtypes):
    """FP32 becomes BF16 and gets its gradient in FP32, BF16 stays; outside, and under another device's autocast, FP32
    is refused by name."""
    leaves = [
        torch.randn(*(() if call is packed else (1,)), 30, heads, 64).to(dtype).requires_grad_()
        for heads, dtype in zip((4, 2, 2), dtypes, strict=True)
    ]
    rounded = [x.detach().to(torch.bfloat16).requires_grad_() for x in leaves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = call(*leaves)
    expected = call(*rounded)
    assert same_bits(o.detach(), expected.detach())
    grads = torch.autograd.grad(o.float().square().sum(), leaves)
    for grad, leaf, exact in zip(
        grads, leaves, torch.autograd.grad(expected.float().square().sum(), rounded), strict=True
    ):
        assert grad.dtype == leaf.dtype and torch.equal(grad, exact.to(leaf.dtype))
    if torch.float32 in dtypes:
        name = "qkv"[dtypes.index(torch.float32)]
        refusal = rf"{name}: expected torch\.bfloat16, got torch\.float32; cast it, or call under torch\.autocast"
        with pytest.raises(TypeError, match=refusal):
            call(*leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            with pytest.raises(TypeError, match=refusal):
                call(*leaves)


def test_the_operator_itself_does_not_cast():
    x = torch.randn(1, 5, 2, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"q: expected torch\.bfloat16"):
        torch.ops.delta_matching.forward(x, x, x, None, None, 0, 0, None, True, "matched", "hopper", None)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("call", [attend, packed])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_under_autocast(mode, call, reentrant):
    """The second forward sees the first one's autocast, and gives its bits."""
    size = (1, 30) if call is attend else (30,)
    q, k, v = (torch.randn(*size, heads, 64, requires_grad=True) for heads in (4, 2, 2))

    def block(q, k, v):
        return call(q * 1.5, k, v.relu(), mode).float().square()

    results = []
    for again in (False, True):
        leaves = clone((q, k, v))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(block, *leaves, use_reentrant=reentrant) if again else block(*leaves)
        out.sum().backward()
        results.append((out.detach(), *(x.grad for x in leaves)))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_nested_checkpoints():
    """A checkpoint in a checkpoint runs the forward three times."""
    q, k, v = inputs(q_len=33)

    def inner(x):
        return attend(x, k, v)

    def outer(x):
        return checkpoint(inner, checkpoint(inner, x, use_reentrant=False), use_reentrant=False)

    plain = torch.autograd.grad(inner(inner(q)).float().sum(), (q, k, v))
    nested = torch.autograd.grad(checkpoint(outer, q, use_reentrant=False).float().sum(), (q, k, v))
    assert all(same_bits(a, b) for a, b in zip(plain, nested, strict=True))


def test_a_gradient_with_an_offset_and_a_step():
    """dO as a part of a larger tensor, in none of O's strides."""
    q, k, v = inputs(q_len=33)
    d_o = bf16(*q.shape)
    larger = torch.full((2, 3, 33, 8, 70), torch.nan, dtype=torch.bfloat16)
    part = larger[:, 1, :, ::2, 3:67]
    part.copy_(d_o)
    expected = torch.autograd.grad(attend(q, k, v), (q, k, v), d_o)
    grads = torch.autograd.grad(attend(q, k, v), (q, k, v), part)
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))
