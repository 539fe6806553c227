"""Logs of a live probe, made up: every number follows from the step, the layer and the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def mode_entry(step: int, layer: int, head: int, channels: int = 4) -> dict[str, Any]:
    size = 1e-3 * (1 + layer) * (1 + step / 100)
    return {
        "residual": {"median": size, "p95": 2 * size, "max": 3 * size},
        "residual_after_cast": {"median": 2 * size, "p95": 4 * size, "max": 6 * size},
        "column_sum": size / 2,
        "error": {"o": 0.03, "dq": 0.05 + 0.01 * head, "dk": 0.06, "dv": 0.04},
        "signed_residual": {"rms": size, "mean": -size / 4, "sharpens": 0.75, "flattens": 0.25},
        "signed_residual_after_cast": {"rms": 2 * size, "mean": -size / 2},
        "column_sum_after_cast": size,
        # Channel 1 is always pushed down, channel 2 up and down by turns; the others are still.
        "columns_after_cast": [0.0, -size, size if step // 10 % 2 else -size, *[0.0] * (channels - 3)],
        "pushed": [{"channel": 1, "share": -size, "consistency": 1.0}],
    }


def line(step: int, layers: int = 2, modes: tuple[str, ...] = ("matched",), first: bool = False) -> dict[str, Any]:
    return {
        "schema": "dmattn.live/1",
        "version": "0.1.0",
        "numerics": "hopper",
        "centre": "qk",
        "device": "cpu",
        **({"run": {"model": "Model", "every": 10}} if first else {}),
        "step": step,
        "seconds": 0.1,
        "layers": [
            {
                "layer": f"layers.{layer}.attention",
                "heads": [
                    {
                        "head": head,
                        "entropy": 2.0 + head,
                        "gain": {"channel": 3, "share": 0.125 * (1 + head)},
                        "modes": {mode: mode_entry(step, layer, head) for mode in modes},
                    }
                    for head in (0, 3)
                ],
            }
            for layer in range(layers)
        ],
        "not_measured": [{"layer": "vision", "reason": "attn_mask: expected None"}],
    }


def log_file(path: Path, steps: int = 5, **options: Any) -> Path:
    """Steps 0, 10, 20, ..."""
    path.write_text("".join(json.dumps(line(10 * i, first=i == 0, **options)) + "\n" for i in range(steps)))
    return path
