"""dmattn report: what it says about a live probe's log, and one clear line for every log that is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import dmattn, document, refused
from live_logs import line, log_file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return log_file(tmp_path / "log.jsonl")


def test_document(log: Path) -> None:
    found = document("report", log)
    assert (found["schema"], found["numerics"], found["centre"], found["device"]) == (
        "dmattn.report/1", "hopper", "qk", "cpu",
    )  # fmt: skip
    assert found["input"] == {"file": str(log), "lines": 5, "runs": 1, "unfinished": False}
    assert found["steps"] == [0, 10, 20, 30, 40]
    assert [layer["layer"] for layer in found["layers"]] == ["layers.0.attention", "layers.1.attention"]
    layer = found["layers"][1]
    # live_logs: 2e-3 (1 + step / 100) in layer 1, the same in both heads.
    sizes = [pytest.approx(2e-3 * (1 + step / 100), rel=1e-3) for step in found["steps"]]  # four digits are printed
    matched = layer["modes"]["matched"]
    assert matched["residual"] == sizes
    assert matched["residual_after_cast"] == [pytest.approx(4e-3 * (1 + s / 100), rel=1e-3) for s in found["steps"]]
    assert matched["mean_after_cast"] == [pytest.approx(-1e-3 * (1 + s / 100), rel=1e-3) for s in found["steps"]]
    assert matched["column_sum_after_cast"] == sizes
    assert matched["sharpens"] == [0.75] * 5
    assert matched["error"] == {"o": [0.03] * 5, "dq": [0.08] * 5, "dk": [0.06] * 5, "dv": [0.04] * 5}  # head 3's dq
    assert layer["entropy"] == [3.5] * 5  # the mean of 2 and 5
    assert layer["gain_share"] == [0.5] * 5  # the larger of 0.125 and 0.5
    assert found["not_measured"] == [{"layer": "vision", "reason": "attn_mask: expected None", "steps": 5}]


def test_channels(log: Path) -> None:
    channels = document("report", log)["channels"]
    assert len(channels) == 8  # two layers, two heads; channels 0 and 3 were never pushed
    first = channels[0]
    assert (first["layer"], first["channel"], first["mode"], first["steps"]) == (
        "layers.1.attention", 1, "matched", 5,
    )  # fmt: skip
    assert first["consistency"] == 1.0
    assert first["share"] == pytest.approx(-2e-3 * 1.2, rel=1e-3)  # the mean over steps 0 ... 40
    turns = next(one for one in channels if one["channel"] == 2)
    signed = sum((1 + s / 100) * (1 if s // 10 % 2 else -1) for s in range(0, 50, 10))
    whole = sum(1 + s / 100 for s in range(0, 50, 10))
    assert turns["consistency"] == pytest.approx(abs(signed) / whole, rel=1e-3)


def test_later_lines_count(tmp_path: Path) -> None:
    path = log_file(tmp_path / "log", steps=3)
    again = line(10, first=True)
    again["layers"][0]["heads"][0]["entropy"] = 9.0
    with path.open("a") as file:
        file.write(json.dumps(again) + "\n")
    found = document("report", path)
    assert (found["input"]["lines"], found["input"]["runs"], found["steps"]) == (4, 2, [0, 10, 20])
    assert found["layers"][0]["entropy"][1] == 7.0  # the mean of 9 and 5
    assert found["channels"][0]["steps"] == 3  # not 4


def test_a_line_that_is_being_written_is_left_out(log: Path) -> None:
    whole = document("report", log)
    with log.open("a") as file:
        file.write(json.dumps(line(50))[:1000])
    found = document("report", log)
    assert found["input"].pop("unfinished") is True and whole["input"].pop("unfinished") is False
    assert found == whole
    assert "has no end" in dmattn("report", log).stdout


def test_layers_may_come_and_go(tmp_path: Path) -> None:
    lines = [line(0, layers=1), line(10, layers=2), line(20, layers=1, modes=("stale", "matched"))]
    lines[0]["layers"][0]["heads"] = []
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = document("report", path)
    assert found["layers"][1]["entropy"] == [None, 3.5, None]
    assert found["layers"][0]["modes"]["stale"]["sharpens"] == [None, None, 0.75]
    assert found["layers"][0]["modes"]["matched"]["sharpens"] == [None, 0.75, 0.75]
    assert found["layers"][0]["entropy"][0] is None


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    one = line(0, layers=1)
    for head in one["layers"][0]["heads"]:
        head["entropy"] = head["gain"] = None
        head["modes"]["matched"]["error"]["dq"] = None
        head["modes"]["matched"]["columns_after_cast"] = [None, 0.5]
    path = tmp_path / "log"
    path.write_text(json.dumps(one) + "\n")
    found = document("report", path)
    layer = found["layers"][0]
    assert layer["entropy"] == layer["gain_share"] == layer["modes"]["matched"]["error"]["dq"] == [None]
    assert found["channels"] == []
    assert dmattn("report", path).returncode == 0


def test_tables_are_for_people(log: Path) -> None:
    done = dmattn("report", log)
    assert done.returncode == 0 and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 132
    for text in ("5 measured steps, 0 to 40", "layers.1.attention", "pushed most", "attn_mask: expected None"):
        assert text in done.stdout


# ---- bad input -----------------------------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any]], None], at: int = 1) -> Path:
    """The log with line ``at`` (from 0) changed."""
    lines = path.read_text().splitlines()
    one = json.loads(lines[at])
    change(one)
    lines[at] = json.dumps(one)
    path.write_text("\n".join(lines) + "\n")
    return path


def first_mode(one: dict[str, Any]) -> dict[str, Any]:
    mode: dict[str, Any] = one["layers"][0]["heads"][0]["modes"]["matched"]
    return mode


REQUIRED = ("schema", "numerics", "centre", "device", "step", "layers", "not_measured")


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_fields_are_named(log: Path, name: str) -> None:
    refused("report", changed(log, lambda one: one.pop(name)), says=f"line 2: line.{name}: is missing")


@pytest.mark.parametrize("name", ["signed_residual", "signed_residual_after_cast", "error", "columns_after_cast"])
def test_missing_fields_of_a_mode_are_named(log: Path, name: str) -> None:
    says = f"line 2: line.layers[0].heads[0].modes['matched'].{name}: is missing"
    refused("report", changed(log, lambda one: first_mode(one).pop(name)), says=says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda one: one.update(step=-1), "line.step: must be a whole number from 0"),
        (lambda one: one.update(step=1.5), "line.step: must be a whole number"),
        (lambda one: one.update(step=2**70), "line.step: must be a whole number"),
        (lambda one: one.update(step=None), "got 'null'"),
        (lambda one: one.update(schema="dmattn.probe/1"), "schema must be dmattn.live/1, got 'dmattn.probe/1'"),
        (lambda one: one.update(layers={}), "line.layers: must be a list, got an object"),
        (lambda one: one["layers"].append(one["layers"][0]), "line.layers[2].layer: must be there once"),
        (lambda one: one["layers"][0].update(layer=7), "layers[0].layer: must be a string, got '7'"),
        (lambda one: one["layers"][0]["heads"][1].update(head="a"), "heads[1].head: must be a whole number"),
        (lambda one: one["layers"][0]["heads"][1].update(gain=3), "heads[1].gain: must be an object"),
        (lambda one: one["layers"][0]["heads"][0].update(modes=[]), "modes: must be an object, got a list"),
        (lambda one: first_mode(one)["error"].update(dq="big"), "error.dq: must be a number or null, got '\"big\"'"),
        (lambda one: first_mode(one).update(columns_after_cast=[1e39]), "must be within FP32's range"),
        (lambda one: one["not_measured"].append("x"), "not_measured[1]: must be an object"),
        (lambda one: one.update(layers=[1] * 70000), "must have at most 65536 entries"),
        (
            lambda one: one["layers"][0]["heads"][0].update(modes={str(i): first_mode(one) for i in range(17)}),
            "must have at most 16 members",
        ),
    ],
)
def test_bad_fields_are_named(log: Path, change: Callable[[dict[str, Any]], None], says: str) -> None:
    page = log.parent / "page.html"
    changed(log, change)
    refused("report", log, "--html", page, says="line 2: ")
    refused("report", log, says=says)
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.jsonl"]  # nothing was written


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "{", '{"schema": "dmattn.live/1"', "[]]", "NaN", '"\xff"', "1e999", "[" * 30, "\0" * 100],
    ids=range(10),
)
def test_lines_that_are_no_json(log: Path, text: str) -> None:
    lines = log.read_text().splitlines()
    lines[2] = text
    log.write_bytes(("\n".join(lines) + "\n").encode("latin-1"))
    refused("report", log, says="line 3: is not JSON")


@pytest.mark.parametrize("text", ["[" * 34, "[" * 100_000, '{"a":' * 40 + "1" + "}" * 40], ids=range(3))
def test_lines_that_nest_too_deeply(log: Path, text: str) -> None:
    lines = log.read_text().splitlines()
    lines[2] = text
    log.write_text("\n".join(lines) + "\n")
    refused("report", log, says="line 3: nests too deeply")


def test_a_head_is_there_once(log: Path) -> None:
    changed(log, lambda one: one["layers"][0]["heads"].append(one["layers"][0]["heads"][0]))
    refused("report", log, says="must be there once")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_no_json(log: Path, value: float) -> None:
    refused("report", changed(log, lambda one: first_mode(one)["error"].update(o=value)), says="line 2: is not JSON")


def test_every_cut_of_a_line(log: Path, tmp_path: Path) -> None:
    """A cut that is ended like a line is refused, one without end is left out."""
    content = log.read_bytes()
    second = content.index(b"\n") + 1
    cut = tmp_path / "cut"
    for at in range(second + 1, content.index(b"\n", second), 97):
        cut.write_bytes(content[:at] + b"\n")
        refused("report", cut, says="line 2: is not JSON")
        cut.write_bytes(content[:at])
        assert document("report", cut)["input"]["unfinished"] is True


def test_files_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    unfinished = tmp_path / "unfinished"
    unfinished.write_text('{"schema"')
    refused("report", empty, says="is empty, expected lines of schema dmattn.live/1")
    refused("report", unfinished, says="must hold a whole line")
    refused("report", tmp_path / "none", says="no such file")
    refused("report", tmp_path, says="is a directory")
    refused("report", "/dev/zero", says="not a regular file")
    refused("report", says="FILE is required")
    refused("report", empty, "--device", "cpu", says="--device")


def test_huge_lines_are_refused_before_they_are_held(log: Path) -> None:
    with log.open("r+b") as file:
        file.truncate(1 << 33)  # a hole: 8 GiB of zeros without an end, on no disk
        file.seek(0)
    refused("report", log, says="line 6: must be at most 16777216 bytes long")


def test_layers_times_steps_are_bounded(tmp_path: Path) -> None:
    """A thousand layers of a name of their own in each of fifty steps would be 2,500,000 cells of a mode each."""
    path = tmp_path / "log"
    with path.open("w") as file:
        for step in range(50):
            one = line(step, layers=1)
            heads = one["layers"][0]["heads"][:1]
            one["layers"] = [{"layer": f"{step}.{i}", "heads": heads} for i in range(1000)]
            file.write(json.dumps(one) + "\n")
    refused("report", path, says="layers and modes times steps")


def test_the_page_does_not_replace_the_log(log: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(log)
    content = log.read_bytes()
    refused("report", log, "--html", log, says="names the log")
    refused("report", log, "--html", link, says="names the log")
    refused("report", log, "--html", tmp_path / "none" / "page.html", says="--html: cannot write")
    assert log.read_bytes() == content


def test_the_page_is_complete(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = dmattn("report", log, "--html", page, "--json")
    assert done.returncode == 0 and done.stderr == ""
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "{{" not in text
    for outside in ("src=", "href=", "url(\"", "url('", "url(h", "@import", "fetch("):  # fmt: skip
        assert outside not in text
    begin = text.index('id="report-data">') + len('id="report-data">')
    assert json.loads(text[begin : text.index("</script>", begin)])["document"] == json.loads(done.stdout)


def test_foreign_text_stays_data(tmp_path: Path) -> None:
    one = line(0, layers=1)
    hostile = "</script><script>alert(1)</script><!--{{data}}\x1b[31m"
    one["layers"][0]["layer"] = one["not_measured"][0]["reason"] = hostile
    one["layers"][0]["heads"][0]["modes"] = {hostile: one["layers"][0]["heads"][0]["modes"]["matched"]}
    path, page = tmp_path / "log", tmp_path / "page.html"
    path.write_text(json.dumps(one) + "\n")
    done = dmattn("report", path, "--html", page)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert "<script>alert" not in page.read_text() and "<!--{" not in page.read_text()
