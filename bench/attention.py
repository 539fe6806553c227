"""Attention on a GPU, forward and backward: the four modes beside what PyTorch and others offer.

    export DELTA_MATCHING_LIBRARY=build/cuda/src/libdelta_matching.so
    python bench/attention.py --out results [--quick] [--full]

Every library runs in this one process, on random inputs, rounds interleaved: a round times each of them once, and the
median over rounds counts. Calls are captured into CUDA graphs that rotate over several sets of inputs, so neither the
host nor the cache flatters anyone; our times include packing and quantising. Writes ``bench.json`` (schema
dmattn.bench/1), ``bench.md`` (tables; a second one has our kernels one by one) and ``bench.svg``.

FlashAttention-3 (``flash_attn_interface``) and -4 (``flash_attn.cute``) and cuDNN's FP8 attention (``cudnn``,
cudnn_fp8.py) take part where they are installed.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from delta_matching import dm_attn_func, version

MODES = ("onepass", "matched", "consistent", "stale")


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    length: int
    causal: bool = True

    def document(self) -> dict[str, Any]:
        names = ("batch", "q_heads", "kv_heads", "head_dim")
        lengths = {"q_len": self.length, "k_len": self.length, "causal": self.causal}
        return {name: getattr(self, name) for name in names} | lengths

    def flops(self) -> float:
        """Of the two products of the forward; the backward has five."""
        pairs = self.length * self.length * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * self.q_heads * self.head_dim * pairs

    def __str__(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        return f"D{self.head_dim} B{self.batch} H{heads} N{self.length}" + ("" if self.causal else " full")


SHAPES = (
    Shape(2, 16, 16, 128, 8192),
    Shape(2, 8, 8, 256, 8192),
    Shape(1, 16, 16, 128, 16384),
    Shape(2, 32, 8, 128, 8192),
    Shape(2, 32, 32, 64, 8192),
    Shape(2, 16, 16, 128, 2048),
    Shape(1, 32, 8, 128, 32768),
)
QUICK = (SHAPES[0], SHAPES[5])
TINY = (Shape(1, 4, 2, 64, 128), Shape(1, 2, 2, 128, 192))  # for --device cpu, which only tries this script


# --- Contenders ------------------------------------------------------------------------------------------------------


class Inputs:
    """One set of inputs, BF16 [batch, length, heads, head_dim]."""

    def __init__(self, shape: Shape, device: str) -> None:
        def draw(heads: int) -> Tensor:
            size = (shape.batch, shape.length, heads, shape.head_dim)
            return torch.randn(size, device=device).to(torch.bfloat16)

        self.q, self.d_o = draw(shape.q_heads), draw(shape.q_heads)
        self.k, self.v = draw(shape.kv_heads), draw(shape.kv_heads)


class Contender(abc.ABC):
    """A library on one shape: what a set of inputs leaves for its backward is made anew by each forward."""

    name: str
    version: str
    mode: str | None = None

    def setup(self, shape: Shape, x: Inputs) -> Any:
        """Once for each set of inputs, not timed; its result is handed to the calls."""
        return x

    @abc.abstractmethod
    def forward(self, shape: Shape, x: Any) -> Any:
        """A timed call; its result is handed to :meth:`backward`."""

    @abc.abstractmethod
    def backward(self, shape: Shape, x: Any, left: Any) -> Any:
        """A timed call with what :meth:`forward` left."""

    @property
    def label(self) -> str:
        return self.name if self.mode is None else f"{self.name} {self.mode}"


class Autograd(Contender):
    """A function of (q, k, v) that autograd differentiates; leaves are made by :meth:`setup`."""

    @abc.abstractmethod
    def attention(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """O of the inputs in this library's layout."""

    def layout(self, x: Tensor) -> Tensor:
        return x

    def setup(self, shape: Shape, x: Inputs) -> Any:
        leaves = [self.layout(t).detach().requires_grad_() for t in (x.q, x.k, x.v)]
        return leaves, self.layout(x.d_o)

    def forward(self, shape: Shape, x: Any) -> Any:
        return self.attention(shape, *x[0])

    def backward(self, shape: Shape, x: Any, left: Any) -> Any:
        return torch.autograd.grad(left, x[0], x[1], retain_graph=True)


class DeltaMatching(Autograd):
    """As users call it: codes go from the forward to the backward unless DELTA_MATCHING_SAVE_CODES=0."""

    name = "delta_matching"

    def __init__(self, mode: str) -> None:
        self.mode, self.version = mode, version()

    def attention(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dm_attn_func(q, k, v, causal=shape.causal, mode=self.mode)


class Sdpa(Autograd):
    """PyTorch's scaled_dot_product_attention on one of its backends."""

    def __init__(self, name: str, backend: Any, backend_version: str) -> None:
        self.name, self.backend, self.version = name, backend, backend_version
        self.native_gqa: dict[Shape, bool] = {}

    def layout(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def _call(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor, native: bool) -> Tensor:
        from torch.nn.attention import sdpa_kernel

        group = shape.q_heads // shape.kv_heads
        if group > 1 and not native:  # what a model has to do then
            k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        with sdpa_kernel(self.backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.causal, enable_gqa=group > 1 and native
            )

    def attention(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shape not in self.native_gqa:
            try:
                self._call(shape, q, k, v, True)
                self.native_gqa[shape] = True
            except RuntimeError:
                self.native_gqa[shape] = False
        return self._call(shape, q, k, v, self.native_gqa[shape])


class FlashAttention(Autograd):
    """FlashAttention-3 or -4, whose functions take [batch, length, heads, head_dim]."""

    def __init__(self, name: str, function: Callable[..., Any], package: str) -> None:
        from importlib import metadata

        self.name, self.function, self.version = name, function, "unknown"
        with contextlib.suppress(metadata.PackageNotFoundError):
            self.version = metadata.version(package)

    def attention(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self.function(q, k, v, causal=shape.causal)
        return out[0] if isinstance(out, tuple) else out


def _flash_attention_3() -> Contender:
    from flash_attn_interface import flash_attn_func

    return FlashAttention("flash_attn_3", flash_attn_func, "flash_attn_3")


def _flash_attention_4() -> Contender:
    from flash_attn.cute import flash_attn_func

    return FlashAttention("flash_attn_4", flash_attn_func, "flash-attn-4")


def _cudnn_fp8() -> Contender:
    from cudnn_fp8 import CudnnFp8

    return CudnnFp8()


def contenders(device: str) -> list[Contender]:
    found: list[Contender] = [DeltaMatching(mode) for mode in MODES]
    from torch.nn.attention import SDPBackend

    if device == "cpu":
        return [*found, Sdpa("sdpa_math", SDPBackend.MATH, torch.__version__)]
    cudnn = torch.backends.cudnn.version() or 0
    found.append(Sdpa("cudnn_bf16", SDPBackend.CUDNN_ATTENTION, f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"))
    found.append(Sdpa("flash_attn_2", SDPBackend.FLASH_ATTENTION, f"torch {torch.__version__}"))
    # What is installed but broken says so and is left out as well.
    for add in (_flash_attention_3, _flash_attention_4, _cudnn_fp8):
        try:
            found.append(add())
        except ImportError:
            pass
        except Exception as error:
            print(f"  {add.__name__[1:]}: {type(error).__name__}: {error}", flush=True)
    return found


SAMPLE_MS = 6.0  # of one sample at least, so that a launch's latency does not show

# --- Timing ----------------------------------------------------------------------------------------------------------


class Timed:
    """Forward and backward of a contender on one shape, ready to be timed again and again."""

    def __init__(self, contender: Contender, shape: Shape, sets: list[Inputs]) -> None:
        self.contender, self.shape = contender, shape
        self.states = [contender.setup(shape, x) for x in sets]
        self.left: list[Any] = [None] * len(sets)
        self.samples: dict[str, list[float]] = {"forward": [], "backward": []}
        self.graphs: dict[str, Any] = {}
        self.repeats: dict[str, int] = {}
        self.on_gpu = sets[0].q.is_cuda
        self.peak_bytes = self._peak()
        if self.on_gpu:
            self._capture()

    def _forward(self) -> None:
        for index, x in enumerate(self.states):
            self.left[index] = self.contender.forward(self.shape, x)

    def _backward(self) -> None:
        for x, left in zip(self.states, self.left, strict=True):
            self.contender.backward(self.shape, x, left)

    def _peak(self) -> int | None:
        """Most memory that one forward and backward hold beyond the inputs, outputs included; also the warm-up."""
        for _ in range(2):
            self._forward()
            self._backward()
        if not self.on_gpu:
            return None
        self.left = [None] * len(self.states)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        left = self.contender.forward(self.shape, self.states[0])
        gradients = self.contender.backward(self.shape, self.states[0], left)
        torch.cuda.synchronize()
        del left, gradients
        return torch.cuda.max_memory_allocated() - before

    def _capture(self) -> None:
        """Without a graph (a library that cannot be captured) calls are timed as they are."""
        try:
            for name, work in (("forward", self._forward), ("backward", self._backward)):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    work()
                self.graphs[name] = graph
        except RuntimeError as error:
            print(
                f"  {self.contender.label}: not captured into a CUDA graph ({str(error).splitlines()[0]})", flush=True
            )
            self.graphs = {}
            torch.cuda.synchronize()
            self._forward()

    def _run(self, name: str) -> None:
        if name in self.graphs:
            self.graphs[name].replay()
        elif name == "forward":
            self._forward()
        else:
            self._backward()

    def _elapsed(self, name: str, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self._run(name)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats

    def sample(self) -> None:
        """One round: milliseconds of a call, forward and backward."""
        for name, kept in self.samples.items():
            if self.on_gpu:
                if name not in self.repeats:  # once more to warm up, and to see how often it fits into a round
                    self.repeats[name] = max(1, round(SAMPLE_MS / self._elapsed(name, 1)))
                elapsed = self._elapsed(name, self.repeats[name])
            else:
                begun = time.perf_counter()
                self._run(name)
                elapsed = (time.perf_counter() - begun) * 1e3
            kept.append(elapsed / len(self.states))

    def document(self) -> dict[str, Any]:
        forward, backward = (statistics.median(self.samples[name]) for name in ("forward", "backward"))
        spread = {
            f"{name}_spread": (max(kept) - min(kept)) / statistics.median(kept) for name, kept in self.samples.items()
        }
        return {
            "library": self.contender.name,
            "version": self.contender.version,
            "mode": self.contender.mode,
            "shape": self.shape.document(),
            "forward_ms": forward,
            "backward_ms": backward,
            "peak_bytes": self.peak_bytes,
            "quantise_ms": getattr(self.contender, "quantise_ms", {}).get(self.shape),
            "captured": bool(self.graphs),
            **spread,
        }


class Clock:
    """The SM clock and power, read by NVML between rounds."""

    def __init__(self, on_gpu: bool) -> None:
        self.clocks: list[int] = []
        self.nvml = self.handle = None
        if on_gpu:
            with contextlib.suppress(Exception):  # a number for the report, worth no failure
                import pynvml

                pynvml.nvmlInit()
                own = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # NVML also counts GPUs that CUDA does not see
                self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(own)

    def read(self) -> None:
        if self.nvml is not None:
            with contextlib.suppress(Exception):
                self.clocks.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    def median(self) -> int | None:
        return int(statistics.median(self.clocks)) if self.clocks else None


def kernels_of(contender: Contender, shape: Shape, x: Inputs, repeats: int = 5) -> list[dict[str, Any]]:
    """Mean time of each kernel of a forward and a backward, in the order of the first launch."""
    from torch.profiler import ProfilerActivity, profile

    state = contender.setup(shape, x)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            left = contender.forward(shape, state)
            contender.backward(shape, state, left)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        if str(event.device_type).endswith("CUDA"):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return [
        {"name": name, "calls": len(times) / repeats, "mean_us": statistics.mean(times), "us": sum(times) / repeats}
        for name, times in found.items()
    ]


def time_all(shape: Shape, everyone: list[Contender], sets: list[Inputs], rounds: int, clock: Clock):
    """Rounds over all contenders; what they hold goes when this returns."""
    ready: list[Timed] = []
    for contender in everyone:
        try:
            ready.append(Timed(contender, shape, sets))
        except Exception as error:  # one library's limits must not cost the others' numbers
            if contender.name == "delta_matching":
                raise
            why = (str(error) or "no message").splitlines()[0]
            print(f"  {contender.label}: left out ({type(error).__name__}: {why})", flush=True)
    for index in range(rounds):
        for timed in ready if index % 2 == 0 else reversed(ready):
            timed.sample()
        clock.read()
    return [timed.document() for timed in ready]


def bench(shape: Shape, everyone: list[Contender], rounds: int, device: str, clock: Clock, profiled: bool):
    """(runs, kernels) of one shape."""
    sets = [Inputs(shape, device) for _ in range(4 if shape.length < 4096 else 2)]
    runs = time_all(shape, everyone, sets, rounds, clock)
    kernels: list[dict[str, Any]] = []
    for contender in everyone if profiled else ():
        if contender.name != "delta_matching":
            continue
        try:
            rows = kernels_of(contender, shape, sets[0])
        except Exception as error:  # a profiler that does not work here must not cost the numbers either
            print(f"  no profile: {error}", flush=True)
            break
        kernels.append({"shape": shape.document(), "mode": contender.mode, "kernels": rows})
    return runs, kernels


# --- Reports ---------------------------------------------------------------------------------------------------------


def _name(run: dict[str, Any]) -> str:
    return run["library"] if run["mode"] is None else f"{run['library']} {run['mode']}"


def _shape_of(document: dict[str, Any]) -> Shape:
    d = document
    return Shape(d["batch"], d["q_heads"], d["kv_heads"], d["head_dim"], d["q_len"], d["causal"])


def _total(run: dict[str, Any]) -> float:
    return run["forward_ms"] + run["backward_ms"]


def _by_shape(runs: list[dict[str, Any]]) -> dict[Shape, list[dict[str, Any]]]:
    shapes: dict[Shape, list[dict[str, Any]]] = {}
    for run in runs:
        shapes.setdefault(_shape_of(run["shape"]), []).append(run)
    return shapes


def _base(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((run for run in runs if run["library"] in ("cudnn_bf16", "sdpa_math")), None)


def markdown(document: dict[str, Any]) -> str:
    lines = [
        f"{document['gpu']}, SM clock {document['sm_clock_mhz']} MHz (median between rounds), "
        f"torch {document['torch']}, median of {document['rounds']} interleaved rounds. `×` is the speed relative to "
        "cuDNN in BF16; TFLOP/s count the products of exact attention, 2 forward and 5 backward.",
        "",
    ]
    for shape, runs in _by_shape(document["runs"]).items():
        base = _base(runs)
        lines += [f"### {shape}{' causal' if shape.causal else ''}", ""]
        lines += ["| | forward ms | backward ms | both ms | TFLOP/s | × | peak MiB |", "|---|---|---|---|---|---|---|"]
        for run in runs:
            ratio = f"{_total(base) / _total(run):.2f}" if base else "–"
            peak = "–" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**20:.0f}"
            rate = 3.5 * shape.flops() / _total(run) / 1e9
            lines.append(
                f"| {_name(run)} | {run['forward_ms']:.3f} | {run['backward_ms']:.3f} | {_total(run):.3f} | {rate:.0f} "
                f"| {ratio} | {peak} |"
            )
        lines.append("")
    for entry in document["kernels"]:
        lines += [f"### Kernels of {entry['mode']}, {_shape_of(entry['shape'])}", ""]
        lines += ["| kernel | launches | mean µs | µs a call |", "|---|---|---|---|"]
        for row in entry["kernels"]:
            lines.append(f"| `{row['name'][:90]}` | {row['calls']:g} | {row['mean_us']:.1f} | {row['us']:.1f} |")
        lines += [f"| all | | | {sum(row['us'] for row in entry['kernels']):.1f} |", ""]
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """Bars of forward and backward by shape; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = _by_shape(document["runs"])
    names = list(dict.fromkeys(_name(run) for run in document["runs"]))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(3.2 * len(shapes), 4.2), squeeze=False)
    colours = dict(zip(names, pyplot.cm.tab10.colors * 3, strict=False))
    for axis, (shape, runs) in zip(axes[0], shapes.items(), strict=True):
        for index, run in enumerate(runs):
            colour = colours[_name(run)]
            axis.bar(index, run["forward_ms"], color=colour, label=_name(run))
            axis.bar(index, run["backward_ms"], bottom=run["forward_ms"], color=colour, alpha=0.55)
        axis.set_title(str(shape), fontsize=9)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms, forward and (paler) backward")
    handles, labels = {}, []
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in labels],
        labels,
        loc="lower center",
        ncols=min(5, 2 * len(shapes)),
        fontsize=8,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path)
    figure.savefig(path.with_suffix(".png"), dpi=130)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds: half a minute")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (15, with --quick 7)")
    parser.add_argument("--shapes", type=int, nargs="*", help="which of the shapes, from 0")
    parser.add_argument("--only", nargs="*", help="libraries, or modes of ours, by name")
    parser.add_argument("--no-profile", action="store_true", help="no table of kernels")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries this script")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    on_gpu = chosen.device == "cuda"
    shapes = TINY if not on_gpu else QUICK if chosen.quick else SHAPES
    if chosen.shapes:
        shapes = tuple(shapes[index] for index in chosen.shapes)
    if chosen.full:
        shapes = tuple(dataclasses.replace(shape, causal=False) for shape in shapes)
    rounds = chosen.rounds or (7 if chosen.quick else 15)
    everyone = contenders(chosen.device)
    if chosen.only:
        everyone = [c for c in everyone if c.name in chosen.only or c.mode in chosen.only]
    torch.manual_seed(0)
    clock = Clock(on_gpu)
    runs: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    chosen.out.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        begun = time.perf_counter()
        more, profiles = bench(shape, everyone, rounds, chosen.device, clock, on_gpu and not chosen.no_profile)
        runs += more
        kernels += profiles
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        print(f"{shape}: {time.perf_counter() - begun:.0f} s", flush=True)
        document = {
            "schema": "dmattn.bench/1",
            "gpu": torch.cuda.get_device_name(0) if on_gpu else "none",
            "sm_clock_mhz": clock.median(),
            "torch": torch.__version__,
            "rounds": rounds,
            "runs": runs,
            "kernels": kernels,
        }
        # After every shape: what was measured stays if the time runs out.
        (chosen.out / "bench.json").write_text(json.dumps(document, indent=1))
        (chosen.out / "bench.md").write_text(markdown(document))
    print(markdown({**document, "kernels": []}), flush=True)
    with contextlib.suppress(ImportError):
        plot(document, chosen.out / "bench.svg")


if __name__ == "__main__":
    main()
