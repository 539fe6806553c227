"""Several trainings side by side: which they are, that none is done twice, and the table of what came out."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from train import checkpoint, compare, config
from train.compare import Cell, cells, parsed_grid
from train.outcome import markdown, outcome, probed, thinned

from train_runs import (
    command,
    environment,
    last_state,
    one_line,
    prepared,
    same_bits,
    same_end,
    stopped_after,
    torch_as_it_was,
    trained,
    written,
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("tokens"), "characters")


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    with torch_as_it_was():
        torch.set_num_threads(1)
        yield


# ---- Which runs -----------------------------------------------------------------------------------------------------


def test_exact_is_run_once() -> None:
    grid = ("attention.centre=none,k", "optim.lr=1e-3,1e-2")
    found = cells(["exact", "reference", "stale"], [0, 1], grid, ["train.steps=3"])
    by_mode = {mode: [cell for cell in found if cell.labels[0] == ("mode", mode)] for mode in ("exact", "stale")}
    assert len(by_mode["exact"]) == 2 * 2 and len(by_mode["stale"]) == 2 * 2 * 2 and len(found) == 16
    assert [dict(cell.labels) for cell in by_mode["exact"][::2]] == [
        {"mode": "exact", "optim.lr": "1e-3"}, {"mode": "exact", "optim.lr": "1e-2"},
    ]  # fmt: skip
    last = by_mode["stale"][-1]
    assert last.name == "stale-centre_k-lr_1e-2-seed_1" and last.seed == 1
    assert last.overrides == (
        "train.steps=3", 'attention.mode="stale"', "attention.centre=k", "optim.lr=1e-2", "train.seed=1",
    )  # fmt: skip
    assert cells(["exact", "exact"], [0, 0], (), ()) == [
        Cell("exact-seed_0", (("mode", "exact"),), 0, ('attention.mode="exact"', "train.seed=0"))
    ]


_VALUES = st.text(st.characters(exclude_characters=",", exclude_categories=("Cs",)), min_size=1).filter(str.strip)


@given(st.lists(_VALUES, min_size=1, max_size=4))
def test_folders_are_inside_and_of_one_run_each(values: list[str]) -> None:
    found = cells(["stale", "exact"], [0, 1], ["data.path=" + ",".join(values)], ())
    distinct = {value.strip() for value in values}
    assert len(found) == len({cell.name for cell in found}) == 4 * len(distinct)
    for cell in found:
        assert Path(cell.name).name == cell.name and cell.name.isascii() and len(cell.name) < 200
    assert found == cells(["stale", "exact"], [0, 1], ["data.path=" + ",".join(values)], ())


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        (("optim.lr",), ("--grid optim.lr", "TABLE.KEY=VALUE")),
        (("lr=1",), ("--grid lr=1",)),
        ((".lr=1",), ("--grid .lr=1",)),
        (("optim.=1",), ("--grid optim.=1",)),
        (("optim.lr=",), ("--grid optim.lr=",)),
        (("optim.lr=1,,2",), ("--grid optim.lr=1,,2",)),
        (("optim.lr=1", "optim.lr=2"), ("optim.lr is in the grid already",)),
        (("train.seed=1,2",), ("--seeds",)),
        (("attention.mode=stale",), ("--modes",)),
    ],
)
def test_a_grid_that_is_none(grid: tuple[str, ...], names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        parsed_grid(grid)
    assert all(name in str(caught.value) for name in names) and "\n" not in str(caught.value)


def test_refused_before_the_first_runs(tmp_path: Path, tokens: Path, capsys: Any) -> None:
    toml, out = written(tmp_path, tokens), tmp_path / "out"
    for more, names in (
        (("--modes", "exact", "sideways"), ("attention.mode", "'sideways'")),
        (("--grid", "optim.speed=1"), ("optim.speed",)),
        (("--grid", "optim.lr=fast"), ("optim.lr", "'fast'")),
        (("--set", "attention.mode=stale"), ("--set", "--modes")),
        (("--set", "train.seed=4"), ("--set", "--seeds")),
        (("--seeds", "-1"), ("train.seed", "-1")),
        (("--seeds", "one"), ("--seeds", "'one'")),
        (("--jobs", "0"), ("--jobs", "0")),
        (("--threads", "-3"), ("--threads", "-3")),
    ):
        assert command("compare", toml, "--out", out, *more) == 2
        one_line(capsys.readouterr().err, *names)
    assert command("compare", tmp_path / "none.toml", "--out", out) == 2
    one_line(capsys.readouterr().err, "none.toml", "No such file")
    assert not out.exists()


# ---- Running them ---------------------------------------------------------------------------------------------------


class Done:
    """Stands for a process; trains in this one, or fails as told."""

    def __init__(self, toml: Path, folder: Path, cell: Cell, fails: bool) -> None:
        self.returncode = 0
        text = "warning: something\nerror: this one was to fail\n" if fails else ""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "output.txt").write_text(text, encoding="utf-8")
        if fails:
            self.returncode = 2
        else:
            trained(toml, folder, *cell.overrides)

    def poll(self) -> int:
        return self.returncode


def test_what_is_done_is_not_repeated_and_what_fails_stops_nothing(
    tmp_path: Path, tokens: Path, monkeypatch: Any, capsys: Any
) -> None:
    toml, out = written(tmp_path, tokens), tmp_path / "out"
    begun: list[str] = []
    failing = {"stale-seed_0"}

    def start(path: Path, folder: Path, cell: Cell, device: str, environment: dict[str, str]) -> Done:
        begun.append(cell.name)
        return Done(path, folder, cell, cell.name in failing)

    monkeypatch.setattr(compare, "start", start)
    words = ("compare", toml, "--out", out, "--seeds", 0, "--modes", "exact", "stale", "matched", "--device", "cpu")
    words = (*words, "--set", "train.steps=2", "--set", "train.probe_every=1")
    assert command(*words) == 1
    said = capsys.readouterr()
    assert "failed: stale-seed_0: error: this one was to fail" in said.err.splitlines()
    assert begun == ["exact-seed_0", "stale-seed_0", "matched-seed_0"]
    document = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert document["failed"] == ["stale-seed_0: error: this one was to fail"] and document["config"] == "tiny.toml"
    assert "| stale | failed | - |" in (out / "compare.md").read_text(encoding="utf-8")
    exact, stale, matched = document["runs"]
    result = json.loads((out / "matched-seed_0" / "result.json").read_text(encoding="utf-8"))
    assert matched["validation"] == result["validation"] and stale["validation"] is None
    assert (out / "compare.md").read_text(encoding="utf-8") == markdown(document)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown(document).splitlines()]
    assert table[0] == ["run", "seed 0", "gap to exact", "residual", "after the cast", "gain"]
    assert table[2][:3] == ["exact", f"{exact['validation']:.4f}", "+0.000"]
    assert table[3][:3] == ["stale", "failed", "-"]
    assert table[4][2] == f"{matched['validation'] - exact['validation']:+.3f}"
    assert float(table[4][3]) == pytest.approx(matched["probe"]["residual"]["matched"], rel=0.05)

    failing.clear()
    assert command(*words) == 0
    assert begun[3:] == ["stale-seed_0"]
    assert command(*words) == 0
    assert begun[4:] == []
    # Of another config, what is done would be another's result.
    capsys.readouterr()
    assert command(*words, "--set", "optim.lr=0.5") == 2
    one_line(capsys.readouterr().err, "exact-seed_0", "optim.lr")
    assert command(*words, "--set", "train.validate_batches=1") == 2
    one_line(capsys.readouterr().err, "train.validate_batches")
    assert begun[4:] == []
    assert command(*words, "--set", "train.keep=7") == 0
    (out / "exact-seed_0" / "result.json").write_text("{", encoding="utf-8")
    capsys.readouterr()
    assert command(*words) == 2
    one_line(capsys.readouterr().err, "result.json", "JSON")


def test_real_processes(tmp_path: Path, tokens: Path, monkeypatch: Any) -> None:
    """One begins anew, one goes on from its checkpoint, one cannot: each as `train run` would say it."""
    toml, out = written(tmp_path, tokens), tmp_path / "out"
    todo = cells(["exact"], [0, 1], (), ()) + cells(["matched"], [0], (), ("attention.numerics=hopper",))
    stopped_after(monkeypatch, toml, out / todo[1].name, 3, *todo[1].overrides, "train.checkpoint_every=2")
    failed = compare.run_all(toml, out, todo, "cpu", 2, 1)
    assert len(failed) == 1 and "model.head_dim: hopper" in failed[0], failed
    trained(toml, tmp_path / "whole", *todo[1].overrides)
    same_end(tmp_path / "whole", out / todo[1].name)
    assert outcome(out / todo[0].name)["step"] == 6


KILLED = """
import sys
from train import compare
own = compare.start
def start(*arguments):
    process = own(*arguments)
    print(process.pid, flush=True)
    return process
compare.start = start
from train.cli import main
main(sys.argv[1:])
"""


def test_a_killed_comparison_leaves_no_process_and_goes_on(tmp_path: Path, tokens: Path) -> None:
    toml, out = written(tmp_path, tokens), tmp_path / "out"
    words = ["compare", str(toml), "--out", str(out), "--modes", "exact", "--seeds", "0", "--device", "cpu"]
    words += ["--set", "train.steps=100000", "--set", "train.checkpoint_every=2"]
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert killed.stdout is not None
    own = int(killed.stdout.readline())
    until = time.monotonic() + 120
    folder = out / "exact-seed_0" / "checkpoints"
    while not (folder.exists() and checkpoint.latest(folder).path) and time.monotonic() < until:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    while Path(f"/proc/{own}").exists() and time.monotonic() < until:
        if Path(f"/proc/{own}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z":
            break  # gone, and nobody has asked for its status
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{own}").exists(), os.kill(own, signal.SIGKILL)
    step = last_state(out / "exact-seed_0").meta["step"]
    assert step >= 2
    with pytest.raises(ValueError, match=r"train\.steps"):
        trained(toml, out / "exact-seed_0", "train.steps=4", 'attention.mode="exact"', resumed=True)


# ---- What came out --------------------------------------------------------------------------------------------------


def test_files_of_a_run_that_cannot_be_read(tmp_path: Path, tokens: Path) -> None:
    toml, whole = written(tmp_path, tokens), tmp_path / "whole"
    trained(toml, whole, "train.probe_every=2", "train.steps=3")
    fine = outcome(whole)
    assert fine["step"] == 3 and "unreadable" not in fine and fine["probe"]["curve"][-1]["step"] == 2
    assert fine["grad_norm_largest"] > 0 and fine["validations"] == [[3, fine["validation"]]]
    for name, content, lost in (
        ("result.json", b'{"schema": "dmattn.train_result/1", "validation"', "validation"),
        ("result.json", b"", "validation"),
        ("result.json", b'{"schema": "dmattn.train_result/1", "validation": NaN}', "validation"),
        ("result.json", b'{"schema": "dmattn.train_result/1", "validation": "low"}', "validation"),
        ("result.json", b"[" * 100000, "validation"),
        ("log.jsonl", b"\xff\xfe\n", "curve"),
        ("log.jsonl", b"", "curve"),
        ("probe.jsonl", b"{}\n", "probe"),
        ("probe.jsonl", b"[1]\n", "probe"),
        ("probe.jsonl", b'{"step": 0, "layers": 3}\n', "probe"),
        ("probe.jsonl", b"[" * 100000 + b"\n", "probe"),
    ):
        before = (whole / name).read_bytes()
        (whole / name).write_bytes(content)
        found = outcome(whole)
        assert found.get(lost) is None, (name, content[:40])
        empty = name == "log.jsonl" and not content
        assert empty or [line.partition(":")[0] for line in found["unreadable"]] == [name], (name, content[:40])
        json.dumps(found, allow_nan=False)
        (whole / name).write_bytes(before)
    # Half a last line is what a killed run leaves.
    for name in ("log.jsonl", "probe.jsonl"):
        with (whole / name).open("ab") as file:
            file.write(b'{"schema": "')
    assert outcome(whole) == fine
    assert outcome(tmp_path / "none") == {"validation": None, "step": None, "stopped": None}


def test_a_run_that_was_stopped(tmp_path: Path, tokens: Path) -> None:
    toml = written(tmp_path, tokens)
    trained(toml, tmp_path / "sound", "train.steps=1")
    state = last_state(tmp_path / "sound")
    state.model["embed.weight"].fill_(float("nan"))
    checkpoint.save(tmp_path / "planted", 1, state)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="not finite"):
        trained(toml, out / "exact-seed_0", f"train.start={tmp_path / 'planted'}", 'attention.mode="exact"')
    document = compare.summary(out, cells(["exact"], [0], (), ()))
    assert "step 0 is not finite" in document["runs"][0]["stopped"]
    assert "| exact | stopped | - |" in markdown(document)


def test_gaps_are_to_exact_at_the_same_point_and_seed() -> None:
    losses = {("exact", "1"): [1.0, 2.0], ("exact", "2"): [3.0, 4.0], ("stale", "1"): [1.5, 2.25]}
    losses["stale", "2"] = [3.125, None]  # type: ignore[list-item]
    runs = [
        {
            "labels": {"mode": mode, **({"attention.centre": "k"} if mode == "stale" else {}), "optim.lr": lr},
            "seed": seed,
            "validation": loss,
        }
        for (mode, lr), both in losses.items()
        for seed, loss in enumerate(both)
    ]
    lines = markdown({"runs": runs}).splitlines()[2:]
    assert [line.split("|")[4].strip() for line in lines] == [
        "+0.000 / +0.000", "+0.000 / +0.000", "+0.500 / +0.250", "+0.125 / -",
    ]  # fmt: skip
    assert lines[3].startswith("| stale, centre k, lr 2 | 3.1250 | - |")


def test_a_grid_over_the_model_has_points_of_its_own() -> None:
    """The label "mode" is no prefix: "model.width" tells points apart."""
    losses = {("exact", "16"): 1.0, ("exact", "32"): 3.0, ("stale", "16"): 1.5, ("stale", "32"): 3.125}
    runs = [
        {"labels": {"mode": mode, "model.width": width}, "seed": 0, "validation": loss}
        for (mode, width), loss in losses.items()
    ]
    lines = markdown({"runs": runs}).splitlines()[2:]
    assert [line.split("|")[3].strip() for line in lines] == ["+0.000", "+0.000", "+0.500", "+0.125"]
    assert lines[3].startswith("| stale, width 32 | 3.1250 |")


def test_what_ended_with_an_error_is_not_what_never_ran() -> None:
    runs = [
        {"name": f"{mode}-seed_0", "labels": {"mode": mode}, "seed": 0, "validation": None, "stopped": stopped}
        for mode, stopped in (("exact", None), ("stale", None), ("matched", "step 3 is not finite"))
    ]
    failed = ["stale-seed_0: error: CUDA out of memory", "matched-seed_0: error: step 3 is not finite"]
    lines = markdown({"runs": runs, "failed": failed}).splitlines()[2:]
    assert [line.split("|")[2].strip() for line in lines] == ["-", "failed", "stopped"]


@given(st.integers(0, 300), st.integers(1, 70))
def test_thinned_curves(count: int, points: int) -> None:
    losses = [(37 * at % 101) / 7 for at in range(count)]
    curve = thinned(losses, points)
    length = max(1, -(-len(losses) // points))
    assert len(curve) <= points and (curve[0][0] == min(length, len(losses)) - 1 if losses else not curve)
    left = len(losses) - 1 - curve[-1][0] if losses else 0
    assert 0 <= left and (2 * left < length or left == 0)
    ends = [-1, *(at for at, _ in curve)]
    for (before, at), (_, mean) in zip(itertools.pairwise(ends), curve, strict=True):
        part = losses[int(before) + 1 : int(at) + 1]
        assert len(part) == length or (at == len(losses) - 1 and (2 * len(part) >= length or len(curve) == 1))
        assert mean == pytest.approx(sum(part) / len(part), abs=1e-9)


def test_a_short_last_stretch_is_left_out() -> None:
    """Its mean over a few steps would stand beside means over many."""
    assert thinned([1.0] * 8 + [9.0], 3) == [[2, 1.0], [5, 1.0], [8, pytest.approx(11 / 3)]]
    assert thinned([1.0] * 8 + [9.0], 2) == [[4, 1.0], [8, 3.0]]
    assert thinned([*[1.0] * 6, 9.0], 2) == [[3, 1.0], [6, pytest.approx(11 / 3)]]
    assert thinned([*[1.0] * 12, 9.0], 4) == [[3, 1.0], [7, 1.0], [11, 1.0]]
    assert thinned([*[1.0] * 12, 9.0, 9.0], 4)[-1] == [13, 9.0]  # half is enough


def test_what_the_probe_saw(tmp_path: Path, tokens: Path) -> None:
    toml = written(tmp_path, tokens)
    sets = ("train.probe_every=1", "train.steps=2", "model.qk_norm=true", 'train.probe_modes=["stale", "matched"]')
    trained(toml, tmp_path / "a", *sets)
    found = probed(tmp_path / "a" / "probe.jsonl")
    assert set(found["residual"]) == {"stale", "matched"} and found["residual"]["matched"] < found["residual"]["stale"]
    assert [point["step"] for point in found["curve"]] == [0, 1]
    assert all(0 < share <= 1 for point in found["curve"] for share in point["gain"].values())
    assert len(found["curve"][0]["gain"]) == 2 and found["curve"][0]["entropy"] > 0


def test_cells_train_what_they_say(tmp_path: Path, tokens: Path) -> None:
    """Seeds begin from other weights; modes of one seed from the same."""
    toml = written(tmp_path, tokens)
    state = {}
    for cell in cells(["exact", "stale"], [0, 1], (), ("train.steps=1", "optim.lr=1e-30", "optim.weight_decay=0")):
        loaded = config.load(toml, cell.overrides)
        assert (loaded.attention.mode, loaded.train.seed) == (dict(cell.labels)["mode"], cell.seed)
        trained(toml, tmp_path / cell.name, *cell.overrides)
        state[cell.name] = last_state(tmp_path / cell.name).model
    same_bits(state["exact-seed_0"], state["stale-seed_0"])
    assert not torch.equal(state["exact-seed_0"]["embed.weight"], state["exact-seed_1"]["embed.weight"])


def test_an_error_of_nearly_nothing_has_an_end(tmp_path: Path) -> None:
    """Relative to an exact dQ that all but vanishes an error has no bound; the document's has."""
    statistic = {"median": 1.0}
    head = {
        "gain": None,
        "entropy": 0.0,
        "modes": {
            mode: {"residual": statistic, "residual_after_cast": statistic, "error": {"dq": dq}}
            for mode, dq in (("stale", 5e118), ("matched", 12.5))
        },
    }
    path = tmp_path / "probe.jsonl"
    path.write_text(json.dumps({"step": 0, "layers": [{"layer": "a", "heads": [head]}]}) + "\n", encoding="utf-8")
    assert probed(path)["dq_error_worst"] == {"stale": 1e6, "matched": 12.5}
