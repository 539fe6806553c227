"""Records the attention calls of one step: the layer that each belongs to, and a sample of its q, k, v and d_o."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .. import _device
from .._record import Call
from . import sdpa
from .window import NotMeasured, Sample, longest_sequence, sample

#: Calls outside every module that are told apart within a step; what comes later shares the last name.
_MOST_UNNAMED = 64


class Recorded(NamedTuple):
    """A sampled call and how it was computed."""

    sample: Sample
    source: str  # "dm_attn_func", "dm_attn_varlen_func" or "sdpa"
    softmax_scale: float | None
    mode: str | None  # None: of an attention that is not ours
    numerics: str | None
    centre: str | None


class _Frame:
    """A module that is running, and the attention calls it has made so far."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0


class Capture:
    """A :class:`delta_matching._record.Recorder` for one step. The first backward of each layer is kept.

    Nothing here waits for a GPU but a look at the cu_seqlens of packed sequences.
    """

    def __init__(self, heads: int | Sequence[int], max_tokens: int) -> None:
        self.recorded: dict[str, Recorded] = {}
        self.reasons: dict[str, str] = {}  # by layer: why a call was not measured
        self.compiled: dict[str, str] = {}  # by module: what cannot be seen of it
        self.calls: Counter[str] = Counter()  # backwards by layer
        self._waiting: dict[str, int] = {}  # SDPA calls whose gradient has not come, by layer
        # Layer of a forward, by the memory of what it saved. Weak references hold no memory of a GPU, but keep a later
        # tensor's storage from being taken for this one.
        self._names: dict[StorageWeakRef, str] = {}
        self._heads, self._max_tokens = heads, max_tokens
        self._running = threading.local()  # autograd may recompute on threads of its own
        self._unnamed = 0
        self._open = True

    # --- which layer ---

    def enter(self, name: str) -> int:
        """A module starts; returns how many were running on this thread."""
        stack = self._stack()
        stack.append(_Frame(name))
        return len(stack) - 1

    def leave(self, name: str) -> int | None:
        """The innermost module ends; returns how many are left, None for one that never started: a pre-hook before
        ours raised."""
        stack = self._stack()
        if not stack or stack[-1].name != name:
            return None
        stack.pop()
        return len(stack)

    @property
    def running(self) -> bool:
        """Whether a module is running on this thread."""
        return bool(self._stack())

    def _stack(self) -> list[_Frame]:
        stack: list[_Frame] | None = getattr(self._running, "stack", None)
        if stack is None:
            stack = self._running.stack = []
        return stack

    def _call_name(self) -> str:
        """The innermost running module's name, with a number from its second call on."""
        stack = self._stack()
        if not stack:
            self._unnamed = min(self._unnamed + 1, _MOST_UNNAMED)
            return f"call {self._unnamed - 1}"
        frame = stack[-1]
        frame.calls += 1
        return frame.name if frame.calls == 1 else f"{frame.name}#{frame.calls - 1}"

    # --- our operators ---

    def forward(self, reference: Tensor) -> None:
        self._names[StorageWeakRef(reference.untyped_storage())] = self._call_name()

    def backward(self, call: Call) -> None:
        name = self._names.get(StorageWeakRef(call.reference.untyped_storage())) or self._call_name()
        self.calls[name] += 1
        if name in self.recorded:
            return
        try:
            taken = self._sequence(call)
        except NotMeasured as reason:
            self.reasons[name] = str(reason)
            return
        source = "dm_attn_func" if call.cu_seqlens_q is None else "dm_attn_varlen_func"
        self.recorded[name] = Recorded(taken, source, call.softmax_scale, call.mode, call.numerics, call.centre)

    def _sequence(self, call: Call) -> Sample:
        operands = call.q, call.k, call.v, call.d_o
        if _device.capturing(call.q.device):
            raise NotMeasured("a CUDA graph is being captured, and replays run no Python")
        if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
            if call.q.shape[0] < 1:
                raise NotMeasured("no tokens: a batch of 0 sequences")
            q, k, v, d_o = (x[0] for x in operands)
        else:
            rows, keys = longest_sequence(call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist())
            q, k, v, d_o = call.q[rows], call.k[keys], call.v[keys], call.d_o[rows]
        return sample(q, k, v, d_o, call.causal, self._heads, self._max_tokens)

    # --- torch.nn.functional.scaled_dot_product_attention ---

    def sdpa(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call has returned ``out``. One that nothing will differentiate is not part of training."""
        name = self._call_name()
        if not isinstance(out, Tensor) or not out.requires_grad:
            return
        try:
            call = sdpa.understood(args, kwargs)
            taken = sample(*sdpa.first_sequence(call), None, call.is_causal, self._heads, self._max_tokens)
        except NotMeasured as reason:
            self.reasons[name] = str(reason)
            return
        self._waiting[name] = self._waiting.get(name, 0) + 1
        recorded = Recorded(taken, "sdpa", call.scale, None, None, None)
        out.register_hook(self._on_gradient(name, recorded))

    def hidden(self, out: tuple[Any, ...]) -> None:
        """nn.MultiheadAttention has run. Torch takes modes off while a function of its own that looks at them runs."""
        name = self._call_name()
        if out[0].requires_grad:
            self.reasons[name] = "torch.nn.MultiheadAttention: the attention inside it is not seen"

    def _on_gradient(self, name: str, recorded: Recorded) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not self._open:  # a graph that outlived its step
                return
            self._waiting.pop(name, None)
            self.calls[name] += 1
            if name not in self.recorded:
                d_o = sdpa.gradient(gradient, recorded.sample)
                self.recorded[name] = recorded._replace(sample=recorded.sample._replace(d_o=d_o))

        return hook

    def close(self) -> None:
        """End of the step: later gradients are ignored, and calls that got none are named."""
        self._open = False
        for name in self._waiting:
            if name not in self.recorded:  # what checkpointing computes again gets no gradient of its own
                self.reasons[name] = "no gradient reached its output in this step"
        self._names.clear()


class _SdpaMode(TorchFunctionMode):
    """Shows the capture what scaled_dot_product_attention was called with; changes nothing."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._capture.sdpa(out, args, kwargs)
        elif func is torch.nn.functional.multi_head_attention_forward:
            self._capture.hidden(out)
        return out


class _Modules(NamedTuple):
    hooked: list[tuple[str, nn.Module]]  # those whose hooks run as Python, by name
    compiled: list[str]  # those whose inside torch.compile has taken over


def _modules(model: nn.Module) -> _Modules:
    """Hooks inside a compiled module are not run, or make it compile again; those of torch.compile's wrapper run."""
    found = _Modules([], [])
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in inside):
            continue
        name = path or type(module).__name__
        wrapper = type(module).__name__ == "OptimizedModule"
        compiled = wrapper or getattr(module, "_compiled_call_impl", None) is not None
        if compiled:
            inside.append(path)
            found.compiled.append(name)
        if wrapper or not compiled:
            found.hooked.append((name, module))
    return found


class Hooks:
    """Forward hooks on every module of a model, for one step; :meth:`remove` takes all of them away again.

    The mode that sees SDPA is on exactly while a module of the model runs, on the thread that runs it: it is entered
    and left with the outermost module, so that it nests with whatever modes the caller uses. A compiled module would
    compile again under it, so a model that has one goes without.
    """

    def __init__(self, model: nn.Module, capture: Capture, see_sdpa: bool) -> None:
        self._capture = capture
        self._modes = threading.local()
        self._handles: list[RemovableHandle] = []
        modules = _modules(model)
        self._see_sdpa = see_sdpa and not modules.compiled
        if see_sdpa:
            for name in modules.compiled:
                capture.compiled[name] = (
                    "compiled by torch.compile: calls of scaled_dot_product_attention are not seen in this model, and "
                    "calls of dm_attn_func in this module are named after it, by number"
                )
        for name, module in modules.hooked:
            self._handles.append(module.register_forward_pre_hook(self._starts(name)))
            # Always: a recomputation under checkpointing ends by an exception once it has what it needs.
            self._handles.append(module.register_forward_hook(self._ends(name), always_call=True))

    def _starts(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._capture.enter(name) == 0 and self._see_sdpa:
                self._modes.active = _SdpaMode(self._capture)
                self._modes.active.__enter__()

        return hook

    def _ends(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._capture.leave(name) == 0 and self._see_sdpa:
                self._modes.active.__exit__(None, None, None)
                self._modes.active = None

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
