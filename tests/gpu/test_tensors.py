"""Strides, alignment and gradients as the kernels meet them in models: the same bits as from contiguous tensors."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import DEVICE, MODES, Case, Inputs, Result, backward, forward, gaussian, ragged, run, square
from gpu_compare import mismatches
from torch import Tensor

from delta_matching import dm_attn_func, dm_attn_varlen_func


def _apart(x: Tensor, before: int, after: int) -> Tensor:
    """The same values inside a larger tensor of NaN, ``before`` elements into it."""
    shape = (*x.shape[:-2], x.shape[-2] + 1, x.shape[-1] + before + after)
    larger = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = larger[..., : x.shape[-2], before : before + x.shape[-1]]
    return view.copy_(x)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """[batch, length, heads, head_dim] with other strides, the last of them 1."""
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "length first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "aligned, part of a larger tensor": _apart(x, 8, 8),
        "off by 2 bytes": _apart(x, 1, 7),
        "odd strides": _apart(x, 3, 2),
    }


def _same(judge, what: str, a: Result, b: Result, case: Case) -> None:
    for name, tensor in a.tensors().items():
        judge.same_bits(f"{what}: {name}", mismatches(tensor, b.tensors()[name]), case)


@pytest.mark.parametrize("length", [65, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("operand", ["q", "k", "v", "d_o"])
def test_strides(judge, operand, head_dim, length):
    case = square("onepass", head_dim, length, batch=2)
    x = gaussian(case).to(DEVICE)
    expected = run(case, x)
    for name, strided in layouts(getattr(x, operand)).items():
        _same(judge, name, run(case, x._replace(**{operand: strided})), expected, case)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_all_off_by_two_bytes(judge, mode):
    case = square(mode, 128, 300, batch=2)
    x = gaussian(case).to(DEVICE)
    expected = run(case, x)
    odd = Inputs(*(_apart(t, 1, 7) for t in x))
    _same(judge, "inputs", run(case, odd), expected, case)
    saved = expected.saved._replace(o=_apart(expected.saved.o, 1, 7))
    if saved.o_low is not None:
        saved = saved._replace(o_low=_apart(saved.o_low, 1, 7))
    _same(judge, "O as well", Result(expected.saved, backward(case, odd, saved)), expected, case)


@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_strided_outputs(judge, mode):
    """dQ, dK and dV inside larger tensors, at odd addresses: nothing between their rows is written."""
    import ctypes

    from gpu_calls import argument, problem_of

    from delta_matching import _library

    case = square(mode, 128, 200, batch=2)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x)
    expected = backward(case, x, saved)
    nan = torch.full((), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    outputs = [_apart(nan.expand(shape), 1, 2) for shape in (case.q_shape, case.k_shape, case.k_shape)]
    call = problem_of(case, DEVICE)
    nbytes = _library.workspace_size(call.problem)[1]
    workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=DEVICE)
    args = _library.BackwardArgs(
        q=argument(x.q),
        k=argument(x.k),
        v=argument(x.v),
        o=argument(saved.o),
        d_o=argument(x.d_o),
        saved=_library.Saved(saved.reference.data_ptr(), saved.sum.data_ptr(), argument(saved.o_low)),
        dq=argument(outputs[0]),
        dk=argument(outputs[1]),
        dv=argument(outputs[2]),
        workspace=workspace.data_ptr() if nbytes else None,
        workspace_bytes=nbytes,
    )
    _library.call("backward", call.problem, ctypes.byref(args))
    for name, output in zip(("dq", "dk", "dv"), outputs, strict=True):
        judge.same_bits(name, mismatches(output, getattr(expected, name)), case)
        whole = output._base
        inside = torch.zeros(whole.shape, dtype=torch.bool, device=DEVICE)
        inside[..., :-1, 1 : 1 + case.head_dim] = True
        judge.true(f"nothing between the rows of {name} is written", bool(whole[~inside].isnan().all()), case)


def _operator(mode: str, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    o = dm_attn_func(*leaves, causal=True, mode=mode)
    return (o.detach(), *torch.autograd.grad(o, leaves, d_o))


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_operator_equals_the_abi(judge, mode):
    case = square(mode, 128, 300, batch=2)
    x = gaussian(case).to(DEVICE)
    result = run(case, x).tensors()
    for name, tensor in zip(("o", "dq", "dk", "dv"), _operator(mode, *x), strict=True):
        judge.same_bits(name, mismatches(tensor, result[name]), case)


@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_gradients_of_any_strides(judge, mode):
    """Gradients as autograd hands them over: transposed, expanded, with a strided last dimension."""
    case = square(mode, 64, 150, batch=2)
    x = gaussian(case).to(DEVICE)
    expanded = x.d_o[:, :1].expand(-1, case.q_len, -1, -1)
    pairs = torch.stack([x.d_o, torch.full_like(x.d_o, torch.nan)], dim=-1).flatten(-2)
    for name, gradient in {
        "transposed": x.d_o.transpose(1, 2).contiguous().transpose(1, 2),
        "last dimension strided": x.d_o.transpose(1, 3).contiguous().transpose(1, 3),
        "every second element": pairs[..., ::2],
        "expanded": expanded,
        "a single number": torch.ones((), dtype=torch.bfloat16, device=DEVICE).expand(case.q_shape),
    }.items():
        assert not gradient.is_contiguous()
        strided = _operator(mode, x.q, x.k, x.v, gradient)
        plain = _operator(mode, x.q, x.k, x.v, gradient.contiguous())
        judge.same_bits(name, sum(mismatches(a, b) for a, b in zip(strided, plain, strict=True)), case)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_inputs_with_a_strided_last_dimension(judge, operand):
    """They are copied."""
    case = square("onepass", 64, 150, batch=2)
    x = gaussian(case).to(DEVICE)
    turned = x._replace(**{operand: getattr(x, operand).transpose(1, 3).contiguous().transpose(1, 3)})
    pairs = zip(_operator("onepass", *turned), _operator("onepass", *x), strict=True)
    judge.same_bits("all outputs", sum(mismatches(a, b) for a, b in pairs), case)


def test_packed_projection_and_expanded_keys(judge):
    """q, k and v as slices of one projection; one KV head shown four times through a stride of 0."""
    case = square("matched", 128, 200, (4, 4), batch=2)
    packed = torch.randn(2, 200, 12, 128, device=DEVICE).to(torch.bfloat16).requires_grad_()
    separate = [t.detach().clone().requires_grad_() for t in packed.split(4, dim=2)]
    dm_attn_func(*packed.split(4, dim=2), causal=True).float().square().sum().backward()
    dm_attn_func(*separate, causal=True).float().square().sum().backward()
    whole = torch.cat([t.grad for t in separate], dim=2)
    judge.same_bits("gradient of a packed projection", mismatches(packed.grad, whole), case)
    q, k, v = (t.detach() for t in separate)
    shown = dm_attn_func(q, k[:, :, :1].expand(-1, -1, 4, -1), v[:, :, :1].expand(-1, -1, 4, -1), causal=True)
    once = dm_attn_func(q, k[:, :, :1], v[:, :, :1], causal=True)
    judge.same_bits("O with expanded keys", mismatches(shown, once), case)


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_through_the_operator(judge, mode):
    """Offsets on the device and on the CPU; padding rows are zero (lse -infinity), the rest is the ABI's."""
    lengths = (5, 0, 130, 1, 64, 300)
    case = ragged(mode, 64, lengths, padding=7)
    x = gaussian(case)
    rows = sum(lengths)
    for t in x:
        t[rows:] = torch.nan
    x = x.to(DEVICE)
    expected = run(case, x).tensors()
    host = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for where in ("cpu", DEVICE):
        offsets = host.to(where)
        leaves = [t.detach().requires_grad_() for t in x[:3]]
        o, lse = dm_attn_varlen_func(*leaves, offsets, offsets, 300, 300, causal=True, mode=mode, return_lse=True)
        gradients = torch.autograd.grad(o, leaves, x.d_o)
        for name, tensor in zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True):
            judge.same_bits(f"{name}, offsets on {where}", mismatches(tensor[:rows], expected[name][:rows]), case)
            judge.true(f"padding of {name}, offsets on {where}", not tensor[rows:].any(), case)
        judge.same_bits(f"lse, offsets on {where}", mismatches(lse[:, :rows], expected["lse"][:, :rows]), case)
        judge.true(f"padding of lse, offsets on {where}", bool((lse[:, rows:] == -torch.inf).all()), case)
