"""One HTML page of what ``train compare`` and ``train bias`` wrote: tables and plots, nothing from the network.

The page has no script; its policy lets nothing in but its own style sheet. Its sentences say what the numbers are, and
leave what they mean to the reader. read.py reads, plots.py chooses what is
drawn, svg.py draws on axes.py's axes, sections.py writes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import durable
from ..cli import Parser
from .plots import of_bias, of_comparison, slug
from .read import Bias, Comparison, load
from .sections import bias_section, comparison_section
from .svg import Plot, svg

EPILOG = """examples:
  python -m train report build/runs/toy3/compare.json build/bias.json --out build/evidence.html
  python -m train report build/runs/*/compare.json --out build/evidence.html --svg docs/images
"""


# ---- Page -----------------------------------------------------------------------------------------------------------


def drawn(documents: Sequence[Comparison | Bias]) -> list[list[Plot]]:
    """Plots of every document; their names are those of files, each once."""
    found, used = [], set()
    for document in documents:
        base = slug(document.config.removesuffix(".toml") if isinstance(document, Comparison) else document.checkpoint)
        prefix, at = base, 2
        kind = "compare" if isinstance(document, Comparison) else "bias"
        while (prefix, kind) in used:
            prefix, at = f"{base}-{at}", at + 1
        used.add((prefix, kind))
        found.append(of_comparison(document, prefix) if isinstance(document, Comparison) else of_bias(document, prefix))
    return found


def style() -> tuple[str, str]:
    """The sheet of the page, and its part that a drawing needs."""
    whole = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    return whole, whole.partition("/* The page. */")[0]


def counted(facts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in facts.items() if count)


def page(documents: Sequence[Comparison | Bias]) -> str:
    """The HTML: the same documents give the same bytes."""
    sheet = "\n" + style()[0]
    digest = base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode()
    sections = []
    for at, (document, plots) in enumerate(zip(documents, drawn(documents), strict=True)):
        if isinstance(document, Comparison):
            sections.append(comparison_section(document, plots, f"s{at}"))
        else:
            sections.append(bias_section(document, plots, f"s{at}"))
    runs = sum(len(document.runs) for document in documents if isinstance(document, Comparison))
    experiments = sum(isinstance(document, Bias) for document in documents)
    facts = {"training run": runs, "comparison": len(documents) - experiments, "bias experiment": experiments}
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<title>Training with FP8 attention</title>',
        f"<style>{sheet}</style>\n</head>\n<body>\n<main>\n<header>",
        '<p class="eyebrow">delta-matching <span aria-hidden="true">/</span> trainings side by side</p>',
        "<h1>Training with FP8 attention, mode by mode</h1>",
        '<p class="lede">Decoder language models, trained with exact attention and with FP8 attention whose modes '
        "differ in one number per row of the backward pass, δ.</p>",
        f'<p class="facts">{counted(facts)}</p>',
        "</header>", *sections, "</main>\n</body>\n</html>\n",
    ])  # fmt: skip


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m train report",
        description="An HTML page of what `train compare` and `train bias` wrote: tables and plots in one file that "
        "loads nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="compare.json or what `train bias --out` wrote"
    )
    top.add_argument("--out", type=Path, required=True, help="the HTML page")
    top.add_argument("--svg", type=Path, metavar="FOLDER", help="write each plot as an SVG file of its own too")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(argv)
    if chosen.out.is_dir():
        raise ValueError(f"--out: expected a file, got the folder {chosen.out}")
    if chosen.svg is not None and chosen.svg.exists() and not chosen.svg.is_dir():
        raise ValueError(f"--svg: expected a folder, got the file {chosen.svg}")
    documents = [load(path) for path in chosen.files]
    durable.replace(chosen.out, page(documents).encode(), "--out")
    if chosen.svg is not None:
        chosen.svg.mkdir(parents=True, exist_ok=True)
        sheet = "\n" + style()[1]
        for plot in (plot for plots in drawn(documents) for plot in plots):
            plotted = svg(plot, plot.name, sheet) + "\n"
            durable.replace(chosen.svg / f"{plot.name}.svg", plotted.encode(), "--svg")
    print(chosen.out)
    return 0
