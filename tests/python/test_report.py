"""The report page in a real browser: headless Chromium runs its script and the plots are looked for in the result.

A missing browser is a failure, not a skip, unless DMATTN_NO_BROWSER=1. DMATTN_BROWSER names one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cli_helpers import DMATTN, dmattn, layer_file
from live_logs import line, log_file

pytestmark = pytest.mark.skipif(os.environ.get("DMATTN_NO_BROWSER") == "1", reason="DMATTN_NO_BROWSER=1")

SCHEMES = {"dark": 0, "light": 1}
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome"]


def browser() -> str:
    wanted = os.environ.get("DMATTN_BROWSER")
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.fail("no Chromium found: install one, name it in DMATTN_BROWSER, or set DMATTN_NO_BROWSER=1")
    return found


def rendered(page: Path, profile: Path, scheme: str = "light") -> tuple[str, str]:
    """The document after its script has run, and what the script said on the console."""
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--window-size=1200,3000", "--virtual-time-budget=5000", "--enable-logging=stderr",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


VOID = {"meta", "br", "input", "img", "link", "hr"}  # elements without an end


class Plots(HTMLParser):
    """Counts shapes inside the element that carries an id, and collects the labels of its pictures."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.shapes: dict[str, list[str]] = {}
        self.labels: dict[str, str] = {}
        self.text: dict[str, str] = {}
        self.feed(document)

    def inside(self) -> list[str]:
        return [name for _, name in self.open if name]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        for name in self.inside():
            self.shapes.setdefault(name, []).append(tag)
            if tag == "svg":
                self.labels[name] = found.get("aria-label") or ""
        if tag not in VOID:
            self.open.append((tag, found.get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for name in self.inside():
            self.text[name] = self.text.get(name, "") + data


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    layer = layer_file(folder / "layer.safetensors")
    commands = {"probe": ["probe", layer], "row": ["row"], "sweep": ["sweep", "--tokens", 32, "--seeds", 1]}
    made = {}
    for name, command in commands.items():
        made[name] = folder / f"{name}.html"
        assert dmattn(*command, "--html", made[name]).returncode == 0, DMATTN
    return made


@pytest.mark.parametrize("scheme", SCHEMES)
def test_probe_page(pages: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    document, console = rendered(pages["probe"], tmp_path, scheme)
    assert console == ""
    plots = Plots(document)
    assert plots.shapes["plot-residual"].count("line") > 20  # grid and ranges
    assert plots.shapes["plot-heads"].count("rect") >= 4 * 4  # heads by modes
    assert plots.shapes["plot-row"].count("rect") == 8 + 4  # keys, and a sum for each mode
    assert plots.shapes["mode-switch"].count("input") == 4
    for plot in ("plot-residual", "plot-heads", "plot-row"):
        for mode in ("stale", "consistent", "matched", "onepass"):
            assert mode in plots.labels[plot], f"{plot}: no text alternative for {mode}"
    assert "stale δ leaves an error" in plots.text["headline"]
    assert plots.shapes["errors-table"].count("tr") == 5
    assert "NaN" not in plots.text["plot-residual"] and "undefined" not in document.split("<script", 1)[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_row_and_sweep_pages(pages: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    document, console = rendered(pages["row"], tmp_path / "row", scheme)
    assert console == ""
    assert Plots(document).shapes["plot-row"].count("rect") == 8 + 4
    document, console = rendered(pages["sweep"], tmp_path / "sweep", scheme)
    assert console == ""
    assert Plots(document).shapes["plot-residual"].count("polyline") == 2 * 4 * 2  # families, modes, before and after


@pytest.mark.parametrize("scheme", SCHEMES)
def test_live_page(tmp_path: Path, scheme: str) -> None:
    page = tmp_path / "page.html"
    log = log_file(tmp_path / "log.jsonl", steps=7, layers=3, modes=("stale", "matched"))
    assert dmattn("report", log, "--html", page).returncode == 0
    document, console = rendered(page, tmp_path / "profile", scheme)
    assert console == ""
    plots = Plots(document)
    assert plots.shapes["live-panels"].count("svg") == 2 * 8 + 2  # panels of each mode; entropy and gains
    for panel in ("live-0-residual", "live-1-dq", "live-entropy", "live-gain"):
        assert plots.shapes[panel].count("polyline") == 3  # layers
        for layer in range(3):
            assert f"layers.{layer}.attention" in plots.labels[panel], f"{panel}: no text alternative for a layer"
    assert "from step 0 to 60" in plots.text["headline"]
    assert plots.shapes["channels-table"].count("tr") == 1 + 24  # 3 layers, 2 heads, 2 modes, 2 channels
    assert plots.shapes["last-table"].count("tr") == 1 + 6
    assert "attn_mask: expected None" in plots.text["gaps-table"]
    assert "NaN" not in plots.text["live-panels"] and "undefined" not in document.split("<script", 1)[0]


def test_live_pages_of_little_and_of_much(tmp_path: Path) -> None:
    bare = line(5)
    bare["layers"] = []
    log, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    log.write_text(json.dumps(bare) + "\n")
    assert dmattn("report", log, "--html", page).returncode == 0
    document, console = rendered(page, tmp_path / "little")
    assert console == "" and "No layer was measured" in Plots(document).text["live-legend"]

    hostile = line(0, layers=1)
    hostile["layers"][0]["layer"] = "<img src=x onerror=document.title='owned'>"
    hostile["layers"][0]["heads"][0]["modes"]["matched"]["error"]["dq"] = None
    log.write_text(json.dumps(hostile) + "\n")
    assert dmattn("report", log, "--html", page).returncode == 0
    document, console = rendered(page, tmp_path / "hostile")
    assert console == "" and "<img" not in re.sub(r"<script.*?</script>", "", document, flags=re.S)

    log_file(log, steps=2000, layers=20)
    assert dmattn("report", log, "--html", page).returncode == 0
    document, console = rendered(page, tmp_path / "much")
    assert console == ""
    points = re.search(r'<polyline[^>]*points="([^"]*)"', document)
    assert points is not None and 400 < points[1].count(",") <= 800  # thinned to what can be told apart


def test_schemes_differ(pages: dict[str, Path], tmp_path: Path) -> None:
    pictures = {}
    for scheme, setting in SCHEMES.items():
        picture = tmp_path / f"{scheme}.png"
        command = [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / scheme}",
            f"--blink-settings=preferredColorScheme={setting}", "--window-size=800,600", f"--screenshot={picture}",
            pages["row"].as_uri(),
        ]  # fmt: skip
        subprocess.run(command, capture_output=True, timeout=180, check=True)
        pictures[scheme] = picture.read_bytes()
    assert pictures["dark"] != pictures["light"]


def test_the_switch_changes_the_row(pages: dict[str, Path], tmp_path: Path) -> None:
    # A click from inside the page: what --dump-dom shows is the state after it.
    page = tmp_path / "clicked.html"
    click = "<script>document.querySelector('#mode-switch input[value=matched]').click()</script></body>"
    page.write_text(pages["probe"].read_text().replace("</body>", click))
    before, _ = rendered(pages["probe"], tmp_path / "a")
    after, console = rendered(page, tmp_path / "b")
    assert console == ""
    assert Plots(before).text["row-readout"] != Plots(after).text["row-readout"]
    assert "under matched" in Plots(after).labels["plot-row"]


def test_hostile_file_names_stay_text(tmp_path: Path) -> None:
    name = "<!--<script><img src=x onerror=document.title='owned'>&amp;{{data}}.safetensors"
    page = tmp_path / "page.html"
    layer_file(tmp_path / name)
    assert dmattn("probe", name, "--html", page, cwd=tmp_path).returncode == 0
    document, console = rendered(page, tmp_path / "profile")
    assert console == ""
    assert "owned'" in Plots(document).text["facts"]
    assert "<img" not in re.sub(r"<script.*?</script>", "", document, flags=re.S)


@pytest.mark.parametrize(
    "sizes", [{"tokens": 0}, {"batch": 0}, {"tokens": 1}, {"q_heads": 130, "kv_heads": 130, "tokens": 2}]
)
def test_extreme_layers_still_make_a_page(tmp_path: Path, sizes: dict) -> None:
    page = tmp_path / "page.html"
    assert dmattn("probe", layer_file(tmp_path / "l", **sizes), "--html", page).returncode == 0
    document, console = rendered(page, tmp_path / "profile")
    assert console == ""
    assert "svg" in Plots(document).shapes["plot-heads"]
