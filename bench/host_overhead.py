"""What a call costs the host: microseconds from the call to its return, while the GPU works behind.

    export DELTA_MATCHING_LIBRARY=build/cuda/src/libdelta_matching.so
    python bench/host_overhead.py [--calls 1000] [--json FILE]

The shape is small, so that the GPU keeps up and no call waits for room in its queue; the device is waited for between
rounds, never in a timed call. Median over all calls, and the tenth percentile, which a busy machine disturbs less.
Rows: the forward without and with a graph, the backward, packed sequences, and PyTorch's own attention for scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from delta_matching import dm_attn_func, dm_attn_varlen_func, version

MODES = ("matched", "onepass", "consistent", "stale")
_ROUND = 50  # calls between two waits: far fewer than a stream's queue holds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(
    device: torch.device, calls: int, prepare: Callable[[], object], call: Callable[[object], object]
) -> list[int]:
    """Nanoseconds of each ``call(prepare())``; prepare is not timed."""
    times = []
    for index in range(calls + _ROUND):
        if index % _ROUND == 0:
            _wait(device)
        given = prepare()
        start = time.perf_counter_ns()
        result = call(given)
        times.append(time.perf_counter_ns() - start)
        del given, result
    _wait(device)
    return times[_ROUND:]  # the first round loads the library and warms up the allocator


def _rows(arguments: argparse.Namespace, device: torch.device) -> dict[str, list[int]]:
    def draw(heads: int) -> Tensor:
        size = (arguments.batch, arguments.length, heads, arguments.head_dim)
        return torch.randn(size, device=device).to(torch.bfloat16)

    q, k, v = draw(arguments.q_heads), draw(arguments.kv_heads), draw(arguments.kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    d_o = torch.randn_like(q)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ends = torch.arange(0, arguments.batch + 1, device=device) * arguments.length
    offsets = ends.to(torch.int32)
    longest, mode = arguments.length, arguments.mode

    def measure(prepare: Callable[[], object], call: Callable[[object], object]) -> list[int]:
        return _time(device, arguments.calls, prepare, call)

    def nothing() -> None:
        return None

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    return {
        "forward, no graph": measure(nothing, lambda _: dm_attn_func(q, k, v, causal=True, mode=mode)),
        "forward": measure(nothing, lambda _: dm_attn_func(*leaves, causal=True, mode=mode)),
        "backward": measure(
            lambda: dm_attn_func(*leaves, causal=True, mode=mode), lambda o: torch.autograd.grad(o, leaves, d_o)
        ),
        "forward, packed": measure(
            nothing,
            lambda _: dm_attn_varlen_func(*packed, offsets, offsets, longest, longest, causal=True, mode=mode),
        ),
        "PyTorch's attention, BF16, no graph": measure(
            nothing,
            lambda _: torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Host time per eager call in microseconds.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="cpu only tries this script: there the twin computes meanwhile"
    )
    parser.add_argument("--mode", default="matched", choices=MODES)
    parser.add_argument("--calls", type=int, default=1000, help="timed calls of each row")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--q-heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64, choices=(64, 128, 256))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    arguments = parser.parse_args()
    if arguments.calls < 1:
        parser.error(f"--calls: expected at least 1, got {arguments.calls}")
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (the twin)"
    print(f"delta_matching {version()}, PyTorch {torch.__version__}, {where}, {arguments.calls} calls")
    document = {}
    for name, times in _rows(arguments, device).items():
        tenth, median = sorted(times)[len(times) // 10] / 1e3, statistics.median(times) / 1e3
        document[name] = {"median_us": median, "tenth_percentile_us": tenth}
        print(f"{name:36s} median {median:8.1f} us   tenth percentile {tenth:8.1f} us")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
