"""What the operators do with saved codes, on a device that keeps them: a GPU, or the twin with a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from delta_matching import _record, dm_attn_func, dm_attn_varlen_func, probe, save_codes, set_save_codes

MODES = ("matched", "onepass", "consistent", "stale")
Device = torch.device


def _leaves(device: Device, q_len: int = 150, k_len: int = 170, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, q_len, heads[0], 64), (2, k_len, heads[1], 64), (2, k_len, heads[1], 64)]
    return [torch.randn(s, generator=draw).to(torch.bfloat16).to(device).requires_grad_() for s in shapes]


def _packed(device: Device) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows past the last offset, a sequence without rows, one without keys."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(220, 4, 64), (300, 2, 64), (300, 2, 64)]
    q, k, v = (torch.randn(s, generator=draw).to(torch.bfloat16).to(device).requires_grad_() for s in shapes)
    ends = [[0, 0, 5, 77, 207], [0, 0, 0, 200, 290]]
    return [q, k, v], *(torch.tensor(x, dtype=torch.int32, device=device) for x in ends)


def _attention(q: Tensor, k: Tensor, v: Tensor, mode: str = "matched") -> Tensor:
    return dm_attn_func(q, k, v, causal=True, mode=mode)


def _gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def _saved_of(node) -> list[Tensor]:
    return [x for x in node.saved_tensors if x is not None]


def _holds(out: Tensor, tensor: Tensor) -> bool:
    """Whether the graph of ``out`` keeps the memory of ``tensor``."""
    return any(x.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for x in _saved_of(out.grad_fn))


def _keeps_codes(out: Tensor) -> bool:
    return any(x.dtype == torch.uint8 for x in _saved_of(out.grad_fn))


@contextlib.contextmanager
def _off() -> Iterator[None]:
    set_save_codes(False)
    try:
        yield
    finally:
        set_save_codes(None)


def _without(function: Callable[[], object]) -> object:
    """``function`` while no codes are left."""
    with _off():
        return function()


def same(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.shape == y.shape and x.stride() == y.stride() and torch.equal(x.isnan(), y.isnan())
            assert torch.equal(x.nan_to_num(), y.nan_to_num())


def plain_call_keeps_codes_in_place_of_k_and_v(device: Device) -> None:
    q, k, v = _leaves(device)
    out = _attention(q, k, v)
    assert _keeps_codes(out) and _holds(out, q) and not _holds(out, k) and not _holds(out, v)
    old = _without(lambda: _attention(q, k, v))
    assert not _keeps_codes(old) and _holds(old, k) and _holds(old, v)


def same_bits_in_every_mode(device: Device) -> None:
    for mode in MODES:
        for heads in ((4, 2), (2, 2)):
            leaves = _leaves(device, heads=heads)
            out = _attention(*leaves, mode)
            old = _without(lambda leaves=leaves, mode=mode: _attention(*leaves, mode))
            assert _keeps_codes(out) and not _keeps_codes(old)
            same((out, *_gradients(out, leaves)), (old, *_gradients(old, leaves)))


def same_bits_of_packed_sequences(device: Device) -> None:
    leaves, cu_q, cu_k = _packed(device)
    for centre in ("none", "k", "qk"):

        def attention(centre=centre) -> Tensor:
            return dm_attn_varlen_func(*leaves, cu_q, cu_k, 130, 200, causal=True, mode="onepass", centre=centre)

        out, old = attention(), _without(attention)
        assert _keeps_codes(out) and not _keeps_codes(old)
        same((out, *_gradients(out, leaves)), (old, *_gradients(old, leaves)))


def some_gradients(device: Device) -> None:
    for needed in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)):
        leaves = [x.detach().requires_grad_(bool(need)) for x, need in zip(_leaves(device), needed, strict=True)]
        wanted = [x for x in leaves if x.requires_grad]
        out, old = _attention(*leaves), _without(lambda leaves=leaves: _attention(*leaves))
        assert _keeps_codes(out)
        same(_gradients(out, wanted), _gradients(old, wanted))


def nothing_is_kept_without_a_graph(device: Device) -> None:
    leaves = _leaves(device)
    with torch.no_grad():
        assert _attention(*leaves).grad_fn is None
    with torch.inference_mode():
        _attention(*leaves)


def other_strides(device: Device) -> None:
    """Tensors that are not contiguous, some of which have to be copied."""
    q, k, v = _leaves(device)
    wide = torch.cat([k, v], dim=-1).detach().requires_grad_()
    odd = v.detach().transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()

    def attention() -> Tensor:
        return _attention(q, wide[..., :64], odd)

    out, old = attention(), _without(attention)
    same(_gradients(out, [q, wide, odd]), _gradients(old, [q, wide, odd]))


def writing_to_k_and_v_in_between(device: Device) -> None:
    """Without codes autograd refuses; with them the backward is right."""
    q, k, v = _leaves(device)
    out = _attention(q, k, v)
    expected = _gradients(_attention(q, k, v), [q, k, v])
    with torch.no_grad():
        k.zero_()
        v.fill_(torch.nan)
    same(_gradients(out, [q, k, v]), expected)
    out = _without(lambda: _attention(q, k, v))
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(out, [q, k, v])


def writing_to_q_in_between_is_refused(device: Device) -> None:
    q, k, v = _leaves(device)
    out = _attention(q, k, v)
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _gradients(out, [q, k, v])


def a_graph_that_is_kept(device: Device) -> None:
    leaves = _leaves(device)
    out = _attention(*leaves, "onepass")
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    same(torch.autograd.grad(out, leaves, torch.ones_like(out)), first)


def hooks_of_saved_tensors(device: Device) -> None:
    """Tensors that go elsewhere and come back, at whatever address, are k and v."""
    leaves = _leaves(device)
    expected = _gradients(_attention(*leaves), leaves)
    packed: list[torch.dtype] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.dtype)
        return x.cpu().clone()

    def unpack(x: Tensor) -> Tensor:
        moved = torch.empty(x.numel() * x.element_size() + 64, dtype=torch.uint8, device=device)[16:]
        moved = moved[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
        return moved.copy_(x)

    with saved_tensors_hooks(pack, unpack):
        out = _attention(*leaves)
    assert packed and torch.uint8 not in packed
    same(_gradients(out, leaves), expected)
    with save_on_cpu():
        out = _attention(*leaves)
    same(_gradients(out, leaves), expected)


def activation_checkpointing(device: Device) -> None:
    leaves = _leaves(device)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q * 2, k.sin(), v, "onepass").float().sin()

    expected = _gradients(layer(*leaves), leaves)
    for reentrant in (False, True):
        for x in leaves:
            x.grad = None
        checkpoint(layer, *leaves, use_reentrant=reentrant).sum().backward()
        same(tuple(x.grad for x in leaves), expected)


def checkpoints_whose_world_changes(device: Device) -> None:
    """What a forward saves under a checkpoint's hooks does not depend on what is on when it is run again."""
    leaves = _leaves(device)
    expected = _gradients(_attention(*leaves), leaves)

    def run(forward, backward) -> None:
        with forward:
            out = checkpoint(_attention, *leaves, use_reentrant=False)
        with backward:
            same(_gradients(out, leaves), expected)

    off = contextlib.nullcontext()
    for mode in (_Watch, lambda: FlopCounterMode(display=False)):
        run(mode(), off)
        run(off, mode())
    run(off, _off())
    run(_off(), off)
    model = torch.nn.Linear(1, 1)
    run(off, probe(model, every=1))
    run(probe(model, every=1), off)


def the_switch(device: Device) -> None:
    """A call keeps what was set when its forward ran."""
    leaves = _leaves(device)
    expected = _gradients(_attention(*leaves), leaves)
    out = _attention(*leaves)
    old = _without(lambda: _attention(*leaves))
    same(_without(lambda: _gradients(out, leaves)), expected)
    same(_gradients(old, leaves), expected)
    assert save_codes()


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "delta_matching":
            self.seen.append(function._opname)
        return function(*args, **(kwargs or {}))


def watchers(device: Device) -> None:
    """Modes see operators, and profilers their names; what was left before a mode came serves as well."""
    leaves = _leaves(device)
    expected = _gradients(_attention(*leaves), leaves)
    with _Watch() as watch:
        out = _attention(*leaves)
        same(_gradients(out, leaves), expected)
    assert watch.seen == ["forward", "backward"]
    out = _attention(*leaves)
    with _Watch() as watch:
        same(_gradients(out, leaves), expected)
    assert watch.seen == ["backward_from_codes"]
    with torch.autograd.profiler.profile() as profile:
        out = _attention(*leaves)
        assert _keeps_codes(out)  # what runs does not depend on who measures it
        same(_gradients(out, leaves), expected)
    names = {event.name for event in profile.function_events}
    assert {"delta_matching::forward", "delta_matching::backward_from_codes"} <= names


def recorders(device: Device) -> None:
    """A recorder is shown k and v of what runs while it looks."""

    class Recorder:
        def __init__(self) -> None:
            self.calls: list[_record.Call] = []

        def forward(self, reference: Tensor) -> None:
            pass

        def backward(self, call: _record.Call) -> None:
            self.calls.append(call)

    leaves = _leaves(device)
    before = _attention(*leaves)
    expected = _gradients(_attention(*leaves), leaves)
    recorder = Recorder()
    _record.active = recorder
    try:
        out = _attention(*leaves)
        assert not _keeps_codes(out)
        same(_gradients(out, leaves), expected)
        same(_gradients(before, leaves), expected)
    finally:
        _record.active = None
    (call,) = recorder.calls
    assert torch.equal(call.k, leaves[1]) and torch.equal(call.v, leaves[2])


def second_derivatives_are_refused(device: Device) -> None:
    q, k, v = _leaves(device)
    for leaf in (q, k):
        (first,) = torch.autograd.grad(_attention(q, k, v).float().sum(), leaf, create_graph=True)
        assert torch.equal(first, torch.autograd.grad(_attention(q, k, v).float().sum(), leaf)[0])
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            first.sum().backward()


def batches_of_gradients(device: Device) -> None:
    leaves = _leaves(device)
    out = _attention(*leaves)
    seeds = torch.stack([torch.ones_like(out), torch.full_like(out, 0.5)])
    batched = torch.autograd.grad(out, leaves, seeds, is_grads_batched=True, retain_graph=True)
    for index in range(2):
        alone = torch.autograd.grad(out, leaves, seeds[index], retain_graph=True)
        same(tuple(x[index] for x in batched), alone)


def compiled_calls_keep_k_and_v(device: Device) -> None:
    leaves = _leaves(device)
    torch._dynamo.reset()
    compiled = torch.compile(_attention, fullgraph=True, backend="aot_eager")
    expected = _gradients(_attention(*leaves), leaves)
    same(_gradients(compiled(*leaves), leaves), expected)
    torch._dynamo.reset()


def lengths_of_zero(device: Device) -> None:
    for q_len, k_len in ((0, 5), (5, 0), (0, 0), (200, 0)):
        leaves = _leaves(device, q_len, k_len)
        out, old = _attention(*leaves), _without(lambda leaves=leaves: _attention(*leaves))
        same((out, *_gradients(out, leaves)), (old, *_gradients(old, leaves)))


def lse(device: Device) -> None:
    leaves = _leaves(device)
    out, lse = dm_attn_func(*leaves, causal=True, return_lse=True)
    assert _keeps_codes(out)
    same(_gradients(out, leaves), _gradients(_attention(*leaves), leaves))
    assert lse.isfinite().any()


ALL: tuple[Callable[[Device], None], ...] = (
    plain_call_keeps_codes_in_place_of_k_and_v,
    same_bits_in_every_mode,
    same_bits_of_packed_sequences,
    some_gradients,
    nothing_is_kept_without_a_graph,
    other_strides,
    writing_to_k_and_v_in_between,
    writing_to_q_in_between_is_refused,
    a_graph_that_is_kept,
    hooks_of_saved_tensors,
    activation_checkpointing,
    checkpoints_whose_world_changes,
    the_switch,
    watchers,
    recorders,
    second_derivatives_are_refused,
    batches_of_gradients,
    compiled_calls_keep_k_and_v,
    lengths_of_zero,
    lse,
)
