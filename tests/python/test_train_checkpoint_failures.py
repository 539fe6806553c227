"""Checkpoints of train/ when something fails: damage, hostile files, kills, full disks, two savers."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from train import checkpoint
from train.checkpoint import State, store, tensor_files

from train_checkpoints import FILES, contents, one_line, small, trained

# ---- corruption ----------------------------------------------------------------------------------------------------


def damage_flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def damage_unlink_and(what: str) -> Any:
    def damage(path: Path) -> None:
        path.unlink()
        os.mkfifo(path) if what == "pipe" else path.mkdir()

    return damage


DAMAGE = {
    "flip of the last byte": (damage_flip, "damaged"),
    "flip of the first byte": (lambda path: damage_flip(path, 0), "damaged"),
    "truncation": (lambda path: os.truncate(path, path.stat().st_size - 1), r"expected \d+ bytes|json: damaged"),
    "empty": (lambda path: os.truncate(path, 0), r"expected \d+ bytes|json: damaged"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\n"), r"expected \d+ bytes|json: damaged"),
    "missing": (Path.unlink, "is missing"),
    "a pipe": (damage_unlink_and("pipe"), "is not a file"),
    "a folder": (damage_unlink_and("folder"), "is not a file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_skipped(tmp_path, name, kind):
    damage, words = DAMAGE[kind]
    older = checkpoint.save(tmp_path, 10, trained())
    newer = checkpoint.save(tmp_path, 20, trained())
    damage(newer / name)
    with pytest.raises(ValueError, match=words) as error:
        checkpoint.load(newer)
    assert f"{newer / name}: " in one_line(error)
    path, warnings = checkpoint.latest(tmp_path)
    assert path == older
    assert len(warnings) == 1 and str(newer / name) in warnings[0] and "\n" not in warnings[0]


def test_any_flipped_bit_is_seen(tmp_path):
    path = checkpoint.save(tmp_path, 10, small())
    for name in FILES:
        data = (path / name).read_bytes()
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << (at % 8)
            (path / name).write_bytes(flipped)
            assert checkpoint.latest(tmp_path).path is None, (name, at)
        (path / name).write_bytes(data)
    assert checkpoint.latest(tmp_path).path == path


def sealed(path: Path, change: Any) -> None:
    """Replace files by hostile ones whose sizes and sums are right."""
    document = json.loads((path / "state.json").read_text())
    del document["sha256"]
    change(path, document)
    for name, entry in document["files"].items() if isinstance(document.get("files"), dict) else ():
        if (path / name).is_file() and isinstance(entry, dict):
            data = (path / name).read_bytes()
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    document["sha256"] = hashlib.sha256(tensor_files.dumps(document).encode()).hexdigest()
    (path / "state.json").write_text(tensor_files.dumps(document) + "\n")


def header(text: str | dict[str, Any], body: bytes = b"", length: int | None = None) -> bytes:
    data = (json.dumps(text) if isinstance(text, dict) else text).encode()
    return (len(data) if length is None else length).to_bytes(8, "little") + data + body


def entry(**change: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **change}}


def tree(value: Any) -> bytes:
    return header({"__metadata__": {"tree": value if isinstance(value, str) else json.dumps(value)}})


HOSTILE = {
    "header longer than the file": ("model", header("{}", length=2**63)),
    "huge header": ("model", header("{}", length=2**64 - 1)),
    "header is no JSON": ("model", header("{nonsense")),
    "deep header": ("model", header("[" * 100_000)),
    "unknown type": ("model", header(entry(dtype="F7"), bytes(4))),
    "huge shape": ("model", header(entry(shape=[2**62, 2**62]), bytes(4))),
    "huge empty shape": ("model", header(entry(shape=[0, 2**63, 2**63], data_offsets=[0, 0]))),
    "negative shape": ("model", header(entry(shape=[-1]), bytes(4))),
    "shape and bytes differ": ("model", header(entry(shape=[2]), bytes(4))),
    "offsets outside": ("model", header(entry(data_offsets=[2**40, 2**40 + 4]), bytes(4))),
    "no tree": ("optimizer", header("{}")),
    "tree is no JSON": ("optimizer", tree("[NaN]")),
    "deep tree": ("optimizer", tree("[" * 100_000)),
    "deep but JSON": ("optimizer", tree("[" * 900 + "]" * 900)),
    "long number": ("optimizer", tree("1" * 10_000)),
    "missing tensor": ("optimizer", tree([{"$tensor": "x"}])),
    "unknown mark": ("optimizer", tree([{"$pickle": "x"}])),
    "dict keys": ("optimizer", tree([{"$dict": [[[1], 2]]}])),
    "state is a list": ("optimizer", tree([{"state": [], "param_groups": []}])),
    "groups without params": ("optimizer", tree([{"state": {}, "param_groups": [{}]}])),
    "generators are a list": ("rng", tree([])),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(tmp_path, kind):
    name, data = HOSTILE[kind]
    path = checkpoint.save(tmp_path, 10, small())
    sealed(path, lambda path, _: (path / f"{name}.safetensors").write_bytes(data))
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert f"{path / name}.safetensors: " in one_line(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, document: document.update(schema="dmattn.checkpoint/2"), "expected schema dmattn.checkpoint/1"),
        (lambda _, document: document.update(files=[]), "files: expected model.safetensors"),
        (lambda _, document: document["files"].pop("rng.safetensors"), "files: expected model.safetensors"),
        (lambda _, document: document["files"].update({"rng.safetensors": 5}), "expected bytes and sha256"),
        (lambda _, document: document.update(meta=None), "meta: expected an object"),
        (lambda _, document: document["meta"].update(step=11), "holds step 11"),
        (lambda path, document: (path / "rng.safetensors").unlink(), "rng.safetensors: is missing"),
    ],
)
def test_hostile_state_is_refused(tmp_path, change, words):
    path = checkpoint.save(tmp_path, 10, small())
    sealed(path, change)
    with pytest.raises(ValueError) as error:
        checkpoint.load(path)
    assert words in one_line(error)
    assert checkpoint.latest(tmp_path).path is None


def test_huge_sizes_are_refused_before_they_are_read(tmp_path):
    path = checkpoint.save(tmp_path, 10, small())

    def grow(path: Path, document: dict[str, Any]) -> None:
        document["files"]["model.safetensors"]["bytes"] = 2**42
        data = path / "model.safetensors"
        os.truncate(data, 2**42)
        data.chmod(0o600)

    document = json.loads((path / "state.json").read_text())
    del document["sha256"]
    grow(path, document)
    document["sha256"] = hashlib.sha256(tensor_files.dumps(document).encode()).hexdigest()
    (path / "state.json").write_text(tensor_files.dumps(document) + "\n")
    for call in (checkpoint.load, lambda path: checkpoint.found(path.parent)):
        with pytest.raises(ValueError, match="do not fit into memory"):
            call(path)
    os.truncate(path / "state.json", 2**40)
    with pytest.raises(ValueError, match="at most"):
        checkpoint.load(path)


# ---- kills and full disks ------------------------------------------------------------------------------------------

SAVER = """
import sys, torch
from pathlib import Path
from train import checkpoint
folder, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    weights = {"w": torch.full((300_000,), float(step)), "v": torch.full((3,), float(step))}
    states = [{"state": {0: {"m": torch.full((100_000,), float(step))}}, "param_groups": [{"params": [0]}]}]
    # Each step twice: replacing is killed as well.
    for _ in range(2):
        checkpoint.save(folder, step, checkpoint.State(weights, states), keep=1)
    print(step, flush=True)
"""


def test_killed_while_saving(tmp_path, root):
    seeded = random.Random(5)
    acknowledged, interrupted = 0, 0
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with Forker(environment) as forker:
        for _ in range(20):
            lines = forker.kill_a_saver(tmp_path, acknowledged, seeded.uniform(0.0, 0.08))
            acknowledged = max([acknowledged, *lines])
            interrupted += any(name.startswith(".") for name in os.listdir(tmp_path))
            path, warnings = checkpoint.latest(tmp_path)
            assert path is not None and warnings == []
            state = checkpoint.load(path)
            step = state.meta["step"]
            assert acknowledged <= step <= acknowledged + 1
            assert set(state.model["w"].tolist()) == set(state.optimizers[0]["state"][0]["m"].tolist()) == {step}
    assert interrupted >= 5  # or no kill hit a save, and nothing was tested
    checkpoint.save(tmp_path, 10**6, small(), keep=1)
    assert os.listdir(tmp_path) == ["step-01000000"]


class Forker:
    """A process with Torch loaded that forks savers: starting Python for each would take most of the time."""

    CODE = (
        "import os, sys, torch\nfrom train import checkpoint\ntorch.set_num_threads(1)\n"
        f"code = {SAVER!r}\n"
        "for line in sys.stdin:\n"
        "    folder, step, pipe = line.split()\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.dup2(os.open(pipe, os.O_WRONLY), 1)\n"
        "        sys.argv = ['saver', folder, step]\n"
        "        exec(code, {})\n"
        "    print(pid, flush=True)\n"
        "    os.waitpid(pid, 0)\n"
    )

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Forker:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        self._process.wait(60)

    def kill_a_saver(self, folder: Path, step: int, delay: float) -> list[int]:
        """The steps that a saver said it had saved, killed ``delay`` seconds after the first of them."""
        pipe = folder.parent / f"{folder.name}.pipe"
        os.mkfifo(pipe)
        self._process.stdin.write(f"{folder} {step} {pipe}\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        with pipe.open() as said:
            first = said.readline()
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            rest = said.read().split("\n")
        pipe.unlink()
        return [int(line) for line in [first.strip(), *rest[:-1]]]


def assert_nothing_lost(folder: Path, error: pytest.ExceptionInfo[Exception], before: dict[str, bytes]) -> str:
    text = one_line(error)
    assert text.startswith(f"checkpoint: no space left in {folder} while writing ")
    assert os.listdir(folder) == ["step-00000010"]
    assert contents(folder / "step-00000010") == before
    assert checkpoint.latest(folder) == (folder / "step-00000010", [])
    return text


@pytest.mark.parametrize("call", ["write", "fsync", "close", "rename"])
@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_at_any_call(tmp_path, monkeypatch, call, step, kind):
    """The n-th call fails, for each n, until a save gets through without."""
    before = contents(checkpoint.save(tmp_path, 10, small(1)))
    real, fails = getattr(os, call), 0
    while True:
        left = [fails]

        def full(*arguments: Any, left: list[int] = left, **options: Any) -> Any:
            if call == "close" and not stat.S_ISREG(os.fstat(arguments[0]).st_mode):
                return real(*arguments, **options)
            left[0] -= 1
            if left[0] == -1:
                if call == "close":
                    real(*arguments)
                raise OSError(kind, os.strerror(kind))
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, full)
        try:
            checkpoint.save(tmp_path, step, small(2), keep=5)
        except RuntimeError as error:
            monkeypatch.setattr(os, call, real)
            assert str(error).startswith(f"checkpoint: no space left in {tmp_path} while writing ")
            path, warnings = checkpoint.latest(tmp_path)
            assert warnings == []
            if checkpoint.load(path).model["w"][0] == 1:
                assert contents(tmp_path / "step-00000010") == before
                assert not [name for name in os.listdir(tmp_path) if name.startswith(".saving")]
            else:
                assert checkpoint.load(path).meta["step"] == step  # it failed after the new one was in place
        else:
            break
        checkpoint.save(tmp_path, 10, small(1), keep=5)
        for name in os.listdir(tmp_path):
            if name != "step-00000010":
                os.rename(tmp_path / name, tmp_path.parent / f"{tmp_path.name}-{fails}")
        fails += 1
    assert fails >= 1


def test_a_file_too_large_is_one_line(tmp_path):
    before = contents(checkpoint.save(tmp_path, 10, small(1)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(RuntimeError) as error:
            checkpoint.save(tmp_path, 20, State({"w": torch.ones(100_000)}, []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    text = assert_nothing_lost(tmp_path, error, before)
    assert text.endswith("while writing model.safetensors: needs about 0.4 MB (File too large)")


def test_a_full_file_system(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        folder = disk / "checkpoints"
        before = contents(checkpoint.save(folder, 10, small(1)))
        with pytest.raises(RuntimeError) as error:
            checkpoint.save(folder, 20, State({"w": torch.ones(200_000)}, [{"m": torch.ones(200_000)}]))
        text = assert_nothing_lost(folder, error, before)
        assert text.endswith("while writing optimizer.safetensors: needs about 1.6 MB")
        checkpoint.save(folder, 20, State({"w": torch.ones(200_000)}, []))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_all_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename

    def synced(handle: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    checkpoint.save(tmp_path, 10, small())
    assert calls == [*FILES, ".saving-step-00000010", "rename", tmp_path.name]


def test_two_savers_are_refused(tmp_path):
    checkpoint.save(tmp_path, 10, small())
    with store._only_one(tmp_path), pytest.raises(RuntimeError, match="another process is saving into"):
        checkpoint.save(tmp_path, 20, small())
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write to"):
        checkpoint.save(tmp_path / "file", 20, small())
