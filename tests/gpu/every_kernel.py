"""Small calls that run every kernel, to be run under compute-sanitizer:

compute-sanitizer --tool memcheck --kernel-name kns=dmattn python tests/gpu/every_kernel.py
compute-sanitizer --tool racecheck --kernel-name kns=dmattn python tests/gpu/every_kernel.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402

from delta_matching import dm_attn_func, dm_attn_varlen_func, set_save_codes  # noqa: E402


def tensors(*shape: int, heads: tuple[int, int], dim: int) -> list[torch.Tensor]:
    q = torch.randn(*shape, heads[0], dim).bfloat16()
    k, v = (torch.randn(*shape, heads[1], dim).bfloat16() for _ in range(2))
    return [x.cuda().requires_grad_() for x in (q, k, v)]


def main() -> None:
    torch.manual_seed(0)
    for dim in (64, 128, 256):
        for mode in ("matched", "onepass", "stale"):
            q, k, v = tensors(1, 600, heads=(2, 1), dim=dim)
            for save in (True, False):  # the packs of K, V and Q run in the forward alone, or in the backward as well
                set_save_codes(save)
                dm_attn_func(q, k, v, causal=True, mode=mode).float().square().sum().backward()
        set_save_codes(None)
        q, k, v = tensors(329, heads=(2, 2), dim=dim)
        ends = torch.tensor([0, 0, 1, 201, 329], dtype=torch.int32).cuda()
        o = dm_attn_varlen_func(q, k, v, ends, ends, 200, 200, causal=False, mode="onepass")
        o.float().square().sum().backward()
        # Rows that start at odd addresses take the other copies.
        wide = torch.randn(1, 130, 2, dim + 1).bfloat16().cuda()
        q = wide[..., 1:].requires_grad_()
        dm_attn_func(q, q, q, causal=True, mode="matched").float().sum().backward()
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
