"""A training: what it saves, what it continues, and what it says of that which cannot be."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train import checkpoint, config, loop, run
from train.checkpoint import durable
from train.log import read
from train.text import data

from train_runs import (
    command,
    environment,
    last_state,
    log_lines,
    one_line,
    prepared,
    same_bits,
    same_end,
    stopped_after,
    torch_as_it_was,
    trained,
    written,
)


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    with torch_as_it_was():
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("tokens"), "characters")


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("other"), "bytes")


@pytest.fixture
def toml(tmp_path: Path, tokens: Path) -> Path:
    return written(tmp_path, tokens)


# ---- Bit for bit ----------------------------------------------------------------------------------------------------

SETTINGS = [
    pytest.param((), id="adamw"),
    pytest.param(("optim.name=muon",), id="muon"),
    pytest.param(("train.micro_batches=2", "train.precision=bf16"), id="micro-bf16"),
    pytest.param(("attention.mode=matched", "model.kv_heads=1", "model.qk_norm=true"), id="matched"),
    pytest.param(("attention.mode=stale", "train.probe_every=2", "optim.schedule=wsd"), id="stale-probed"),
    pytest.param(("model.hybrid_every=2", "model.delta_head_dim=16", "optim.name=muon"), id="hybrid"),
]


@pytest.mark.parametrize("sets", SETTINGS)
def test_resumed_is_uninterrupted(toml: Path, tmp_path: Path, monkeypatch: Any, sets: tuple[str, ...]) -> None:
    trained(toml, tmp_path / "whole", *sets)
    # Stopped between checkpoints, twice: steps 2, 3 and 4 are done again.
    stopped_after(monkeypatch, toml, tmp_path / "parts", 3, *sets, "train.checkpoint_every=2")
    stopped_after(monkeypatch, toml, tmp_path / "parts", 3, *sets, "train.checkpoint_every=2", resumed=True)
    assert last_state(tmp_path / "parts").meta["step"] == 4
    trained(toml, tmp_path / "parts", *sets, resumed=True)
    same_end(tmp_path / "whole", tmp_path / "parts")
    assert [line["step"] for line in log_lines(tmp_path / "parts", "step")] == list(range(6))
    assert [line["step"] for line in log_lines(tmp_path / "parts", "run")] == [0, 2, 4]
    if any("probe" in text for text in sets):
        probes = [(tmp_path / out / "probe.jsonl").read_text(encoding="utf-8") for out in ("whole", "parts")]
        measured = [[json.loads(line) for line in text.splitlines()] for text in probes]
        assert [line["step"] for line in measured[1]] == [0, 2, 4]
        for line in (*measured[0], *measured[1]):
            for mode in (
                mode for layer in line["layers"] for head in layer["heads"] for mode in head["modes"].values()
            ):
                del mode["pushed"]  # sums since the probe began
        assert [line["layers"] for line in measured[0]] == [line["layers"] for line in measured[1]]


def test_how_often_it_validates_saves_and_measures_changes_no_bit(toml: Path, tmp_path: Path) -> None:
    trained(toml, tmp_path / "a")
    often = ("train.validate_every=1", "train.checkpoint_every=1", "train.probe_every=1", "train.keep=1")
    trained(toml, tmp_path / "b", *often)
    same_end(tmp_path / "a", tmp_path / "b", "step")
    assert [line["step"] for line in log_lines(tmp_path / "b", "validation")] == [1, 2, 3, 4, 5, 6]
    assert [folder.name for folder in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-00000006"]


def test_those_settings_may_change_at_a_resume(toml: Path, tmp_path: Path, monkeypatch: Any) -> None:
    trained(toml, tmp_path / "whole", "train.validate_every=2")
    stopped_after(monkeypatch, toml, tmp_path / "parts", 5, "train.validate_every=2", "train.checkpoint_every=4")
    trained(
        toml, tmp_path / "parts", "train.validate_every=2", "train.checkpoint_every=1", "train.keep=9", resumed=True
    )
    same_end(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_resumed_is_the_same(toml: Path, tmp_path: Path) -> None:
    first = trained(toml, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert trained(toml, tmp_path / "b", resumed=True) == first
    same_end(tmp_path / "a", tmp_path / "b")


def test_micro_batches_have_the_gradient_of_the_whole(toml: Path, tmp_path: Path) -> None:
    losses = []
    for parts in (1, 2, 4):
        trained(toml, tmp_path / f"{parts}", f"train.micro_batches={parts}", "train.steps=3")
        losses.append([line["loss"] for line in log_lines(tmp_path / f"{parts}", "step", "validation")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_the_seed_of_the_data_is_its_own(toml: Path, tmp_path: Path) -> None:
    first = {}
    for name, sets in (("a", ()), ("b", ("train.seed=1",)), ("c", ("train.seed=1", "train.data_seed=0"))):
        trained(toml, tmp_path / name, *sets, "train.steps=1", "optim.lr=1e-30", "optim.weight_decay=0")
        first[name] = last_state(tmp_path / name).model["embed.weight"], log_lines(tmp_path / name, "step")[0]["loss"]
    assert torch.equal(first["b"][0], first["c"][0]) and not torch.equal(first["a"][0], first["b"][0])
    assert first["b"][1] != first["c"][1]


# ---- A further stage ------------------------------------------------------------------------------------------------


def test_a_longer_context_as_a_stage(toml: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Rope at 64, then at 128 from its weights and moments; interrupted or not, the same bits."""
    sets = ("model.context=64", "train.context=64")
    trained(toml, tmp_path / "short", *sets)
    longer = (
        "model.context=128", "train.context=128", f"train.start={tmp_path / 'short'}", "train.start_optimiser=true",
        "optim.lr=3e-3", "optim.beta2=0.9", "optim.weight_decay=0.5", "train.batch=2", "train.data_seed=7",
    )  # fmt: skip
    trained(toml, tmp_path / "whole", *longer)
    stopped_after(monkeypatch, toml, tmp_path / "parts", 3, *longer, "train.checkpoint_every=2")
    trained(toml, tmp_path / "parts", *longer, resumed=True)
    same_end(tmp_path / "whole", tmp_path / "parts")
    # The moments went on, and the settings are those of the stage.
    optimiser = last_state(tmp_path / "whole").optimizers[0]
    assert {int(own["step"]) for own in optimiser["state"].values()} == {12}
    group = optimiser["param_groups"][0]
    assert group["initial_lr"] == 3e-3 and group["betas"] == (0.9, 0.9) and group["weight_decay"] == 0.5
    # The first step saw the weights that the stage before left.
    begun = config.load(toml, [*longer, "train.start_optimiser=false"])
    start = run.prepare(begun, "cpu", loop.distributed.Ranks())
    same_bits(dict(start.model.state_dict()), last_state(tmp_path / "short").model)
    assert math.isclose(loop.gradient(start).item(), log_lines(tmp_path / "whole", "step")[0]["loss"], rel_tol=1e-6)


def test_a_stage_that_cannot_be(toml: Path, tmp_path: Path, other_tokens: Path, capsys: Any) -> None:
    trained(toml, tmp_path / "a", "model.position=learned", "train.steps=1")
    begin = ("run", toml, "--out", tmp_path / "b", "--quiet", "--set", f"train.start={tmp_path / 'a'}")
    for sets, names in (
        (("model.position=learned", "model.context=64"), ("train.start", "positions.weight", "[64, 16]", "[32, 16]")),
        (("model.position=rope",), ("train.start", "unknown weight positions.weight")),
        (("model.position=learned", "model.tie=true"), ("train.start", "head.weight")),
        (
            ("model.position=learned", f"data.path={other_tokens}"),
            ("train.start", "vocabulary", data.open(other_tokens).tokens.fingerprint[:12]),
        ),
        (
            ("model.position=learned", "train.start_optimiser=true", "optim.name=muon"),
            ("train.start_optimiser", "2 optimisers, got 1"),
        ),
    ):
        assert command(*begin, *(part for text in sets for part in ("--set", text))) == 2
        one_line(capsys.readouterr().err, *names)
        assert not (tmp_path / "b").exists()


# ---- Killed ---------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from train.checkpoint import durable
from train.cli import main
own, count = durable.write, [0]
def write(path, buffers):
    count[0] += 1
    if count[0] == {at}:  # half of a file of the second checkpoint
        def half():
            for buffer in buffers:
                yield buffer[: len(buffer) // 2]
                break
            os.kill(os.getpid(), signal.SIGKILL)
        own(path, half())
    return own(path, buffers)
durable.write = write
main(sys.argv[1:])
"""


@pytest.mark.parametrize("at", [6])
def test_killed_while_saving(toml: Path, tmp_path: Path, at: int) -> None:
    words = ["run", str(toml), "--quiet", "--device", "cpu", "--set", "train.checkpoint_every=2"]
    code = [sys.executable, "-c", KILLED.format(at=at), *words, "--out", str(tmp_path / "killed")]
    ended = subprocess.run(code, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert last_state(tmp_path / "killed").meta["step"] == 2
    assert (tmp_path / "killed" / "checkpoints" / ".saving-step-00000004").exists()
    trained(toml, tmp_path / "killed", resumed=True)
    trained(toml, tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


# ---- A full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_full_disk_at_a_checkpoint(toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, name: str) -> None:
    own = durable.write

    def write(path: Path, buffers: Any) -> str:
        if "step-00000004" in str(path) and path.name == name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return own(path, buffers)

    begin = ("run", toml, "--out", tmp_path / "full", "--quiet", "--set", "train.checkpoint_every=2")
    with monkeypatch.context() as patched:
        patched.setattr(durable, "write", write)
        assert command(*begin) == 2
    one_line(capsys.readouterr().err, "no space left", name, "MB")
    assert last_state(tmp_path / "full").meta["step"] == 2
    assert command(*begin, "--resume") == 0
    trained(toml, tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "full")


def test_a_disk_that_is_full(toml: Path, tmp_path: Path, capsys: Any) -> None:
    """A real one, with room for one and a half checkpoints and the log."""
    trained(toml, tmp_path / "whole")
    needed = sum(path.stat().st_blocks * 512 for path in (tmp_path / "whole").rglob("*"))
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={needed * 3 // 2}", "tmpfs", str(disk)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small disk takes the right to mount one; the test above does without")
    try:
        begin = ("run", toml, "--out", disk / "run", "--quiet", "--set", "train.checkpoint_every=2")
        assert command(*begin) == 2
        one_line(capsys.readouterr().err, "no space left in")
        assert last_state(disk / "run").meta["step"] == 2
        shutil.copytree(disk / "run", tmp_path / "moved")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    trained(toml, tmp_path / "moved", resumed=True)
    same_end(tmp_path / "whole", tmp_path / "moved")


def test_a_full_disk_at_the_result(toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "full"

    def replace(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        assert command("run", toml, "--out", out, "--quiet") == 2
    one_line(capsys.readouterr().err, "result.json", "No space left")
    assert not (out / "result.json").exists() and last_state(out).meta["step"] == 6
    assert command("run", toml, "--out", out, "--quiet", "--resume") == 0
    assert json.loads((out / "result.json").read_text(encoding="utf-8"))["step"] == 6


# ---- A damaged checkpoint, another vocabulary, another config -------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
def test_a_corrupt_checkpoint(toml: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    trained(toml, tmp_path / "whole", "train.checkpoint_every=2")
    out = tmp_path / "rotten"
    shutil.copytree(tmp_path / "whole", out)
    newest = out / "checkpoints" / "step-00000006" / name
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert command("run", toml, "--out", out, "--quiet", "--resume") == 0  # from step 4
    warning = capsys.readouterr().err.strip()
    assert len(warning.splitlines()) == 1 and warning.startswith("warning: ") and name in warning
    same_end(tmp_path / "whole", out)
    for path in (out / "checkpoints").glob(f"*/{name}"):
        path.write_bytes(b"")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert command("run", toml, "--out", out, "--quiet", "--resume") == 2
    one_line(capsys.readouterr().err, "no intact checkpoint", name, "--again")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_another_vocabulary_or_text_at_a_resume(
    toml: Path, tmp_path: Path, tokens: Path, other_tokens: Path, capsys: Any
) -> None:
    trained(toml, tmp_path / "a", "train.steps=2")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    again = ("run", toml, "--out", tmp_path / "a", "--quiet", "--resume", "--set", "train.steps=2", "--set")
    assert command(*again, f"data.path={other_tokens}") == 2
    names = (data.open(path).tokens.fingerprint[:12] for path in (tokens, other_tokens))
    one_line(capsys.readouterr().err, "data.path", "vocabulary", *names)
    # The same characters in another order of the text.
    assert command(*again, f"data.path={prepared(tmp_path / 'text', 'characters', seed=1)}") == 2
    one_line(capsys.readouterr().err, "data.path", "was trained on", data.open(tokens).fingerprint[:12])
    for text, name in (("optim.lr=0.5", "optim.lr"), ("train.steps=9", "train.steps"), ("model.tie=true", "model.tie")):
        assert command(*again, text) == 2
        one_line(capsys.readouterr().err, "--resume", name)
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    moved = tmp_path / "elsewhere"
    shutil.copytree(tokens, moved)
    assert command(*again, f"data.path={moved}") == 0


def test_a_folder_that_holds_a_run(toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "a"
    begin = ("run", toml, "--out", out, "--quiet", "--set", "train.steps=2")
    assert command(*begin, "--resume") == 2
    one_line(capsys.readouterr().err, "no intact checkpoint")
    assert not out.exists()
    assert command(*begin) == 0
    before = (out / "log.jsonl").read_bytes()
    capsys.readouterr()
    assert command(*begin) == 2
    one_line(capsys.readouterr().err, "--out", "--resume", "--again")
    # What cannot begin drops nothing.
    assert command(*begin, "--again", "--set", "data.path=/nowhere") == 2
    one_line(capsys.readouterr().err, "data.path", "/nowhere")
    assert (out / "log.jsonl").read_bytes() == before and last_state(out).meta["step"] == 2
    assert command(*begin, "--again", "--set", "train.seed=3") == 0
    assert last_state(out).meta["config"]["train"]["seed"] == 3
    assert [line["kind"] for line in read(out / "log.jsonl")] == ["run", "step", "step", "validation"]
    # One that was refused in its first step holds nothing.
    refused = ("run", toml, "--out", tmp_path / "b", "--quiet", "--set", "attention.mode=matched")
    assert command(*refused, "--set", "attention.numerics=hopper") == 2
    one_line(capsys.readouterr().err, "head_dim")
    assert command(*refused, "--set", "train.steps=1") == 0
    assert len(log_lines(tmp_path / "b", "run")) == 1


def test_two_processes_in_one_folder(toml: Path, tmp_path: Path, capsys: Any) -> None:
    trained(toml, tmp_path / "a", "train.steps=2")
    begin = ("run", toml, "--out", tmp_path / "a", "--quiet", "--set", "train.steps=2")
    with loop.TrainLog(tmp_path / "a" / "log.jsonl", step=2):
        for how in ("--again", "--resume"):
            assert command(*begin, how) == 2
            one_line(capsys.readouterr().err, "another process", str(tmp_path / "a"))
    assert last_state(tmp_path / "a").meta["step"] == 2


# ---- Not finite -----------------------------------------------------------------------------------------------------


def planted(toml: Path, tmp_path: Path, value: float = math.nan) -> Path:
    """A checkpoint of one step, one of whose weights is no number."""
    trained(toml, tmp_path / "sound", "train.steps=1")
    state = last_state(tmp_path / "sound")
    state.model["layers.1.mlp.up.weight"][0, 0] = value
    checkpoint.save(tmp_path / "planted", 1, state)
    return tmp_path / "planted"


def test_a_loss_that_is_not_finite(toml: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "a"
    start = planted(toml, tmp_path)
    begin = ("run", toml, "--out", out, "--quiet", "--set", f"train.start={start}")
    assert command(*begin) == 2
    one_line(capsys.readouterr().err, "loss of step 0 is not finite", "not saved")
    # Weights that are not finite themselves take no good checkpoint's place.
    assert not list(out.glob("checkpoints/*")) and not (out / "result.json").exists()
    assert [line["kind"] for line in read(out / "log.jsonl")] == ["run", "event"]


def test_the_weights_before_a_step_that_is_not_finite(
    toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """In the fourth step one gradient is infinite: three steps are kept, and a resume without it ends as ever."""
    own = loop.gradient

    def gradient(run: Any) -> torch.Tensor:
        loss = own(run)
        if run.step == 3:
            run.plain.embed.weight.grad[0, 0] = math.inf
        return loss

    begin = ("run", toml, "--out", tmp_path / "a", "--quiet")
    with monkeypatch.context() as patched:
        patched.setattr(loop, "gradient", gradient)
        assert command(*begin) == 2
    one_line(capsys.readouterr().err, "norm of the gradient of step 3 is not finite")
    assert last_state(tmp_path / "a").meta["step"] == 3
    assert [line["step"] for line in log_lines(tmp_path / "a", "step")] == [0, 1, 2]
    assert command(*begin, "--resume") == 0
    trained(toml, tmp_path / "whole")
    same_end(tmp_path / "whole", tmp_path / "a")


def test_a_rate_that_is_far_too_high(toml: Path, tmp_path: Path, capsys: Any) -> None:
    begin = ("run", toml, "--out", tmp_path / "a", "--quiet", "--set", "optim.lr=1e6", "--set", "optim.warmup=0")
    assert command(*begin) == 2
    one_line(capsys.readouterr().err, "is not finite")
    weights = last_state(tmp_path / "a").model
    assert log_lines(tmp_path / "a", "event")[0]["event"] == "nonfinite"
    assert set(weights) == set(last_state(tmp_path / "a").model)


def test_a_validation_that_is_not_finite(toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The last step's weights have not been through a loss: their validation is the first to see them."""
    monkeypatch.setattr(loop, "validate", lambda run: math.nan)
    assert command("run", toml, "--out", tmp_path / "a", "--quiet", "--set", "train.steps=2") == 2
    one_line(capsys.readouterr().err, "validation loss after step 1 is not finite")
    document = json.loads((tmp_path / "a" / "result.json").read_text(encoding="utf-8"))
    assert document["validation"] is None and last_state(tmp_path / "a").meta["step"] == 2


def test_not_finite_on_a_full_disk(toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def write(path: Path, buffers: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    own = loop.gradient

    def gradient(run: Any) -> torch.Tensor:
        loss = own(run)
        run.plain.embed.weight.grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(loop, "gradient", gradient)
    monkeypatch.setattr(durable, "write", write)
    assert command("run", toml, "--out", tmp_path / "a", "--quiet") == 2
    one_line(capsys.readouterr().err, "is not finite", "no space left")


# ---- Asked for too much ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        (("data.path=",), ("data.path", "got none")),
        (("data.path=/nowhere",), ("data.path", "/nowhere")),
        (("model.context=100000", "train.context=99999"), ("data.path", "context", "99999")),
        (("train.validate_batches=1000000",), ("data.path", "batches", "1000000")),
        (("train.start=/nowhere",), ("/nowhere",)),
    ],
)
def test_before_the_first_step(
    toml: Path, tmp_path: Path, capsys: Any, sets: tuple[str, ...], names: tuple[str, ...]
) -> None:
    parts = [part for text in sets for part in ("--set", text)]
    assert command("run", toml, "--out", tmp_path / "a", "--quiet", *parts) == 2
    one_line(capsys.readouterr().err, *names)
    assert not (tmp_path / "a").exists()


def test_a_probe_log_that_is_none(toml: Path, tmp_path: Path, capsys: Any) -> None:
    trained(toml, tmp_path / "a", "train.probe_every=2", "train.steps=2")
    (tmp_path / "a" / "probe.jsonl").write_text("[]\n", encoding="utf-8")
    sets = ("--set", "train.probe_every=2", "--set", "train.steps=2")
    assert command("run", toml, "--out", tmp_path / "a", "--quiet", "--resume", *sets) == 2
    one_line(capsys.readouterr().err, "probe.jsonl", "line 1")
