"""A training on two processes (FSDP2 over Gloo): resumed bit for bit, close to one process, and loadable by one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from train import distributed, loop

from ranks import Ranks, words
from train_runs import (
    command,
    environment,
    last_state,
    log_lines,
    one_line,
    prepared,
    same_bits,
    same_end,
    torch_as_it_was,
    trained,
    written,
)

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    with torch_as_it_was():
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as both:
        yield both


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("tokens"), "characters")


@pytest.fixture
def toml(tmp_path: Path, tokens: Path) -> Path:
    return written(tmp_path, tokens)


def joined() -> None:
    """What torchrun sets, for a process group that is there already."""
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())


def both_train(toml: Path, out: Path, sets: tuple[str, ...], resumed: bool = False, stop: int = 0) -> dict[str, Any]:
    """In every rank: train, or end without a word after ``stop`` steps."""
    joined()
    own, done = loop.update, [0]

    def update(run: Any) -> dict[str, float]:
        if stop and done[0] == stop:
            raise KeyboardInterrupt
        done[0] += 1
        return own(run)

    loop.update = update
    try:
        return trained(toml, out, *sets, resumed=resumed)
    except KeyboardInterrupt:
        return {}
    finally:
        loop.update = own


def refusals(toml: Path, out: Path, many: list[tuple[str, ...]]) -> list[str]:
    joined()
    return words([lambda sets=sets: trained(toml, out, *sets) for sets in many])


OPTIMISERS = ["adamw", "muon"]


@pytest.mark.parametrize("name", OPTIMISERS)
def test_two_ranks(toml: Path, tmp_path: Path, ranks: Ranks, name: str) -> None:
    sets = (f"optim.name={name}", "attention.mode=matched")
    whole = ranks.run(both_train, toml, tmp_path / "whole", sets)
    assert whole[0] == whole[1] and whole[0]["step"] == 6
    # Resumed: the same bits.
    often = (*sets, "train.checkpoint_every=2")
    assert ranks.run(both_train, toml, tmp_path / "parts", often, False, 3) == [{}, {}]
    assert last_state(tmp_path / "parts").meta["step"] == 2
    ranks.run(both_train, toml, tmp_path / "parts", often, True)
    same_end(tmp_path / "whole", tmp_path / "parts")
    # One process trains the same but for the order of sums, on the same text.
    trained(toml, tmp_path / "one", *sets)
    for kind in ("step", "validation"):
        losses = [[line["loss"] for line in log_lines(tmp_path / out, kind)] for out in ("one", "whole")]
        assert losses[0] == pytest.approx(losses[1], rel=2e-3), kind
    assert log_lines(tmp_path / "whole", "step")[0]["loss"] == pytest.approx(losses_of(tmp_path / "one")[0], rel=1e-6)
    # FP32 sums in another order; Muon's iteration turns what they do to a gradient's small singular values, on some
    # processors in BF16, into steps of full size (up to 0.09 seen).
    most = {"adamw": 1e-5, "muon": 0.2}[name]
    for key, weight in last_state(tmp_path / "one").model.items():
        difference = last_state(tmp_path / "whole").model[key] - weight
        assert difference.norm() <= most * weight.norm(), key


def losses_of(out: Path) -> list[float]:
    return [line["loss"] for line in log_lines(out, "step")]


def test_a_checkpoint_of_two_ranks_in_one_process(toml: Path, tmp_path: Path, ranks: Ranks, capsys: Any) -> None:
    often = ("train.checkpoint_every=2", "train.micro_batches=2")
    ranks.run(both_train, toml, tmp_path / "two", often, False, 5)
    # As weights to start from, with moments.
    stage = (f"train.start={tmp_path / 'two'}", "train.start_optimiser=true", "train.steps=1")
    trained(toml, tmp_path / "stage", *stage)
    assert {int(own["step"]) for own in last_state(tmp_path / "stage").optimizers[0]["state"].values()} == {5}
    # Going on in one process: the same training but for rounding, and said so.
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    sets = tuple(part for text in often for part in ("--set", text))
    assert command("run", toml, "--out", tmp_path / "one", "--quiet", "--resume", *sets) == 0
    said = capsys.readouterr().err.strip()
    assert said.startswith("warning: ") and "2 ranks" in said and len(said.splitlines()) == 1
    ranks.run(both_train, toml, tmp_path / "two", often, True)
    assert losses_of(tmp_path / "one")[:4] == losses_of(tmp_path / "two")[:4]
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), rel=1e-4)
    # And back: one process's checkpoint on two.
    for name in OPTIMISERS:
        single, back, alone = (tmp_path / f"{name}-{part}" for part in ("single", "back", "alone"))
        trained(toml, single, "train.steps=4", f"optim.name={name}")
        started = (f"train.start={single}", "train.start_optimiser=true", "train.steps=3", f"optim.name={name}")
        ranks.run(both_train, toml, back, started)
        trained(toml, alone, *started)
        assert losses_of(back) == pytest.approx(losses_of(alone), rel=1e-4), name
        trained(toml, tmp_path / f"{name}-forgot", *started, "train.start_optimiser=false")
        assert losses_of(back) != pytest.approx(losses_of(tmp_path / f"{name}-forgot"), rel=1e-4), name


def test_both_ranks_refuse(toml: Path, tmp_path: Path, ranks: Ranks) -> None:
    """A batch that the ranks cannot share evenly would be trained on in part, or weighed wrongly."""
    many = [("train.batch=3",), ("train.micro_batches=4",), ("data.path=/nowhere",)]
    for said in ranks.run(refusals, toml, tmp_path / "a", many):
        assert said == [
            "ValueError: train.batch: expected a multiple of 2 ranks of 1 micro-batches, got 3",
            "ValueError: train.batch: expected a multiple of 2 ranks of 4 micro-batches, got 4",
            said[2],
        ]
        assert said[2].startswith("ValueError: data.path: /nowhere: ")
    assert not (tmp_path / "a").exists()


def nan_in_both(toml: Path, out: Path) -> list[str]:
    """One rank's loss is no number: both stop at the same step."""
    joined()
    own = loop.cross_entropy
    if torch.distributed.get_rank() == 1:
        loop.cross_entropy = lambda *arguments: own(*arguments) * float("nan")
    try:
        return words([lambda: trained(toml, out)])
    finally:
        loop.cross_entropy = own


def test_one_rank_is_not_finite(toml: Path, tmp_path: Path, ranks: Ranks) -> None:
    said = ranks.run(nan_in_both, toml, tmp_path / "a")
    assert said[0] == said[1] and "loss of step 0 is not finite" in said[0][0]
    state = last_state(tmp_path / "a")
    assert state.meta["step"] == 0 and all(weight.isfinite().all() for weight in state.model.values())


def test_torchrun(toml: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The command as a user gives it, and twice: the second is refused by rank 0 alone, and all end."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no Gloo")
    call = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "train",
        "run",
    ]
    call += [str(toml), "--out", str(tmp_path / "a"), "--quiet", "--device", "cpu"]
    ended = subprocess.run(call, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("validation ") == 1 and "destroy_process_group" not in ended.stderr
    ranks.run(both_train, toml, tmp_path / "b", ())
    same_bits(last_state(tmp_path / "a").model, last_state(tmp_path / "b").model)
    ended = subprocess.run(call, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0 and f"error: --out: {tmp_path / 'a'} holds a run" in ended.stderr
    assert last_state(tmp_path / "a").meta["step"] == 6


# The command's end, told by what Python calls when it is taken down; what was said before waits in a buffer.
ENDS = """
import atexit, runpy, sys
atexit.register(print, "taken down")
print("said")
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("count", [1, 2])
def test_one_of_several_is_not_taken_down(tmp_path: Path, count: int) -> None:
    """Gloo's threads may hold tensors to the end, and Python aborts a thread that lets go of one in its own end."""
    call = [sys.executable, "-c", ENDS, "run", str(tmp_path / "none.toml"), "--out", str(tmp_path / "a")]
    where = {**environment(), "WORLD_SIZE": str(count), "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(call, env=where, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    one_line(ended.stderr, "none.toml")
    assert ended.stdout == ("said\ntaken down\n" if count == 1 else "said\n")


@pytest.mark.parametrize("count", ["many", "", "-2"])
def test_a_world_that_is_none(toml: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, count: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", count)
    assert command("run", toml, "--out", tmp_path / "a") == 2
    one_line(capsys.readouterr().err, "WORLD_SIZE", repr(count))


def test_alone(monkeypatch: Any) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = distributed.start("cpu")
    assert alone == distributed.Ranks() and alone.mean(torch.tensor(2.0)) == 2.0
    alone.wait()
    distributed.stop()
