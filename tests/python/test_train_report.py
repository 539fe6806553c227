"""The report: what it refuses, what it escapes, and that its plots say what the documents say."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)

from train import report
from train.cli import main as command
from train.report import axes, plots, read, sections

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert("x")</script>&\'\x00\x1b[31m\ud800\ufffe]]>'


def run_document(mode: str, seed: int, validation: float | None = 2.0, **labels: str) -> dict[str, Any]:
    own = {} if mode == "exact" else {mode: 3e-4}
    offset = 0.0 if validation is None else validation
    return {
        "name": f"{mode}-{'-'.join(labels.values())}-seed_{seed}",
        "labels": {"mode": mode, **{name.replace("__", "."): value for name, value in labels.items()}},
        "seed": seed,
        "validation": validation,
        "step": 300,
        "stopped": None,
        "curve": [[10 * at + 9, offset + 2.0 / (at + 1)] for at in range(30)],
        "validations": [[100, offset + 1.0], [200, offset + 0.5], [300, offset]],
        "probe": {
            **{name: dict(own) for name in ("residual", "residual_after_cast", "dq_error", "dq_error_worst")},
            "curve": [{"step": at, "gain": {"layers.0": 0.1, "layers.1": 0.2}, "entropy": 3.0 - at / 300}
                      for at in (0, 150, 299)],
        },
    }  # fmt: skip


def comparison(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema": "dmattn.compare/1", "torch": "2", "runs": list(runs), "config": "toy.toml", "failed": [], **more}


def usual() -> dict[str, Any]:
    values = {"exact": 2.0, "stale": 2.25, "matched": 2.01}
    return comparison(
        *(run_document(mode, seed, value + seed / 8) for mode, value in values.items() for seed in (0, 1))
    )


def bias_row(mode: str, layer: str | None, parameter: str, bias: float | None, noise: float = 0.4) -> dict[str, Any]:
    seen = bool(bias)
    found = {"value": bias, "low": bias and bias / 2, "high": bias and 2 * bias, "seen": seen}
    curve = [None if bias is None else math.sqrt(bias**2 + noise**2 / b) for b in (1, 2, 4, 8)]
    equal = {"batches": 5.0, "low": 2.0, "high": 9.0} if seen else None
    return {"mode": mode, "layer": layer, "parameter": parameter, "elements": 4, "curve": curve, "noise": noise,
            "curve_error": [0.01, 0.01, 0.01, None], "bias": found, "equal_at": equal}  # fmt: skip


def bias_document() -> dict[str, Any]:
    rows = [bias_row(mode, layer, parameter, bias)
            for layer in (None, "layers.0.attention") for parameter in ("q", "k_columns")
            for mode, bias in (("matched", 0.0), ("stale", 0.2), ("stale - matched", 0.1))]  # fmt: skip
    return {"schema": "dmattn.bias/1", "version": "0.1.0", "torch": "2", "device": "cpu", "batches": [1, 2, 4, 8],
            "checkpoint": {"name": "run", "step": 300, "trained_in": {"mode": "exact"}}, "exact": [], "modes": rows,
            "settings": {"batches": 8, "batch": 2, "context": 64}}  # fmt: skip


def written(folder: Path, *documents: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{at}.json" for at in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document), encoding="utf-8")
    return paths


def made(folder: Path, *documents: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The page, and the drawings by name."""
    paths = written(folder, *documents)
    assert report.main([*map(str, paths), "--out", str(folder / "page.html"), "--svg", str(folder / "svg")]) == 0
    drawings = {path.name: path.read_text(encoding="utf-8") for path in (folder / "svg").iterdir()}
    return (folder / "page.html").read_text(encoding="utf-8"), drawings


class Page(HTMLParser):
    """Tags that are open, and everything that is there."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "rect", "circle", "polyline"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open[-4:]):
            self.rows[-1][-1] += data


def refused(folder: Path, raw: bytes, capsys: pytest.CaptureFixture[str]) -> str:
    path = folder / "bad.json"
    path.write_bytes(raw)
    assert command(["report", str(path), "--out", str(folder / "page.html")]) == 2
    assert not (folder / "page.html").exists()
    line = capsys.readouterr().err
    assert line.startswith(f"error: {path}: ") and line.count("\n") == 1
    return line


# ---- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "expected JSON, got something else in line 1"),
        (b"\xff\xfe{", "expected JSON in UTF-8"),
        (b"[" * 200000, "lists in lists without end"),
        (b"[1, 2]", "document: expected an object, got [1, 2]"),
        (b"{}", "schema: expected dmattn.compare/1 or dmattn.bias/1, got nothing"),
        (b'{"schema": "dmattn.live/1"}', "got 'dmattn.live/1'"),
        (b'{"schema": "dmattn.compare/1"}', "runs: expected a list, got nothing"),
        (b'{"schema": "dmattn.compare/1", "runs": []}', "runs: expected at least one run, got []"),
        (b'{"schema": "dmattn.compare/1", "runs": [3]}', "runs[0]: expected an object, got 3"),
        (b'{"schema": "dmattn.compare/1", "runs": NaN}', "expected finite numbers, got NaN"),
        (b'{"schema": "dmattn.bias/1", "batches": [2, 1]}', "batches: expected growing whole numbers"),
        (b"9" * 5000, "expected JSON of a report: "),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused_in_a_line(raw, says, tmp_path, capsys) -> None:
    assert says in refused(tmp_path, raw, capsys)


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """With a value replaced, or without it where it is ``...``."""
    at: Any = document
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for parent in parents:
        at = at[parent]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return document


@pytest.mark.parametrize(
    ("make", "path", "value", "says"),
    [
        (usual, "runs/0/validation", ..., "runs[0].validation: expected a finite number, got nothing"),
        (usual, "runs/0/validation", "2.0", "runs[0].validation: expected a finite number, got '2.0'"),
        (usual, "runs/0/validation", 1e200, "runs[0].validation: expected a finite number, got 1e+200"),
        (usual, "runs/0/validation", 10**300, "runs[0].validation: expected a finite number"),
        (usual, "runs/0/validation", True, "runs[0].validation: expected a finite number, got True"),
        (usual, "runs/1/seed", -1, "runs[1].seed: expected a whole number, 0 or more, got -1"),
        (usual, "runs/1/seed", 0, "runs[1]: expected each run once"),
        (usual, "runs/2/labels/mode", ..., "runs[2].labels.mode: expected a text, got nothing"),
        (usual, "runs/2/labels/mode", {}, "runs[2].labels.mode: expected a text, got {}"),
        (usual, "runs/0/curve/3", [1], "runs[0].curve[3]: expected a step and a number, got [1]"),
        (usual, "runs/0/probe/residual", {"stale": "x"}, "runs[0].probe.residual.stale: expected a finite number"),
        (usual, "failed", 3, "failed: expected a list, got 3"),
        (bias_document, "modes", [], "modes: expected at least one row, got []"),
        (bias_document, "modes/0/bias/seen", ..., "modes[0].bias.seen: expected true or false, got nothing"),
        (bias_document, "modes/0/curve", [1.0], "modes[0].curve: expected 4 numbers, one for each of batches"),
        (bias_document, "modes/0/layer", ..., "modes[0].layer: expected a text, got nothing"),
        (bias_document, "settings/context", ..., "settings.context: expected a whole number"),
        (bias_document, "checkpoint", None, "checkpoint: expected an object, got None"),
    ],
)  # fmt: skip
def test_a_wrong_place_is_named(make, path, value, says, tmp_path, capsys) -> None:
    document = changed(make(), path, value)
    assert says in refused(tmp_path, json.dumps(document).encode(), capsys)


def test_not_a_number_is_refused_wherever_it_is(tmp_path, capsys) -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        raw = json.dumps(changed(usual(), "runs/3/curve/7", [5, 123.5])).replace("123.5", text)
        assert "expected" in refused(tmp_path, raw.encode(), capsys)


def test_a_file_that_is_not_there(tmp_path, capsys) -> None:
    assert command(["report", str(tmp_path / "none.json"), "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err == f"error: No such file or directory: {tmp_path / 'none.json'}\n"
    assert command(["report", str(written(tmp_path, usual())[0]), "--out", str(tmp_path)]) == 2
    assert "--out: expected a file, got the folder" in capsys.readouterr().err


# ---- The page -------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_and_is_well_formed(tmp_path) -> None:
    text, drawings = made(tmp_path, usual(), bias_document())
    page = Page(text)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "image", "use", "foreignobject"}
    for tag, attributes in page.tags:
        assert not {"style", "src", "href", "onload"} & attributes.keys(), (tag, attributes)
    sheet = re.search(r"<style>(.*?)</style>", text, re.S)
    assert sheet is not None
    digest = base64.b64encode(hashlib.sha256(sheet[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in text
    assert "url(" not in sheet[1] and "@import" not in sheet[1]
    idents = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(idents) == len(set(idents))
    kinds = {"toy": ("loss", "validation", "gap", "entropy", "gain"),
             "run": ("bias", "bias-difference", "worst", "worst-difference")}  # fmt: skip
    assert set(drawings) == {f"{name}-{kind}.svg" for name, every in kinds.items() for kind in every}


def test_the_same_documents_give_the_same_bytes(tmp_path) -> None:
    documents = (usual(), usual(), bias_document())
    found = []
    for at in ("1", "2"):
        folder = tmp_path / at / "same"
        folder.mkdir(parents=True)
        found.append(made(folder, *documents))
    assert found[0] == found[1]
    assert {"toy-loss.svg", "toy-2-loss.svg"} <= set(found[0][1])


def test_text_of_a_file_is_text_on_the_page(tmp_path) -> None:
    document = usual()
    for run in document["runs"]:
        run["labels"] = {"mode": HOSTILE + run["labels"]["mode"], f"optim.{HOSTILE}": HOSTILE}
        run["name"], run["validation"], run["stopped"] = HOSTILE, None, HOSTILE
    document["config"] = document["torch"] = HOSTILE
    other = bias_document()
    other["checkpoint"]["name"] = other["device"] = HOSTILE
    for row in other["modes"]:
        row["mode"], row["parameter"] = HOSTILE + row["mode"], HOSTILE + row["parameter"]
    text, drawings = made(tmp_path, document, other)
    page = Page(text)
    assert page.open == [] and "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text and "\x00" not in text
    for name, drawing in drawings.items():
        assert re.fullmatch(r"[a-z0-9-]+\.svg", name)
        assert SVG + "script" not in {element.tag for element in ElementTree.fromstring(drawing).iter()}


def test_long_names_do_not_fill_the_page(tmp_path) -> None:
    text, _ = made(tmp_path, changed(usual(), "runs/0/name", "n" * 100000) | {"config": "c" * 100000})
    assert "c" * 159 + "…" in text and "c" * 160 not in text


def row_of(text: str, start: str) -> list[str]:
    return next(row for row in Page(text).rows if row and row[0] == start)


def test_the_table_has_the_gaps_with_mean_and_spread(tmp_path) -> None:
    document = usual()
    document["runs"][3]["validation"] = 2.5  # stale, seed 1: exact is 2.125
    document["runs"][2]["probe"]["dq_error_worst"]["stale"] = 0.25
    text, _ = made(tmp_path, document)
    gap, probed = ["+0.3125", "+0.2500 … +0.3750"], ["3.0·10⁻⁴", "3.0·10⁻⁴", "20 %", "25 %"]
    assert row_of(text, "stale") == ["stale", "2.2500", "2.5000", *gap, *probed]
    assert row_of(text, "exact")[1:5] == ["2.0000", "2.1250", "\u2013", "\u2013"]


def test_gaps_are_those_of_the_comparison_itself(tmp_path) -> None:
    from train.outcome import markdown

    document = comparison(*(
        run_document(mode, seed, 2 + len(mode) / 16 + seed / 8, optim__lr=lr, **more)
        for lr in ("1e-3", "1e-2") for seed in (0, 1) for mode, more in
        (("exact", {}), ("stale", {"attention__centre": "k"}), ("stale", {"attention__centre": "none"}))
    ))  # fmt: skip
    table = [line.split(" | ")[3] for line in markdown(document).splitlines()[2:]]
    found = read.load(written(tmp_path, document)[0])
    groups = sections.grouped(found.runs)
    gaps = [" / ".join(f"{gap:+.3f}" for gap in sections.gaps_of(group, found.runs)) for group in groups]
    assert gaps == table


def test_what_was_lost_or_not_run_is_shown_as_that(tmp_path) -> None:
    document = usual()
    stopped, failed, absent, unfinished = document["runs"][2:]
    for run in (stopped, failed, absent, unfinished):
        run["validation"] = None
    stopped["stopped"] = "the loss is nan"
    document["failed"] = [f"{failed['name']}: error: out of memory"]
    for key in ("curve", "validations", "probe"):
        del absent[key]
    text, _ = made(tmp_path, document)
    assert row_of(text, "stale")[1:5] == ["stopped", "failed", "no pair finished", "\u2013"]
    assert row_of(text, "matched")[1:3] == ["not run", "unfinished"]
    assert "the loss is nan" in text and "error: out of memory" in text
    assert "6 runs, 2 finished, 1 stopped, 1 failed, 1 not run, 1 unfinished" in text


def test_without_exact_there_is_no_gap(tmp_path) -> None:
    document = comparison(run_document("stale", 0))
    text, drawings = made(tmp_path, document)
    assert row_of(text, "stale")[1:4] == ["2.0000", "no exact run", "\u2013"]
    assert "toy-gap.svg" not in drawings and "toy-loss.svg" in drawings


@pytest.mark.parametrize("value", [None, 0.0])
def test_numbers_may_be_null_or_nothing(value, tmp_path) -> None:
    run = run_document("stale", 0, value)
    run["curve"] = [[0, value], [1, value]]
    run["validations"] = [[0, value]]
    run["probe"]["curve"] = [{"step": 0, "gain": {}, "entropy": value}]
    run["probe"]["residual"] = {"stale": value}
    document = bias_document()
    for row in document["modes"]:
        row["curve"] = row["curve_error"] = [value] * 4
        row["bias"] = {"value": value, "low": value, "high": value, "seen": False}
        row["equal_at"] = None
    text, drawings = made(tmp_path, comparison(run), document)
    assert Page(text).open == [] and "nan" not in text.lower().replace("nance", "")
    for drawing in drawings.values():
        ElementTree.fromstring(drawing)


def test_thirty_runs_and_more_points_than_panels(tmp_path) -> None:
    modes = ("exact", "stale", "consistent", "matched", "onepass")
    text, drawings = made(tmp_path, comparison(*(run_document(mode, seed) for mode in modes for seed in range(6))))
    assert len(lines(drawings["toy-loss.svg"])) == 30 and len(row_of(text, "onepass")) == 13
    rates = [f"{at}e-4" for at in range(1, 16)]
    many = comparison(*(run_document("stale", 0, optim__lr=rate) for rate in rates))
    text, drawings = made(tmp_path, many)
    assert len(lines(drawings["toy-loss.svg"])) == plots.MOST_PANELS
    assert "The first 12 of 15 points of the grid are drawn." in drawings["toy-loss.svg"]


# ---- Drawings -------------------------------------------------------------------------------------------------------


def lines(drawing: str) -> dict[str, list[tuple[float, float]]]:
    """By name, the points that a drawing shows, read back through the grid lines of a plot with one panel."""
    root = ElementTree.fromstring(drawing)
    return {
        f"{at} {group.get('data-data')}": [
            tuple(map(float, pair.split(",")))
            for line in group.iter(SVG + "polyline") for pair in (line.get("points") or "").split()
        ]
        for at, group in enumerate(group for group in root.iter(SVG + "g") if group.get("data-data"))
    }  # fmt: skip


def axis(drawing: str, name: str, log: bool) -> Any:
    """From the drawing to the data, by two ticks of an axis."""
    ticks = []
    for element in ElementTree.fromstring(drawing).iter(SVG + "path"):
        if element.get(f"data-{name}"):
            start = re.match(r"M(\S+) (\S+?)[Hv]", element.get("d") or "")
            assert start is not None
            value = float(element.get(f"data-{name}") or "")
            ticks.append((float(start[1 if name == "x" else 2]), math.log10(value) if log else value))
    (a, low), (b, high) = ticks[0], ticks[-1]
    assert a != b

    def back(at: float) -> float:
        value = low + (at - a) / (b - a) * (high - low)
        return 10**value if log else value

    return back


@pytest.mark.parametrize("name", ["toy-loss", "toy-gap", "run-bias", "run-worst"])
def test_lines_fill_their_frame_and_stay_inside(name, tmp_path) -> None:
    document = bias_document()
    document["modes"] = [row for row in document["modes"] if row["parameter"] == "q"]
    drawing = made(tmp_path, usual(), document)[1][f"{name}.svg"]
    frame = next(ElementTree.fromstring(drawing).iter(SVG + "clipPath"))[0]
    for at, size in enumerate(("width", "height")):
        start, wide = float(frame.get("xy"[at]) or ""), float(frame.get(size) or "")
        places = [point[at] for points in lines(drawing).values() for point in points]
        assert start <= min(places) < start + 0.15 * wide and start + 0.85 * wide < max(places) <= start + wide


def test_points_of_a_linear_plot_are_the_data(tmp_path) -> None:
    document = usual()
    drawing = made(tmp_path, document)[1]["toy-loss.svg"]
    x, y = axis(drawing, "x", False), axis(drawing, "y", False)
    drawn = lines(drawing)
    assert len(drawn) == 6
    for run, (name, points) in zip(document["runs"], drawn.items(), strict=True):
        assert name.endswith(f"{run['labels']['mode']}, seed {run['seed']}")
        assert [x(a) for a, _ in points] == pytest.approx([step for step, _ in run["curve"]], abs=0.01 * 300 / 8)
        assert [y(b) for _, b in points] == pytest.approx([loss for _, loss in run["curve"]], abs=5e-4)


def test_points_of_a_logarithmic_plot_are_the_data(tmp_path) -> None:
    document = bias_document()
    document["modes"] = [row for row in document["modes"] if row["layer"] is None and row["parameter"] == "q"]
    drawing = made(tmp_path, document)[1]["run-bias.svg"]
    x, y = axis(drawing, "x", True), axis(drawing, "y", True)
    drawn = {name.split(" ", 1)[1]: points for name, points in lines(drawing).items()}
    assert set(drawn) == {"stale", "matched"}
    for row in document["modes"][:2]:
        points = drawn[row["mode"]]
        assert [x(a) for a, _ in points] == pytest.approx([1, 2, 4, 8], rel=1e-3)
        assert [y(b) for _, b in points] == pytest.approx(row["curve"], rel=1e-3)
    guide = next(g for g in ElementTree.fromstring(drawing).iter(SVG + "g") if g.get("data-guide") == "stale, 1/√B")
    ends = [pair.split(",") for pair in next(guide.iter(SVG + "polyline")).get("points").split()]
    first, last = (y(float(b)) for _, b in ends)
    assert first / last == pytest.approx(math.sqrt(8), rel=2e-3)


def test_gaps_over_steps_have_the_exact_run_of_the_same_seed(tmp_path) -> None:
    document = usual()
    drawing = made(tmp_path, document)[1]["toy-gap.svg"]
    y = axis(drawing, "y", False)
    means = [sum(y(b) for _, b in points) / 3 for points in lines(drawing).values()]
    assert means == pytest.approx([0.25, 0.25, 0.01, 0.01], abs=1e-3)


def test_a_run_that_diverges_leaves_the_frame_and_the_others_their_room(tmp_path) -> None:
    document = usual()
    document["runs"][2]["curve"][20:] = [[10 * at, 1e6 * at] for at in range(20, 30)]
    drawing = made(tmp_path, document)[1]["toy-loss.svg"]
    y = axis(drawing, "y", False)
    heights = [b for _, b in lines(drawing)["0 exact, seed 0"]]
    assert max(heights) - min(heights) > 100 and y(min(heights)) == pytest.approx(4.0, abs=1e-2)
    assert drawing.count('class="leaves"') == 2  # of the line, and the legend's
    calm = made(tmp_path, usual())[1]["toy-loss.svg"]
    assert 'class="leaves"' not in calm


def test_a_grid_of_learning_rates_shows_the_edge(tmp_path) -> None:
    rates = ("3e-4", "1e-3", "3e-3")
    runs = [run_document(mode, seed, 2 + at / 8 + seed / 16, optim__lr=lr)
            for mode in ("exact", "stale") for at, lr in enumerate(rates) for seed in (0, 1)]  # fmt: skip
    runs[-1].update(validation=None, stopped="nan")
    drawing = made(tmp_path, comparison(*runs))[1]["toy-lr.svg"]
    x, y = axis(drawing, "x", True), axis(drawing, "y", False)
    drawn = {name.split(" ", 1)[1]: points for name, points in lines(drawing).items()}
    points = drawn["stale, mean over seeds"]
    assert [x(a) for a, _ in points] == pytest.approx([3e-4, 1e-3, 3e-3], rel=1e-3)
    assert [y(b) for _, b in points] == pytest.approx([2.03125, 2.15625, 2.25], abs=1e-3)
    lost = [g.get("data-lost") for g in ElementTree.fromstring(drawing).iter(SVG + "g") if g.get("data-lost")]
    assert lost == ["0.003"]


def test_exact_is_beside_every_variant_of_attention(tmp_path) -> None:
    document = comparison(run_document("exact", 0), run_document("stale", 0, attention__centre="k"),
                          run_document("stale", 0, attention__centre="none"))  # fmt: skip
    found = read.load(written(tmp_path, document)[0])
    assert [(title, [run.mode for run in runs]) for title, runs in plots.facets(found.runs)] == [
        ("centre k", ["exact", "stale"]),
        ("centre none", ["exact", "stale"]),
    ]


def test_each_plot_says_what_it_is(tmp_path) -> None:
    for name, drawing in made(tmp_path, usual(), bias_document())[1].items():
        root = ElementTree.fromstring(drawing)
        title, text = root.find(SVG + "title"), root.find(SVG + "desc")
        assert root.get("role") == "img" and title is not None and text is not None and title.text and text.text
        assert root.get("aria-labelledby") == f"{title.get('id')} {text.get('id')}"
        written_out = [element.text or "" for element in root.iter(SVG + "text")]
        assert any("nats" in label or "relative" in label or "share" in label for label in written_out), name
        assert any(label == "steps" or label.startswith("B, mini-batches") for label in written_out), name
        assert "stale" in " ".join(written_out), name


@pytest.mark.parametrize("high", [0.02, 0.3, 0.9, 1.7, 4.0, 40.0])
def test_logarithmic_ticks_are_few_and_inside(high) -> None:
    ticks = axes.log_ticks(-1.3, -1.3 + high)
    assert 2 <= len(ticks) <= 12 and ticks == sorted(set(ticks))
    assert all(-1.31 <= math.log10(tick) <= -1.29 + high for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.0, 2.0001), (-1e-9, 1e-9), (1e50, 1e99), (0.1, 7e5)])
def test_linear_ticks_are_few_and_inside(low, high) -> None:
    ticks = axes.linear_ticks(low, high, 5)
    assert 3 <= len(ticks) <= 11 and ticks == sorted(set(ticks))
    assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in ticks)
