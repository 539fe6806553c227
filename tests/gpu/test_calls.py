"""Wrong calls: each fails with one line that names the argument, writes nothing, and leaves the next call right."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch
from gpu_calls import DEVICE, ON_GPU, Poisoned, argument, backward, forward, gaussian, problem_of, ragged, square
from gpu_compare import same_bits

from delta_matching import _library, dm_attn_func, dm_attn_varlen_func, set_workspace_cap

CASE = square("onepass", 64, 150, (4, 2), batch=2)


@pytest.fixture
def x():
    return gaussian(CASE).to(DEVICE)


@pytest.fixture(autouse=True)
def _next_call_is_right(x):
    """Around every test: the same call gives the same bits before and after."""
    before = forward(CASE, x)
    yield
    assert same_bits(forward(CASE, x).o, before.o)
    if ON_GPU:
        torch.cuda.synchronize()  # a fault of a kernel would show here


# --- Through the operators -------------------------------------------------------------------------------------------


def _device(name: str) -> str:
    return str(DEVICE) if name == "gpu" else name


CALLS = [
    (dict(q="float32"), TypeError, r"q: expected torch\.bfloat16, got torch\.float32"),
    (dict(k="float16"), TypeError, r"k: expected torch\.bfloat16, got torch\.float16"),
    (dict(v="float8_e4m3fn"), TypeError, r"v: expected torch\.bfloat16, got torch\.float8_e4m3fn"),
    (dict(mode="exact"), ValueError, "mode: expected one of stale, consistent, matched, onepass, got 'exact'"),
    (dict(centre="v"), ValueError, "centre: expected one of none, k, qk, got 'v'"),
    (dict(softmax_scale=0.0), ValueError, r"softmax_scale: expected a finite value above 0, got 0\.0"),
    (dict(dropout_p=0.1), TypeError, "argument 'dropout_p' is refused"),
    (dict(window_size=(128, 0)), TypeError, "argument 'window_size' is refused"),
]


@pytest.mark.quick
@pytest.mark.parametrize("change,kind,message", CALLS, ids=lambda v: str(v)[:40])
def test_refused(x, change, kind, message):
    tensors = dict(q=x.q, k=x.k, v=x.v)
    options = {}
    for name, value in change.items():
        if name in tensors:
            tensors[name] = tensors[name].to(getattr(torch, value))
        else:
            options[name] = value
    with pytest.raises(kind, match=message):
        dm_attn_func(*tensors.values(), **options)


@pytest.mark.quick
@pytest.mark.parametrize("head_dim", [1, 32, 80, 96, 192, 512])
def test_head_dims(head_dim):
    t = torch.zeros(1, 64, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"head_dim: expected 64, 128 or 256 in hopper numerics, got {head_dim}"):
        dm_attn_func(t, t, t)


@pytest.mark.cuda_only
@pytest.mark.quick
def test_devices_do_not_mix(x):
    for name in ("k", "v"):
        tensors = dict(q=x.q, k=x.k, v=x.v)
        tensors[name] = tensors[name].cpu()
        with pytest.raises(RuntimeError, match=f"{name} is on cpu, q on cuda:0: expected one device"):
            dm_attn_func(**tensors)
    with pytest.raises(RuntimeError, match="k is on cuda:0, q on cpu"):
        dm_attn_func(x.q.cpu(), x.k, x.v)
    q = x.q.clone().requires_grad_()
    o, _, *saved = torch.ops.delta_matching.forward(q.detach(), x.k, x.v, None, None, 0, 0, *_OPTIONS)
    with pytest.raises(RuntimeError, match="d_o is on cpu, q on cuda:0"):
        torch.ops.delta_matching.backward(o.cpu(), q, x.k, x.v, o, *saved, None, None, *_OPTIONS, True, True, True)
    with pytest.raises(RuntimeError, match="reference is on cpu, q on cuda:0"):
        torch.ops.delta_matching.backward(
            o, q, x.k, x.v, o, saved[0].cpu(), *saved[1:], None, None, *_OPTIONS, True, True, True
        )


_OPTIONS = (None, True, "onepass", "hopper", None)


@pytest.mark.cuda_only
@pytest.mark.quick
def test_paper_numerics_is_for_the_cpu(x):
    with pytest.raises(RuntimeError, match="numerics: expected hopper on cuda:0, got paper"):
        dm_attn_func(x.q, x.k, x.v, numerics="paper")


@pytest.mark.quick
@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "offsets,bounds,message",
    [
        ((1, 4, 10), (9, 9), "cu_seqlens_q: expected a first offset of 0, got 1"),
        ((0, 8, 5), (9, 9), "cu_seqlens_q: expected offsets that never fall, got 5 after 8 at index 2"),
        ((0, 4, 11), (9, 9), "cu_seqlens_q: expected a last offset of at most the 10 rows given, got 11"),
        ((0, 4, 10), (5, 9), "max_seqlen_q: expected at least the longest sequence, 6, got 5"),
        ((0, 4, 10), (9, 5), "max_seqlen_k: expected at least the longest sequence, 6, got 5"),
    ],
)
def test_offsets(where, offsets, bounds, message):
    t = torch.zeros(10, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    cu = torch.tensor(offsets, dtype=torch.int32, device=_device(where))
    good = torch.tensor((0, 4, 10), dtype=torch.int32, device=_device(where))
    for _ in range(2):  # a refusal is not remembered as an approval
        with pytest.raises(ValueError, match=message):
            dm_attn_varlen_func(t, t, t, cu, good, *bounds)
    assert dm_attn_varlen_func(t, t, t, good, good, 6, 6).shape == t.shape
    with pytest.raises(TypeError, match=r"cu_seqlens_k: expected torch\.int32, got torch\.int64"):
        dm_attn_varlen_func(t, t, t, good, good.long(), 6, 6)


@pytest.mark.quick
def test_offsets_are_looked_at_again_after_a_write():
    t = torch.zeros(10, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    cu = torch.tensor((0, 4, 10), dtype=torch.int32, device=DEVICE)
    dm_attn_varlen_func(t, t, t, cu, cu, 6, 6)
    cu[1] = 2
    with pytest.raises(ValueError, match="max_seqlen_q: expected at least the longest sequence, 8, got 6"):
        dm_attn_varlen_func(t, t, t, cu, cu, 6, 6)
    dm_attn_varlen_func(t, t, t, cu, cu, 8, 8)


@pytest.mark.cuda_only
def test_offsets_are_looked_at_once():
    """The second call, and every backward, waits for nothing."""
    t = torch.zeros(10, 2, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    cu = torch.tensor((0, 4, 10), dtype=torch.int32, device=DEVICE)
    ones = torch.ones_like(t)
    dm_attn_varlen_func(t, t, t, cu, cu, 6, 6).backward(ones)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for mode in ("matched", "onepass"):
            dm_attn_varlen_func(t, t, t, cu, cu, 6, 6, mode=mode).backward(ones)
            dm_attn_func(t[None], t[None], t[None], mode=mode).backward(ones[None])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.quick
def test_workspace_cap():
    for value, kind in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="nbytes: expected"):
            set_workspace_cap(value)


# --- Through the C ABI -----------------------------------------------------------------------------------------------


class Abi:
    """Both calls with every argument in place, to be spoilt one at a time."""

    def __init__(self, x) -> None:
        self.x, self.out = x, Poisoned(DEVICE)
        self.saved = forward(CASE, x)
        shapes = (CASE.q_shape, CASE.q_shape, CASE.k_shape, CASE.k_shape)
        self.outputs = [self.out.empty(shape, torch.bfloat16) for shape in shapes]
        self.problem = problem_of(CASE, DEVICE).problem
        sizes = _library.workspace_size(self.problem)
        self.workspaces = [torch.empty(max(n, 1) + 512, dtype=torch.uint8, device=DEVICE) for n in sizes]
        saved = _library.Saved(self.saved.reference.data_ptr(), self.saved.sum.data_ptr(), argument(self.saved.o_low))
        common = dict(q=argument(x.q), k=argument(x.k), v=argument(x.v))
        o, dq, dk, dv = (argument(t) for t in self.outputs)
        self.forward = _library.ForwardArgs(
            **common, o=o, workspace=self.workspaces[0].data_ptr(), workspace_bytes=sizes[0]
        )
        self.backward = _library.BackwardArgs(
            **common,
            o=argument(self.saved.o),
            d_o=argument(x.d_o),
            saved=saved,
            dq=dq,
            dk=dk,
            dv=dv,
            workspace=self.workspaces[1].data_ptr(),
            workspace_bytes=sizes[1],
        )

    def call(self, function: str) -> None:
        _library.call(function, self.problem, ctypes.byref(getattr(self, function)))

    def untouched(self) -> bool:
        if ON_GPU:
            torch.cuda.synchronize()
        return all(bool((t.view(torch.uint8) == 0xFF).all()) for t in self.outputs) and self.out.intact()


def _set(target: Any, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        target = getattr(target, name)
    setattr(target, last, value)


SPOILT = [
    ("forward", "forward.q.data", None, "q.data: expected a pointer"),
    ("forward", "forward.o.data", None, "o.data: expected a pointer"),
    ("backward", "backward.v.data", None, "v.data: expected a pointer"),
    ("backward", "backward.d_o.data", None, "d_o.data: expected a pointer"),
    ("backward", "backward.saved.reference", None, "saved: expected both of reference and sum or neither"),
    ("forward", "forward.k.seq_stride", -64, "k.seq_stride: expected at least 0, got -64"),
    ("forward", "forward.o.head_stride", 32, "o.*stride: expected at least"),
    ("forward", "forward.struct_size", 8, "args.struct_size: expected"),
    ("forward", "problem.struct_size", 8, "problem.struct_size: expected"),
    ("forward", "problem.head_dim", 96, "head_dim: expected 64, 128 or 256"),
    ("forward", "problem.q_heads", 5, "q_heads: expected a multiple of kv_heads"),
    ("forward", "problem.mode", 4, "mode: expected 0 ... 3, got 4"),
    ("forward", "problem.softmax_scale", -1.0, "softmax_scale: expected a finite number above 0"),
    ("backward", "problem.causal", 2, "causal: expected 0 or 1, got 2"),
]
ON_THE_GPU_ALONE = [
    ("forward", "forward.workspace", None, "args.workspace: expected a pointer"),
    ("backward", "backward.workspace", None, "args.workspace: expected a pointer"),
    ("forward", "forward.workspace_bytes", 0, "args.workspace_bytes: expected at least [0-9]+, got 0"),
    ("backward", "backward.workspace_bytes", 1000, "args.workspace_bytes: expected at least [0-9]+, got 1000"),
    ("forward", "problem.numerics", 1, "numerics: expected hopper with device cuda, got paper"),
    ("forward", "problem.accumulator", 1, "accumulator: expected tensor_core with device cuda, got fp32"),
    ("forward", "problem.device_index", 99, "device_index: expected 0"),
    ("forward", "problem.device_index", -1, "device_index: expected 0"),
    ("forward", "problem.device", 2, r"device: expected 0 \(cpu\) or 1 \(cuda\), got 2"),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    "function,path,value,message",
    [*SPOILT, *(pytest.param(*spoilt, marks=pytest.mark.cuda_only) for spoilt in ON_THE_GPU_ALONE)],
    ids=lambda v: str(v)[:40],
)
def test_spoilt(x, function, path, value, message):
    abi = Abi(x)
    _set(abi, path, value)
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        abi.call(function)
    assert "\n" not in str(caught.value)
    assert abi.untouched()


@pytest.mark.cuda_only
@pytest.mark.quick
@pytest.mark.parametrize("phase,size", [("forward", 0), ("backward", 1)])
def test_workspace_that_is_one_byte_short_or_unaligned(x, phase, size):
    abi = Abi(x)
    needed = _library.workspace_size(abi.problem)[size]
    args = getattr(abi, phase)
    args.workspace_bytes = needed - 1
    with pytest.raises(ValueError, match=f"args.workspace_bytes: expected at least {needed}, got {needed - 1}"):
        abi.call(phase)
    args.workspace_bytes = needed
    args.workspace = abi.workspaces[size].data_ptr() + 128
    with pytest.raises(ValueError, match=r"args\.workspace: expected an address aligned to 256 bytes"):
        abi.call(phase)
    assert abi.untouched()


@pytest.mark.cuda_only
@pytest.mark.quick
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize(
    "function,path,name",
    [
        ("forward", "forward.q.data", "q.data"),
        ("forward", "forward.o.data", "o.data"),
        ("forward", "forward.workspace", "args.workspace"),
        ("backward", "backward.d_o.data", "d_o.data"),
        ("backward", "backward.dk.data", "dk.data"),
        ("backward", "backward.saved.sum", "saved.sum"),
    ],
)
def test_host_memory(x, function, path, name, pinned):
    """A host pointer would be a fault that no later call recovers from: it is refused before."""
    abi = Abi(x)
    host = torch.zeros(1 << 22, dtype=torch.uint8, pin_memory=pinned)
    pointer = -(-host.data_ptr() // 256) * 256
    _set(abi, path, pointer)
    with pytest.raises(ValueError, match=f"{name}: expected memory of GPU 0, got .*host memory"):
        abi.call(function)
    assert abi.untouched()


@pytest.mark.cuda_only
@pytest.mark.quick
def test_only_the_cpu_has_the_reference_and_the_probe(x):
    problem = problem_of(CASE, DEVICE).problem
    args = _library.ReferenceArgs(q=argument(x.q), k=argument(x.k), v=argument(x.v))
    with pytest.raises(RuntimeError, match="device: expected cpu, got cuda"):
        _library.call("reference", problem, ctypes.byref(args))
    probe, text = _library.ProbeArgs(q=argument(x.q), k=argument(x.k), v=argument(x.v)), ctypes.c_char_p()
    with pytest.raises(RuntimeError, match="device: expected cpu, got cuda"):
        _library.call("probe", problem, ctypes.byref(probe), ctypes.byref(text))


@pytest.mark.cuda_only
@pytest.mark.quick
def test_bounds_above_the_totals():
    case = ragged("matched", 64, (5, 9))
    problem = problem_of(case, DEVICE).problem
    problem.max_q_len = 15
    with pytest.raises(ValueError, match=r"max_q_len: expected 0 \.\.\. 14, got 15"):
        _library.workspace_size(problem)


def test_without_saved_statistics(judge, x):
    """From lse alone the backward still works; onepass then has about consistent's accuracy."""
    for mode in ("matched", "onepass", "consistent", "stale"):
        case = dataclasses.replace(CASE, mode=mode)
        saved = forward(case, x)
        usual, bare = backward(case, x, saved), backward(case, x, saved, from_lse=True)
        cpu = backward(case, x.to("cpu"), saved.to("cpu"), "cpu", from_lse=True)
        for name in ("dq", "dk", "dv"):
            a, b, c = (getattr(g, name).to(DEVICE).double() for g in (usual, bare, cpu))
            judge.at_most(f"{name} beside the usual", float((a - b).norm() / a.norm()), 0.1, case)
            judge.at_most(f"{name} beside the twin's", float((b - c).norm() / c.norm()), 2e-3, case)
