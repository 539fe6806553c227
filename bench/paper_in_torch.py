"""Paper numerics of one head, forward and backward: the twin against the same work in PyTorch float32 operations.

    PYTHONPATH=python python bench/paper_in_torch.py --tokens 2048 --head-dim 128 --threads 2

Both run in this process on the same threads, rounds interleaved; prints medians in milliseconds and their ratio, and
the largest difference between the two results (they compute the same recipe, docs/method.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch

from delta_matching import dm_attn_func

E4M3_MAX = 448.0


def cast(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


def quantise(x: torch.Tensor, block: int) -> torch.Tensor:
    """Dequantised codes of x [rows, channels], one scale for each `block` rows."""
    blocks = x.view(x.shape[0] // block, -1)
    amax = blocks.abs().amax(1, keepdim=True).clamp_min(2.0**-110)
    return (cast(blocks * (E4M3_MAX / amax)) * (amax / E4M3_MAX)).view_as(x)


def quantise_groups(p: torch.Tensor) -> torch.Tensor:
    groups = p.view(p.shape[0], -1, 64)
    amax = groups.amax(2, keepdim=True).clamp_min(2.0**-110)
    return (cast(groups * (E4M3_MAX / amax)) * (amax / E4M3_MAX)).view_as(p)


def quantise_tiles(ds: torch.Tensor) -> torch.Tensor:
    n, m = ds.shape
    tiles = ds.view(n // 64, 64, m // 64, 64)
    amax = tiles.abs().amax((1, 3), keepdim=True).clamp_min(2.0**-110)
    return (cast(tiles * (E4M3_MAX / amax)) * (amax / E4M3_MAX)).view_as(ds)


def paper_in_torch(q, k, v, d_o, mode: str):
    scale = q.shape[1] ** -0.5
    q8, d8 = quantise(q, 128), quantise(d_o, 128)
    k8, v8 = quantise(k - k.mean(0), 64), quantise(v, 64)
    mask = torch.ones(len(q), len(k), dtype=torch.bool).triu_(1)
    s = ((q8 @ k8.T) * scale).masked_fill_(mask, float("-inf"))
    p = torch.exp(s - s.amax(1, keepdim=True))
    total = p.sum(1, keepdim=True)
    rounded = quantise_groups(p)
    o_sum = rounded @ v8
    rounded_total = rounded.sum(1, keepdim=True)
    full = o_sum / (rounded_total if mode == "onepass" else total)
    o = full.bfloat16().float()
    dp = d8 @ v8.T
    probability = rounded / rounded_total if mode == "onepass" else p / total
    if mode == "stale":
        delta = (d_o * o).sum(1, keepdim=True)
    elif mode == "consistent":
        delta = (d8 * o).sum(1, keepdim=True)
    elif mode == "onepass":
        delta = (d8 * full).sum(1, keepdim=True)
    else:
        delta = (probability * dp).sum(1, keepdim=True)
    ds = quantise_tiles(probability * (dp - delta))
    dv = (rounded / total).T @ d8
    return o, ds @ k8 * scale, ds.T @ q8 * scale, dv


def twin(q, k, v, d_o, mode: str):
    leaves = [x[None, :, None].detach().requires_grad_() for x in (q, k, v)]
    o = dm_attn_func(*leaves, causal=True, mode=mode, numerics="paper")
    o.backward(d_o[None, :, None])
    return [o[0, :, 0], *(x.grad[0, :, 0] for x in leaves)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    generator = torch.Generator().manual_seed(0)
    bf16 = [torch.randn(options.tokens, options.head_dim, generator=generator).bfloat16() for _ in range(4)]
    wide = [x.float() for x in bf16]
    rows = []
    for mode in ("stale", "consistent", "matched", "onepass"):
        results, times = {}, {"torch_ms": [], "twin_ms": []}
        for _ in range(options.rounds + 1):
            for name, run, inputs in (("torch_ms", paper_in_torch, wide), ("twin_ms", twin, bf16)):
                start = time.perf_counter()
                results[name] = run(*inputs, mode)
                times[name].append(1000 * (time.perf_counter() - start))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first is a warm-up
        difference = max(
            float((a.float() - b.float()).norm() / a.float().norm())
            for a, b in zip(results["torch_ms"], results["twin_ms"])
        )
        rows.append({"mode": mode, **medians, "ratio": medians["torch_ms"] / medians["twin_ms"], "difference": difference})
        print(
            f"{mode:<11} torch {medians['torch_ms']:8.1f} ms   twin {medians['twin_ms']:8.1f} ms   "
            f"ratio {rows[-1]['ratio']:.2f}   largest difference {difference:.1e}"
        )
    print(json.dumps({"tokens": options.tokens, "head_dim": options.head_dim, "threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
