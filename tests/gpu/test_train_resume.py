"""A training on a GPU: resumed and unbroken runs have the same bits, on one GPU and sharded over two."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from gpu_calls import DEVICE

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)

import subprocess

from train_runs import environment, prepared, same_end

pytestmark = pytest.mark.cuda_only

TOML = """
[model]
width = 256
layers = 2
heads = 4
kv_heads = 2
head_dim = 64
qk_norm = true
context = 256
[data]
path = {path}
[optim]
lr = 3e-3
warmup = 4
schedule = "wsd"
[train]
steps = 12
batch = 4
micro_batches = 2
context = 256
precision = "bf16"
validate_batches = 2
checkpoint_every = 4
keep = 9
"""


def run(toml: Path, out: Path, sets: list[str], *more: str, gpus: int = 1) -> None:
    words = [sys.executable, "-m", "train"]
    if gpus > 1:
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={gpus}",
            "-m",
            "train",
        ]
    words += ["run", str(toml), "--out", str(out), "--device", torch.device(DEVICE).type, "--quiet", *more]
    for text in sets:
        words += ["--set", text]
    here = environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}  # what this process finds, it finds
    done = subprocess.run(words, env=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def broken_and_whole(tmp_path: Path, sets: list[str], gpus: int = 1) -> None:
    """A run of 12 steps; and one that goes on from its fourth step, as if it had been killed after that checkpoint."""
    import json
    import shutil

    toml = tmp_path / "tiny.toml"
    toml.write_text(TOML.format(path=json.dumps(str(prepared(tmp_path)))), encoding="utf-8")
    run(toml, tmp_path / "whole", sets, gpus=gpus)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    for name in ("step-00000008", "step-00000012"):
        shutil.rmtree(tmp_path / "broken" / "checkpoints" / name)
    (tmp_path / "broken" / "result.json").unlink()
    run(toml, tmp_path / "broken", sets, "--resume", gpus=gpus)
    same_end(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.parametrize("mode", ["exact", "matched", "onepass"])
def test_resume(tmp_path: Path, mode: str) -> None:
    broken_and_whole(tmp_path, [f'attention.mode="{mode}"'])


def test_resume_muon_fp32(tmp_path: Path) -> None:
    broken_and_whole(tmp_path, ['attention.mode="matched"', 'optim.name="muon"', 'train.precision="fp32"'])


def test_resume_sharded(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    broken_and_whole(tmp_path, ['attention.mode="matched"'], gpus=2)
