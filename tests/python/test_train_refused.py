"""What a wrong call leaves behind: one line, and nothing written."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from train import compare as comparing
from train.cli import main
from train.config import from_document, load
from train.outcome import markdown
from train.text.data import prepare

CONFIG = """
[model]
width = 16
layers = 1
heads = 2
context = 16
[data]
path = "{data}"
[train]
steps = 2
batch = 2
context = 16
validate_batches = 1
"""


def texts(folder: Path, word: str) -> Path:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"{word} {number} " * 200, encoding="utf-8")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    prepare([texts(tmp_path / "texts", "free")], tmp_path / "data", "bytes")
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(data=tmp_path / "data"), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "command", ["run", "compare", "corpus", "prepare", "recall", "bias", "import", "export", "report"]
)
def test_every_command_says_a_mistake_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--nosuch"])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == ""
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


def test_threads_that_openmp_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.threads: expected 0 to 4096"):
        from_document({"train": {"threads": 2**31 - 1}})


def test_paper_numerics_with_a_centred_q_are_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match=r"attention\.centre: expected none or k in paper numerics, got qk"):
        from_document({"attention": {"mode": "stale", "numerics": "paper", "centre": "qk"}})


def test_set_takes_one_value_and_no_further_lines(config: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.steps: expected a whole number"):
        load(config, ["train.steps=1\n[evil]\nx=2"])


@pytest.mark.parametrize("lengths", ["[8]", "[16]"])
def test_a_recall_test_that_cannot_be_is_refused_before_the_first_step(
    config: Path, tmp_path: Path, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert (
        main(["run", str(config), "--out", str(out), "--device", "cpu", "--set", f"train.recall_lengths={lengths}"])
        == 2
    )
    assert "train.recall_lengths: lengths: expected at least" in capsys.readouterr().err
    assert not out.exists()


def test_a_comparison_refuses_runs_that_were_trained_on_other_data(config: Path, tmp_path: Path) -> None:
    def compared(folder: Path) -> dict[str, object]:
        return comparing.compare(
            config, tmp_path / "out", modes=["exact"], seeds=[0], overrides=[f'data.path="{folder}"'], device="cpu"
        )

    prepare([texts(tmp_path / "others", "work")], tmp_path / "other", "bytes")
    assert compared(tmp_path / "data")["failed"] == []
    with pytest.raises(ValueError, match=r"result\.json is of other data than data\.path"):
        compared(tmp_path / "other")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert compared(tmp_path / "moved")["failed"] == []
    assert compared(tmp_path / "gone")["failed"] == []  # all are done: a table needs no data


def test_a_second_comparison_in_a_folder_is_refused(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(RuntimeError, match="--out: another comparison is running in"):
            comparing.compare(config, out, modes=["exact"], seeds=[0], device="cpu")
    finally:
        os.close(handle)
    assert not any(out.iterdir())


def test_a_comparison_refuses_a_device_before_it_writes(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--device: expected auto, cpu or cuda"):
        comparing.compare(config, tmp_path / "out", modes=["exact"], seeds=[0], device="banana")
    assert not (tmp_path / "out").exists()


def test_a_missing_run_keeps_its_place_among_the_gaps() -> None:
    def run(mode: str, seed: int, loss: float | None) -> dict[str, object]:
        return {"name": f"{mode}-{seed}", "labels": {"mode": mode}, "seed": seed, "validation": loss}

    document = {"runs": [run("exact", 0, 1.0), run("exact", 1, 1.0), run("stale", 0, None), run("stale", 1, 1.5)]}
    assert "| - / +0.500 |" in markdown(document)


def test_recall_names_its_device(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(config.parent / "data")
    assert main(["recall", "nothere", "--data", data, "--copying", "8", "--device", "banana"]) == 2
    assert capsys.readouterr().err == "error: --device: expected auto, cpu or cuda, got 'banana'\n"


@pytest.mark.parametrize("threads", ["-3", "100000"])
def test_bias_refuses_threads(config: Path, threads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "bias.json"
    data = str(config.parent / "data")
    assert main(["bias", "nothere", "--data", data, "--out", str(out), "--threads", threads]) == 2
    assert "--threads: expected 0 to 4096" in capsys.readouterr().err
    assert not out.parent.exists()


def test_a_page_that_cannot_be_written_names_its_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    document = tmp_path / "compare.json"
    run = {"name": "exact", "labels": {"mode": "exact"}, "seed": 0, "validation": 1.0, "step": 1, "stopped": None}
    document.write_text(json.dumps({"schema": "dmattn.compare/1", "torch": "", "runs": [run]}), encoding="utf-8")
    assert main(["report", str(document), "--out", str(tmp_path / "file" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("error: --out: ")


def test_what_only_the_first_step_would_refuse() -> None:
    for document, name in (
        ({"model": {"head_dim": 16}, "attention": {"mode": "stale"}}, "model.head_dim"),
        ({"attention": {"mode": "stale", "simulated": True}, "train": {"probe_every": 5}}, "train.probe_every"),
        ({"model": {"norm_eps": 1e300}}, "model.norm_eps"),
        ({"model": {"rope_theta": 1e308}}, "model.rope_theta"),
        ({"model": {"init_std": 1e40}}, "model.init_std"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: "):
            from_document(document)
    from_document({"model": {"head_dim": 16}, "attention": {"mode": "stale", "numerics": "paper"}})
    from_document({"model": {"head_dim": 16}, "attention": {"simulated": True}, "train": {"probe_every": 5}})
