"""The same bits in every run: repeated, on other streams, under load, with other limits of the workspace, from a CUDA
graph, on another GPU. A result that changes between runs is a race."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from gpu_calls import (
    DEVICE,
    MODES,
    ON_GPU,
    Case,
    Inputs,
    Result,
    backward,
    forward,
    gaussian,
    ragged,
    run,
    square,
)
from gpu_compare import bits, mismatches

from delta_matching import dm_attn_func, dm_attn_varlen_func, set_workspace_cap, workspace_cap

#: What a race would show in first: causal, several query heads to a KV head, ragged ends, more than one interval.
HARD = [
    square("matched", 128, 1208, (8, 2), batch=2),
    square("onepass", 128, 1208, (8, 2), batch=2),
    ragged("onepass", 128, (0, 5, 0, 1208, 840), q_heads=8, kv_heads=2),
    square("matched", 256, 840, (4, 1)),
    square("stale", 64, 2048, (4, 4), causal=False),
]
CAPS = (1, 1 << 20, 8 << 20, 1 << 26)


def _judge_same(judge, what: str, a: Result, b: Result, case: Case) -> None:
    for name, tensor in a.tensors().items():
        judge.same_bits(f"{what}: {name}", mismatches(tensor, b.tensors()[name]), case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_workspace_cap(judge, mode, head_dim, causal):
    """From one chunk down to a query head against 128 keys at a time."""
    case = square(mode, head_dim, 700, (8, 2), batch=2, causal=causal)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x)
    whole = Result(saved, backward(case, x, saved))
    for cap in CAPS:
        _judge_same(judge, f"cap {cap}", Result(saved, backward(case, x, saved, cap=cap)), whole, case)


@pytest.mark.parametrize("mode", MODES)
def test_workspace_cap_of_packed_sequences(judge, mode):
    case = ragged(mode, 128, (0, 5, 0, 1208, 840), (700, 5, 20, 1000, 0), q_heads=4, kv_heads=2)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x)
    whole = Result(saved, backward(case, x, saved))
    for cap in CAPS:
        _judge_same(judge, f"cap {cap}", Result(saved, backward(case, x, saved, cap=cap)), whole, case)


@pytest.mark.parametrize("queries,keys", [(300, 1000), (1000, 300), (64, 4000)])
def test_workspace_cap_of_other_lengths(judge, queries, keys):
    case = Case("onepass", 64, queries, keys, 4, 2, batch=2)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x)
    whole = Result(saved, backward(case, x, saved))
    for cap in CAPS:
        _judge_same(judge, f"cap {cap}", Result(saved, backward(case, x, saved, cap=cap)), whole, case)


@pytest.mark.quick
@pytest.mark.parametrize("length,heads,cap", [(2048, (32, 4), 16 << 20), (4096, (32, 4), 64 << 20), (700, (8, 2), 1)])
@pytest.mark.parametrize("needed", ["kv", "q", "k", "v"])
def test_workspace_cap_without_some_gradients(judge, length, heads, cap, needed):
    """Plans are made for dQ; what is left of them without it must fit as well."""
    case = square("onepass", 64, length, heads, causal=False)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x)
    whole, cut = backward(case, x, saved), backward(case, x, saved, cap=cap, needed=needed)
    for name in needed:
        judge.same_bits(f"d{name}", mismatches(getattr(cut, f"d{name}"), getattr(whole, f"d{name}")), case)


def test_workspace_cap_of_the_operators(judge):
    case = square("onepass", 128, 4096 if ON_GPU else 300, (8, 2))
    q, k, v, d_o = gaussian(case).to(DEVICE)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(dm_attn_func(*leaves, causal=True, mode="onepass"), leaves, d_o)

    expected, peaks = gradients(), []
    try:
        for cap in (1 << 20, None):
            set_workspace_cap(cap)
            assert workspace_cap() == (cap or 0)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            judge.same_bits(f"cap {cap}", sum(map(mismatches, gradients(), expected)), case)
            peaks.append(torch.cuda.max_memory_allocated() if ON_GPU else 0)
    finally:
        set_workspace_cap(None)
    judge.true("less room takes less memory", not ON_GPU or peaks[0] < peaks[1], case)


# --- Repeats ---------------------------------------------------------------------------------------------------------


def _side_stream() -> contextlib.AbstractContextManager:
    return torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext()


class Load:
    """Work for another stream: products of matrices, a few at a time."""

    def __init__(self) -> None:
        if ON_GPU:
            self.stream = torch.cuda.Stream()
            self.a = torch.randn(3072, 3072, device=DEVICE, dtype=torch.bfloat16)
            self.out = torch.empty_like(self.a)
            torch.cuda.synchronize()

    def add(self, count: int = 2) -> None:
        if ON_GPU:
            with torch.cuda.stream(self.stream):
                for _ in range(count):
                    torch.mm(self.a, self.a, out=self.out)


def _repeat(judge, case: Case, repeats: int, load: Load | None) -> None:
    """Counts differing values on the device, so that calls follow one another without a pause."""
    x = gaussian(case).to(DEVICE)
    expected = run(case, x).tensors()
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(repeats):
        if load is not None:
            load.add()
        saved = forward(case, x, check=False)
        result = Result(saved, backward(case, x, saved, check=False)).tensors()
        for name, tensor in result.items():
            differing += (bits(tensor) != bits(expected[name])).sum()
    judge.same_bits(f"{repeats} repeats", int(differing), case)


@pytest.mark.quick
@pytest.mark.parametrize("case", HARD, ids=str)
def test_repeats(judge, case):
    _repeat(judge, case, 20 if ON_GPU else 2, None)


@pytest.mark.stress
@pytest.mark.parametrize("case", HARD, ids=str)
def test_repeats_under_load(judge, case):
    _repeat(judge, case, 1000 if ON_GPU else 2, Load())


@pytest.mark.stress
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small_shapes_under_load(judge, head_dim, mode):
    _repeat(judge, square(mode, head_dim, 200, (4, 2), batch=2), 200 if ON_GPU else 2, Load())


@pytest.mark.parametrize("mode", MODES)
def test_other_streams(judge, mode):
    """Several calls at a time on streams of their own, beside a load."""
    case = square(mode, 128, 840, (4, 2))
    x = gaussian(case).to(DEVICE)
    expected, load = run(case, x), Load()
    if ON_GPU:
        torch.cuda.synchronize()
    results = []
    for _ in range(8):
        load.add(1)
        with _side_stream():
            saved = forward(case, x, check=False)
            results.append(Result(saved, backward(case, x, saved, check=False)))
    if ON_GPU:
        torch.cuda.synchronize()
    for index, result in enumerate(results):
        _judge_same(judge, f"stream {index}", result, expected, case)


@pytest.mark.cuda_only
def test_the_operators_follow_the_current_stream(judge):
    """Inputs that a side stream is still writing when the call is made."""
    case = square("matched", 128, 840, (4, 2))
    x = gaussian(case).to(DEVICE)
    expected = run(case, x).tensors()
    stream, load = torch.cuda.Stream(), torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(10):
            load = load @ load * 1e-4
        late = [torch.zeros_like(t).copy_(t).requires_grad_() for t in x[:3]]
        o = dm_attn_func(*late, causal=True, mode="matched")
        gradients = torch.autograd.grad(o, late, x.d_o)
    torch.cuda.synchronize()
    for name, tensor in zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True):
        judge.same_bits(name, mismatches(tensor, expected[name]), case)


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


def _step(case: Case, x: Inputs, offsets: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Forward and backward through autograd; x's leaves must require gradients."""
    if offsets is None:
        o, lse = dm_attn_func(*x[:3], causal=case.causal, mode=case.mode, return_lse=True)
    else:
        o, lse = dm_attn_varlen_func(
            *x[:3], offsets, offsets, 400, 400, causal=case.causal, mode=case.mode, return_lse=True
        )
    return (o, lse, *torch.autograd.grad(o, x[:3], x.d_o))


def _leaves(x: Inputs) -> Inputs:
    return Inputs(*(t.to(DEVICE).detach().requires_grad_() for t in x[:3]), x.d_o.to(DEVICE))


def _capture(case: Case, x: Inputs, offsets: torch.Tensor | None = None):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # loads what is loaded on first use
            _step(case, x, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = _step(case, x, offsets)
    return graph, outputs


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph(judge, head_dim, mode):
    """Captured once, replayed on other values: the bits of plain calls."""
    case = square(mode, head_dim, 500, (4, 2))
    static = _leaves(gaussian(case))
    graph, outputs = _capture(case, static)
    for seed in range(3):
        fresh = gaussian(case, seed + 1)
        with torch.no_grad():
            for mine, value in zip(static, fresh, strict=True):
                mine.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.detach().clone() for t in outputs]
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), replayed, _step(case, _leaves(fresh)), strict=True):
            judge.same_bits(f"{name}, replay {seed}", mismatches(a, b.detach()), case)


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_graph_of_packed_sequences(judge, mode):
    """Offsets on the device may change between replays; padding rows of the replayed outputs are zero."""
    lengths = [(100, 400, 0, 12), (0, 1, 399, 300), (400, 12, 100, 188)]
    case = ragged(mode, 64, (400, 200, 100, 12))
    static = _leaves(gaussian(case))
    offsets = torch.tensor([0, *lengths[0]], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
    graph, outputs = _capture(case, static, offsets)
    for chosen in lengths:
        now = torch.tensor([0, *chosen], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
        offsets.copy_(now)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.detach().clone() for t in outputs]
        plain = _step(case, Inputs(*(t.detach().requires_grad_() for t in static[:3]), static.d_o), now)
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), replayed, plain, strict=True):
            judge.same_bits(f"{name}, lengths {chosen}", mismatches(a, b.detach()), case)


@pytest.mark.cuda_only
def test_graph_refuses_offsets_on_the_cpu():
    case = ragged("matched", 64, (100, 200))
    x = _leaves(gaussian(case))
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens_q is on cpu: expected a tensor on cuda:0 while a CUDA graph"):
        _capture(case, x, offsets)
    torch.cuda.synchronize()
    assert _step(case, x, offsets)[0].isfinite().all()


# --- Other GPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", MODES)
def test_another_gpu(judge, mode):
    """A call on a GPU that is not the current one: the same bits, and the current GPU stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, Torch finds {torch.cuda.device_count()}")
    case = square(mode, 128, 500, (4, 2))
    x = gaussian(case)
    expected, other = run(case, x), run(case, x, torch.device("cuda:1"))
    _judge_same(judge, "cuda:1", Result(other.saved.to(DEVICE), other.gradients), expected, case)
    assert torch.cuda.current_device() == 0
    leaves = [t.to("cuda:1").requires_grad_() for t in x[:3]]
    o = dm_attn_func(*leaves, causal=True, mode=mode)
    gradients = torch.autograd.grad(o, leaves, x.d_o.to("cuda:1"))
    for name, tensor in zip(("o", "dq", "dk", "dv"), (o.detach(), *gradients), strict=True):
        judge.same_bits(f"operator, {name}", mismatches(expected.tensors()[name], tensor), case)
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="k is on cuda:0, q on cuda:1"):
        dm_attn_func(leaves[0], x.k.to("cuda:0"), x.v.to("cuda:0"))


def test_modes_are_independent(judge):
    """A call leaves nothing behind that the next would see: modes and shapes in turn, then once more."""
    cases = [square(mode, head_dim, 200, (4, 2)) for mode in MODES for head_dim in (64, 128, 256)]
    first = [run(case, gaussian(case)) for case in cases]
    for case, expected in reversed(list(zip(cases, first, strict=True))):
        _judge_same(judge, "second run", run(case, gaussian(case)), expected, case)
    twice = dataclasses.replace(cases[0], batch=2)
    assert run(twice, gaussian(twice)).saved.o.isfinite().all()
