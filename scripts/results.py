#!/usr/bin/env python3
"""Writes docs/results.md: the sweep, the sink demonstration and probed layers, from runs of dmattn.

    scripts/results.py LAYER.safetensors...        # with build/release/cli/dmattn
    DMATTN_BIN=path/to/dmattn scripts/results.py examples/qwen_l15_kv1_n512.safetensors

Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = ("stale", "consistent", "matched", "onepass")
ABLATIONS = ("bf16_dp", "max_shift", "per_tensor")


def dmattn(*arguments: str) -> dict:
    binary = os.environ.get("DMATTN_BIN", str(ROOT / "build/release/cli/dmattn"))
    print("dmattn", *arguments, file=sys.stderr, flush=True)
    run = subprocess.run([binary, *arguments, "--json"], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr.strip())
    return json.loads(run.stdout)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def small(x: float | None) -> str:
    return "–" if x is None else f"{x:.1e}".replace("e-0", "e-").replace("e+00", "")


def percent(x: float | None) -> str:
    return "–" if x is None else f"{100 * x:.1f}" if x < 1 else f"**{100 * x:.0f}**"


def sweep_table(document: dict) -> str:
    head = ["inputs", "spread", "mode", "residual", "after cast", "column sum", "O", "dQ", "dK", "dV"]
    return table(
        head,
        [
            [row["inputs"], f"{row['spread']:g}", row["mode"]]
            + [small(row[key]) for key in ("residual", "residual_after_cast", "column_sum")]
            + [percent(row[f"error_{key}"]) for key in ("o", "dq", "dk", "dv")]
            for row in document["rows"]
        ],
    )


def probe_rows(name: str, document: dict) -> list[list[str]]:
    rows = []
    for mode, numbers in document["modes"].items():
        worst, error = numbers["worst_head"], numbers["error"]
        rows.append(
            [name, mode, small(numbers["residual"]["median"]), small(numbers["residual_after_cast"]["median"]),
             small(numbers["column_sum"]), *(percent(error[key]) for key in ("o", "dq", "dk", "dv")),
             f"{worst['head']}: {percent(worst['dq'])}"]
        )  # fmt: skip
    return rows


PROBE_HEAD = ["layer", "mode", "residual", "after cast", "column sum", "O", "dQ", "dK", "dV", "worst head: its dQ"]

INTRODUCTION = """# Results

Written by `scripts/results.py` from runs of `dmattn` {version}; every row can be run again. Residual: |Σ dS| / Σ|dS|,
median row, as the mode computes dS and after dS is cast to E4M3. Column sum: |Σ_j dK| / Σ|dK|. O … dV: relative error
against FP64 in percent (Frobenius); bold: 100 % and more. What the modes are: [method.md](method.md); what the two
numerics are: [numerics.md](numerics.md).
"""

SWEEP = """
## Random heads, {numerics} numerics

`dmattn sweep --numerics {numerics}`: four heads, 512 tokens, D = 64, causal, six seeds; median over rows, then over
heads and seeds.
"""

SINK = """
## The sink demonstration

`dmattn sweep --inputs sink`: 2,048 tokens, D = 128, causal, 8 seeds × 2 heads. Every query has a 4 in channel 0, and
key 0 is zero but for that channel, so its logit is 10 in every row and it holds about 0.87 of a long one: what a
trained model's attention sink looks like. The stale δ loses a third of dQ. Consistent δ repairs most of it; what is
left (15 %) is the codes of S, and centring Q takes two thirds of that away: the shared 4 leaves no rounding behind.

![Residual and error by mode with a sink](images/sink.svg)
"""

LAYERS = """
## Layers of trained models

`dmattn probe FILE`: 512 tokens of English text through trained models, causal. dK and dV over the summed query heads
of each KV head. `qwen_l15_kv1_n512` ships in examples/.
"""

READING = """
What they say:

- The residual of stale δ is one to two percent of Σ|dS| on every layer, two to five times that of consistent δ;
  matched leaves FP32 round-off in the median row, onepass what the 13-bit accumulator leaves (nothing in paper
  numerics). Rows that look at one key alone have almost no dS, and there the residual can reach 1 in every mode.
- Over a whole layer the modes differ by a few percent of dQ: rounding of the codes dominates.
- Head 7 of `qwen_l15` (head 1 of `qwen_l15_kv1`) is saturated, with logits up to 1,400 and nearly one-hot rows. Its
  true dS nearly vanishes, and the stale δ puts an error more than ten times its size in place. It holds a few
  thousandths of the layer's norm, so the whole-tensor error of dQ hides it, and that of dK does not.
- Centring Q (hopper numerics) halves the error of O and takes 20 to 70 % off the gradients' where K has large
  shared components (`smollm2_l15`, `gemma3_l11`).
- Hopper's integer references round the largest P of a row as well, where the article's amax / 448 scale keeps it exact:
  consistent's residual is up to 2.6 times as large, and one sharp head (7 of `smollm2_l29`) has dQ off by 8.7 % in it,
  where an independent simulation with the article's codes and Q centred has 4.5 %. matched and onepass do not see it.
- `per_tensor` is what one scale a tensor and no centring do: on the Qwen layers O itself is lost.
"""


COLOURS = {"stale": "#b5410b", "consistent": "#7f5f00", "matched": "#1d4ed8", "onepass": "#0f766e"}


def sink_picture(panels: list[tuple[str, dict]]) -> str:
    """dQ's error by mode, a panel for each numerics, as a self-contained SVG."""
    width, bar, gap, left, scale = 720, 18, 34, 120, 520 / 0.40
    height = 60 + len(panels) * (len(MODES) * (bar + 4) + gap)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Error of dQ by mode with an attention sink">',
        f'<rect width="{width}" height="{height}" fill="#fdfcf8"/>',
        '<text x="20" y="28" font-size="16" font-weight="bold" fill="#1c1917">Error of dQ when one key holds 87 % '
        "of every row</text>",
    ]
    y = 60
    for title, document in panels:
        parts.append(f'<text x="20" y="{y}" fill="#57534e">{title}</text>')
        y += 8
        for row in document["rows"]:
            error, mode = row["error_dq"], row["mode"]
            parts.append(
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" fill="#1c1917">{mode}</text>'
                f'<rect x="{left}" y="{y}" width="{error * scale:.1f}" height="{bar}" fill="{COLOURS[mode]}"/>'
                f'<text x="{left + error * scale + 6:.1f}" y="{y + 14}" fill="#1c1917">{100 * error:.1f} %</text>'
            )
            y += bar + 4
        y += gap - 8
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="+", type=Path, help="safetensors files with q, k, v, d_o")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results.md")
    options = parser.parse_args()
    sweeps = {numerics: dmattn("sweep", "--numerics", numerics) for numerics in ("paper", "hopper")}
    text = INTRODUCTION.format(version=sweeps["paper"]["version"])
    for numerics, document in sweeps.items():
        text += SWEEP.format(numerics=numerics) + "\n" + sweep_table(document)
    text += SINK
    sinks = [
        ("Paper numerics", dmattn("sweep", "--inputs", "sink", "--numerics", "paper")),
        ("Hopper numerics, Q not centred", dmattn("sweep", "--inputs", "sink", "--numerics", "hopper", "--centre", "k")),
        ("Hopper numerics", dmattn("sweep", "--inputs", "sink", "--numerics", "hopper")),
    ]
    (options.output.parent / "images/sink.svg").write_text(sink_picture(sinks))
    for title, document in sinks:
        text += f"\n{title}:\n\n" + sweep_table(document)
    text += LAYERS
    ablations = [option for name in ABLATIONS for option in ("--ablation", name)]
    for title, extra in (("Hopper numerics", ("--numerics", "hopper")), ("Paper numerics, with the ablations", ("--numerics", "paper", *ablations))):  # fmt: skip
        rows = [row for path in options.layers for row in probe_rows(path.stem, dmattn("probe", str(path), *extra))]
        text += f"\n### {title}\n\n" + table(PROBE_HEAD, rows)
    options.output.write_text(text + READING)
    print(options.output)


if __name__ == "__main__":
    main()
