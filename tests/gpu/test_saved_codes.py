"""Codes that the forward leaves: the backward's bits with and without them, wrong calls, and what the operators do.

Where the twin stands in for the GPU, twin_codes.py stands in for the codes.
"""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from gpu_calls import (
    DEVICE,
    MODES,
    ON_GPU,
    Case,
    Inputs,
    Poisoned,
    Saved,
    argument,
    backward,
    forward,
    gaussian,
    problem_of,
    ragged,
    square,
)
from gpu_compare import mismatches, same_bits

import saved_codes_cases as cases
from delta_matching import _library, dm_attn_func, save_codes, set_save_codes
from twin_codes import codes_on_the_twin


@pytest.fixture(autouse=True)
def _codes(monkeypatch):
    monkeypatch.delenv("DELTA_MATCHING_SAVE_CODES", raising=False)
    if ON_GPU:
        yield
    else:
        with codes_on_the_twin():
            yield
    set_save_codes(None)


# --- Bits ------------------------------------------------------------------------------------------------------------


def _judge_same(judge, case: Case, x: Inputs, **options) -> None:
    """A forward and a backward with codes and without; k and v are gone before the backward with codes."""
    x = x.to(DEVICE)
    old, new = forward(case, x), forward(case, x, codes=True)
    for name, a, b in zip(Saved._fields[:5], new, old, strict=False):
        if a is not None:
            judge.same_bits(f"forward: {name}", mismatches(a, b), case)
    expected = backward(case, x, old, **options)
    gradients = backward(case, x, new, **options)
    for name, a, b in zip(gradients._fields, gradients, expected, strict=True):
        if a is not None:
            judge.same_bits(f"backward: {name}", mismatches(a, b), case)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_same_bits(judge, mode, head_dim, causal):
    for heads in ((4, 2), (3, 3)):
        case = square(mode, head_dim, 300, heads, batch=2, causal=causal)
        _judge_same(judge, case, gaussian(case))


@pytest.mark.parametrize("centre", ["none", "k", "qk"])
@pytest.mark.parametrize("mode", MODES)
def test_every_centre(judge, mode, centre):
    case = square(mode, 128, 700, (4, 1), batch=2, centre=centre)
    _judge_same(judge, case, gaussian(case))
    case = ragged(mode, 64, (0, 5, 200, 129), (3, 0, 300, 77), padding=40, centre=centre)
    _judge_same(judge, case, gaussian(case))


@pytest.mark.parametrize("bounds", [True, False], ids=["bounds", "no bounds"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences(judge, mode, head_dim, bounds):
    case = ragged(mode, head_dim, (0, 5, 0, 608, 240), (300, 5, 20, 500, 0), padding=70, bounds=bounds)
    _judge_same(judge, case, gaussian(case))


@pytest.mark.parametrize("queries,keys,batch", [(300, 1000, 2), (1000, 65, 1), (1, 700, 1), (700, 1, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_other_lengths(judge, mode, queries, keys, batch):
    case = Case(mode, 64, queries, keys, 4, 2, batch=batch)
    _judge_same(judge, case, gaussian(case))


@pytest.mark.parametrize("queries,keys,batch", [(0, 5, 2), (0, 500, 1), (5, 0, 2), (0, 0, 2), (200, 0, 1), (7, 7, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_on_one_side(judge, mode, queries, keys, batch):
    case = Case(mode, 64, queries, keys, 4, 2, batch=batch)
    _judge_same(judge, case, gaussian(case))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_long_rows(judge, mode):
    """Mean blocks of more than 128 queries, and dS in several chunks."""
    case = square(mode, 128, 9000 if ON_GPU else 700, (4, 2))
    _judge_same(judge, case, gaussian(case), cap=8 << 20)


@pytest.mark.parametrize(
    "options",
    [dict(cap=1), dict(needed="q"), dict(needed="kv"), dict(needed="k"), dict(from_lse=True), dict(function="delta")],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_other_calls(judge, mode, options):
    case = square(mode, 128, 700, (8, 2))
    _judge_same(judge, case, gaussian(case), **options)


def test_odd_values(judge):
    """Rows of zeros, infinities and NaN, a mean that dwarfs what varies."""
    for mode in MODES:
        case = square(mode, 64, 400, (4, 2))
        x = gaussian(case)
        x.k[:, 64:128] = 0
        x.q[:, 130] = torch.inf
        x.v[:, 200] = torch.nan
        x.k[:, 300] = torch.nan
        x.k[..., 3] += 100
        _judge_same(judge, case, x)


def test_given_delta(judge):
    case = square("matched", 128, 500, (4, 2))
    x = gaussian(case).to(DEVICE)
    delta = backward(case, x, forward(case, x)).delta
    _judge_same(judge, case, x, delta=delta)


def test_codes_are_only_read():
    """So that a second backward has them too; the mode does not matter to them."""
    case = square("onepass", 128, 700, (4, 2), batch=2)
    x = gaussian(case).to(DEVICE)
    saved = forward(case, x, codes=True)
    before = saved.codes.clone()
    first = backward(case, x, saved)
    assert torch.equal(saved.codes, before)
    second = backward(case, x, saved)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    matched = dataclasses.replace(case, mode="matched")
    usual = backward(matched, x, forward(matched, x))
    mixed = backward(matched, x, forward(matched, x)._replace(codes=saved.codes))
    assert all(same_bits(a, b) for a, b in zip(usual, mixed, strict=True))


@pytest.mark.cuda_only
def test_bytes():
    """3 D bytes a key, D a query, the biases; and scales, means and padding below 10 % of that."""
    for dim, length, heads, kv_heads in ((128, 8192, 8, 2), (64, 2048, 4, 4), (256, 4096, 2, 1)):
        problem = problem_of(square("matched", dim, length, (heads, kv_heads)), DEVICE).problem
        means = min(64, length // 128)
        expected = length * (3 * dim * kv_heads + dim * heads + 4 * means * heads)
        size = _library.saved_codes_size(problem)
        assert expected < size < 1.1 * expected
        for mode in MODES:
            assert (
                _library.saved_codes_size(problem_of(square(mode, dim, length, (heads, kv_heads)), DEVICE).problem)
                == size
            )
    assert _library.saved_codes_size(problem_of(square("matched", 64, 100), "cpu").problem) == 0


# --- Wrong calls -----------------------------------------------------------------------------------------------------

CASE = square("onepass", 64, 150, (4, 2), batch=2)


class Abi:
    """A forward that leaves codes and a backward that takes them, to be spoilt one argument at a time."""

    def __init__(self) -> None:
        self.x, self.out = gaussian(CASE).to(DEVICE), Poisoned(DEVICE)
        self.saved = forward(CASE, self.x, codes=True)
        self.problem = problem_of(CASE, DEVICE).problem
        self.size = _library.saved_codes_size(self.problem)
        sizes = _library.workspace_size(self.problem)
        self.workspaces = [torch.empty(max(n, 1), dtype=torch.uint8, device=DEVICE) for n in sizes]
        self.codes = torch.empty(self.size + 512, dtype=torch.uint8, device=DEVICE)
        self.outputs = [self.out.empty(shape, torch.bfloat16) for shape in (CASE.q_shape, CASE.q_shape)]
        self.forward = _library.ForwardArgs(
            q=argument(self.x.q),
            k=argument(self.x.k),
            v=argument(self.x.v),
            o=argument(self.outputs[0]),
            saved=_library.Saved(codes=self.codes.data_ptr(), codes_bytes=self.size),
            workspace=self.workspaces[0].data_ptr(),
            workspace_bytes=sizes[0],
        )
        statistics = (self.saved.reference.data_ptr(), self.saved.sum.data_ptr(), argument(self.saved.o_low))
        self.backward = _library.BackwardArgs(
            q=argument(self.x.q),
            o=argument(self.saved.o),
            d_o=argument(self.x.d_o),
            saved=_library.Saved(*statistics, self.saved.codes.data_ptr(), self.size),
            dq=argument(self.outputs[1]),
            workspace=self.workspaces[1].data_ptr(),
            workspace_bytes=sizes[1],
        )

    def call(self, function: str) -> None:
        _library.call(function, self.problem, ctypes.byref(getattr(self, function)))

    def refuses(self, function: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            self.call(function)
        assert "\n" not in str(caught.value)
        if ON_GPU:
            torch.cuda.synchronize()
        assert all(bool((t.view(torch.uint8) == 0xFF).all()) for t in self.outputs) and self.out.intact()


@pytest.fixture
def abi():
    """After the test the calls work as if nothing had been."""
    spoilt = Abi()
    yield spoilt
    again = Abi()
    for function in ("forward", "backward"):
        again.call(function)
    assert same_bits(again.outputs[0], again.saved.o)
    assert same_bits(again.outputs[1], backward(CASE, again.x, forward(CASE, again.x)).dq)


@pytest.mark.quick
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_too_few_bytes(abi, function):
    for nbytes in (0, 1, abi.size - 1):
        getattr(abi, function).saved.codes_bytes = nbytes
        abi.refuses(function, f"^saved.codes_bytes: expected at least {abi.size}, got {nbytes}$")


@pytest.mark.cuda_only
@pytest.mark.quick
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_address(abi, function):
    saved = getattr(abi, function).saved
    saved.codes += 128
    abi.refuses(function, r"^saved\.codes: expected an address aligned to 256 bytes$")
    for pinned in (False, True):
        host = torch.zeros(abi.size + 256, dtype=torch.uint8, pin_memory=pinned)
        saved.codes = -(-host.data_ptr() // 256) * 256
        abi.refuses(function, r"^saved\.codes: expected memory of GPU 0, got .*host memory")
    if torch.cuda.device_count() > 1:
        other = torch.zeros(abi.size, dtype=torch.uint8, device="cuda:1")
        saved.codes = other.data_ptr()
        abi.refuses(function, r"^saved\.codes: expected memory of GPU 0, got memory of GPU 1$")


@pytest.mark.quick
def test_keys_are_asked_for_without_codes(abi):
    abi.backward.saved.codes = None
    abi.refuses("backward", r"^k\.data: expected a pointer, got NULL$")
    abi.backward.k = argument(abi.x.k)
    abi.refuses("backward", r"^v\.data: expected a pointer, got NULL$")


@pytest.mark.cuda_only
@pytest.mark.quick
def test_workspace_of_a_backward_with_codes(abi):
    """That much less than without them, and no less than it needs."""
    abi.backward.workspace_bytes -= abi.size
    abi.call("backward")
    assert same_bits(abi.outputs[1], backward(CASE, abi.x, forward(CASE, abi.x)).dq)
    abi.outputs[1].view(torch.uint8).fill_(0xFF)
    abi.backward.workspace_bytes = 1000
    abi.refuses("backward", r"^args\.workspace_bytes: expected at least [0-9]+, got 1000$")


@pytest.mark.cuda_only
@pytest.mark.quick
def test_problems_that_have_no_size():
    problem = problem_of(CASE, DEVICE).problem
    problem.device_index = 99
    with pytest.raises(ValueError, match="device_index: expected 0"):
        _library.saved_codes_size(problem)
    problem = problem_of(CASE, DEVICE).problem
    problem.head_dim = 96
    with pytest.raises(RuntimeError, match="head_dim: expected 64, 128 or 256"):
        _library.saved_codes_size(problem)


# --- The operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.__name__)
def test_operators(case):
    case(DEVICE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_operators_bits(mode, head_dim):
    case = square(mode, head_dim, 500, (4, 2))
    x = gaussian(case).to(DEVICE)
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    found = []
    for save in (True, False):
        set_save_codes(save)
        assert save_codes() is save
        o = dm_attn_func(*leaves, causal=True, mode=mode)
        found.append((o.detach(), *torch.autograd.grad(o, leaves, x.d_o)))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.cuda_only
def test_a_cuda_graph_holds_its_codes():
    case = square("onepass", 128, 500, (4, 2))
    x = gaussian(case).to(DEVICE)
    leaves = [t.clone().requires_grad_() for t in x[:3]]

    def step():
        o = dm_attn_func(*leaves, causal=True, mode="onepass")
        return o.detach(), *torch.autograd.grad(o, leaves, x.d_o)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    draw = gaussian(case, 1).to(DEVICE)
    with torch.no_grad():
        for leaf, other in zip(leaves, draw[:3], strict=True):
            leaf.copy_(other)
    graph.replay()
    replayed = [t.clone() for t in results]
    assert all(same_bits(a, b) for a, b in zip(replayed, step(), strict=True))


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_memory_between_forward_and_backward(mode):
    """The codes are held, k and v that nobody else wants are not, and all of it goes with the graph."""
    case = square(mode, 128, 2048, (8, 2))
    x = gaussian(case).to(DEVICE)
    leaf = x.k.clone().requires_grad_()
    held = []

    def requested() -> int:  # what is allocated depends on which blocks were free
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    for save in (True, False):
        set_save_codes(save)
        (dm_attn_func(x.q, leaf * 2, leaf * 2, mode=mode).float().sum()).backward()  # sizes are asked for once
        torch.cuda.synchronize()
        before = requested()
        o = dm_attn_func(x.q, leaf * 2, leaf * 2, mode=mode)
        held.append(requested() - before)
        del o
        assert requested() == before
    size = _library.saved_codes_size(problem_of(case, DEVICE).problem)
    assert held[0] - held[1] == size - 2 * x.k.numel() * x.k.element_size()
