"""The numerics headers and the tensor-core model against a Hopper GPU, bit for bit (needs nvcc and sm_90)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "tests/gpu/numerics_bits.cu",
    "src/cpu/tile_kernels.cpp",
    "src/cpu/isa_products.cpp",
    "src/cpu/isa_exact.cpp",
    "src/cpu/isa_rows.cpp",
]


def has_gpu() -> bool:
    return (
        shutil.which("nvidia-smi") is not None and subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
def test_bits_agree(tmp_path: Path) -> None:
    build = [
        "nvcc", "-O2", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-fmad=false", "--extended-lambda",
        "-Xcompiler", "-ffp-contract=off,-mavx2,-mfma,-fopenmp-simd", "-DDMATTN_ISA=base", "-I", str(ROOT / "src"),
        *(str(ROOT / source) for source in SOURCES), "-o", str(tmp_path / "numerics_bits"),
    ]  # fmt: skip
    subprocess.run(build, check=True)
    run = subprocess.run([str(tmp_path / "numerics_bits")], capture_output=True, text=True)
    print(run.stdout, run.stderr)
    output = os.environ.get("DMATTN_GPU_LOG")
    if output:
        Path(output).write_text(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
