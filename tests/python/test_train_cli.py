"""The command line: what it says of itself, and one line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train import cli, loop
from train.cli import main

from train_runs import command, environment, last_state, one_line, prepared, process, torch_as_it_was, written

COMMANDS = ("run", "compare", "corpus", "prepare", "recall", "bias", "import", "export", "report")


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    with torch_as_it_was():
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("tokens"), "characters")


def test_help_names_every_command_and_has_examples(capsys: Any) -> None:
    assert command("--help") == 0
    said = capsys.readouterr().out
    assert all(f"    {name}" in said for name in COMMANDS)
    examples = said[said.index("examples:") :]
    assert examples.count("python -m train") >= 5 and "torchrun" in examples


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name: str, capsys: Any) -> None:
    assert command(name, "--help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m train {name} ")
    assert f"  python -m train {name} " in said[said.index("examples:") :]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ("COMMAND", "--help")),
        (("fly",), ("'fly'", "run", "compare")),
        (("--fly",), ("--help",)),
        (("run",), ("config", "--out")),
        (("run", "a.toml"), ("--out",)),
        (("run", "a.toml", "--out", "x", "--resume", "--again"), ("--again", "--resume")),
        (("run", "a.toml", "--out", "x", "--fast"), ("--fast",)),
        (("run", "none.toml", "--out", "x"), ("none.toml", "No such file")),
        (("compare", "none.toml", "--out", "x"), ("none.toml", "No such file")),
        (("compare", "none.toml", "--out", "x", "--jobs", "many"), ("--jobs", "'many'")),
        (("prepare", "none.txt", "--out", "x", "--tokens", "bytes"), ("none.txt",)),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, tuple) else None,
)
def test_mistakes(
    words: tuple[str, ...], names: tuple[str, ...], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*words) == 2
    said = capsys.readouterr()
    one_line(said.err, *names)
    assert not said.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", COMMANDS[2:])
def test_mistakes_of_the_others_are_no_tracebacks(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(name, "--fly") == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and "error: " in said.splitlines()[-1]


def test_a_process_of_its_own(tmp_path: Path, tokens: Path) -> None:
    ended = process()
    assert ended.returncode == 2 and not ended.stdout
    one_line(ended.stderr, "COMMAND")
    toml = written(tmp_path, tokens)
    ended = process("run", toml, "--out", tmp_path / "a", "--device", "cpu", "--quiet")
    assert ended.returncode == 0 and not ended.stderr, ended.stderr
    loss = json.loads((tmp_path / "a" / "result.json").read_text(encoding="utf-8"))["validation"]
    assert ended.stdout == f"validation {loss:.4f} nats a token after 6 steps; {tmp_path / 'a' / 'result.json'}\n"


def test_stopped_from_the_keyboard(tmp_path: Path, tokens: Path) -> None:
    toml, out = written(tmp_path, tokens), tmp_path / "a"
    words = ["run", str(toml), "--out", str(out), "--device", "cpu", "--quiet"]
    words += ["--set", "train.steps=1000000", "--set", "train.checkpoint_every=3"]
    # What a shell starts in the background ignores the signal, and so would all that it starts in turn.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    begin = [sys.executable, "-c", listen + "import sys; from train.cli import main; sys.exit(main())", *words]
    with subprocess.Popen(begin, env=environment(), stderr=subprocess.PIPE, text=True) as running:
        try:
            until = time.monotonic() + 120
            while not list(out.glob("checkpoints/step-*")) and running.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            said = running.communicate(timeout=120)[1]
        finally:
            running.kill()  # one that did not stop would train for hours
    assert running.returncode == 130 and said.splitlines() == ["stopped; --resume goes on from the last checkpoint"], (
        said
    )
    assert last_state(out).meta["step"] % 3 == 0
    assert not [path for path in out.rglob(".*")]


def test_a_progress_bar_without_a_terminal(tmp_path: Path, tokens: Path, capsys: Any) -> None:
    toml = written(tmp_path, tokens)
    assert command("run", toml, "--out", tmp_path / "a", "--set", "train.steps=2") == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.out.startswith("validation ")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", ""])
def test_a_device_that_is_none(tmp_path: Path, tokens: Path, device: str, capsys: Any) -> None:
    toml = written(tmp_path, tokens)
    assert command("run", toml, "--out", tmp_path / "a", "--device", device) == 2
    one_line(capsys.readouterr().err, "--device", "auto, cpu or cuda", repr(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, cuda is a device")
def test_a_gpu_that_is_not_there(tmp_path: Path, tokens: Path, capsys: Any) -> None:
    toml = written(tmp_path, tokens)
    assert command("run", toml, "--out", tmp_path / "a", "--device", "cuda") == 2
    one_line(capsys.readouterr().err, "--device", "no GPU")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the next test does without")
def test_a_folder_that_cannot_be_written(tmp_path: Path, tokens: Path, capsys: Any) -> None:
    toml = written(tmp_path, tokens)
    (tmp_path / "locked").mkdir(mode=0o500)
    assert command("run", toml, "--out", tmp_path / "locked" / "a") == 2
    one_line(capsys.readouterr().err, "locked")


def test_a_folder_that_is_a_file(tmp_path: Path, tokens: Path, capsys: Any) -> None:
    toml = written(tmp_path, tokens)
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert command("run", toml, "--out", tmp_path / "file") == 2
    one_line(capsys.readouterr().err, "file")
    assert command("run", toml, "--out", tmp_path / "file" / "a") == 2
    one_line(capsys.readouterr().err, "file")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_log_that_is_none(tmp_path: Path, tokens: Path, capsys: Any) -> None:
    """Somebody's file of that name is not written over."""
    toml = written(tmp_path, tokens)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "log.jsonl").write_text("mine\n", encoding="utf-8")
    assert command("run", toml, "--out", tmp_path / "a") == 2
    one_line(capsys.readouterr().err, "log.jsonl")
    assert (tmp_path / "a" / "log.jsonl").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (ValueError("two\nlines"), 2, "error: two lines"),
        (RuntimeError(""), 2, "error: RuntimeError"),
        (MemoryError(), 2, "error: MemoryError"),
        (OSError(28, "No space left on device", "/a"), 2, "error: No space left on device: /a"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (ModuleNotFoundError("No module named 'fla'"), 2, "error: No module named 'fla'"),
        (KeyboardInterrupt(), 130, "stopped; --resume goes on from the last checkpoint"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_is_raised_is_one_line(
    tmp_path: Path, tokens: Path, monkeypatch: Any, capsys: Any, raised: BaseException, status: int, line: str
) -> None:
    def train(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(loop, "train", train)
    assert main(["run", str(written(tmp_path, tokens)), "--out", str(tmp_path / "a")]) == status
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("compare", "stopped; the same command goes on, runs that are done are not repeated"),
        ("prepare", "stopped"),
    ],
)
def test_what_ctrl_c_leaves_is_said(monkeypatch: Any, capsys: Any, command: str, line: str) -> None:
    def stop(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "command_compare", stop)
    monkeypatch.setattr(cli, "module_main", lambda _: stop)
    given = ["compare", "a.toml", "--out", "b"] if command == "compare" else ["prepare"]
    assert cli.main(given) == 130
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_fault_of_the_program_is_a_traceback(tmp_path: Path, tokens: Path, monkeypatch: Any) -> None:
    """What no user can mend must not look like their mistake."""

    def train(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(AssertionError):
        cli.main(["run", str(written(tmp_path, tokens)), "--out", str(tmp_path / "a")])
