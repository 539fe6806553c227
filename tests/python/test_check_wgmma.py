"""scripts/check_wgmma.py on kernels of a few instructions."""

from __future__ import annotations

import sys

import pytest

from conftest import script_module


@pytest.fixture(scope="module")
def check():
    with script_module("check_wgmma") as module:
        yield module


PRODUCT = "QGMMA.64x64x32.F32.E4M3.E4M3 R24, R88, gdesc[UR16], RZ, !UPT, gsb0"
OTHER = "QGMMA.64x64x32.F32.E4M3.E4M3 R56, gdesc[UR20], RZ, !UPT, gsb0"
LANDED = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def early(check, *texts: str) -> list[str]:
    kernel = [check.Instruction(16 * n, text) for n, text in enumerate(texts)]
    return [writer.text for _, writer in check.early_writes(kernel)]


@pytest.mark.parametrize(
    "writer",
    [
        "MOV R91, R0",
        "LDS.64 R90, [R89]",
        "LDSM.16.MT88.4 R88, [R2]",
        "LDS.128 R24, [R2]",  # the sums
        "@P0 FADD R55, R1, R2",
        "SHFL.IDX PT, R88, R3, RZ, 0x1f",
        "IMAD.WIDE R90, R1, R2, R4",
        "CS2R R54, SRZ",
    ],
)
def test_a_write_before_the_wait_is_found(check, writer):
    assert early(check, PRODUCT, writer, LANDED, "EXIT") == [writer]
    assert early(check, PRODUCT, LANDED, writer, "EXIT") == []


@pytest.mark.parametrize(
    "other",
    [
        "STS [R88], R24",
        "BAR.SYNC.DEFER_BLOCKING R88, 0x80",
        "ISETP.NE.AND P0, PT, R88, RZ, PT",
        "MOV R92, R88",
        "LDS.128 R20, [R2]",
    ],
)
def test_reads_and_other_registers_are_not(check, other):
    assert early(check, PRODUCT, other, LANDED, "EXIT") == []


def test_a_wait_for_all_but_one_lands_the_first_of_two_groups(check):
    wait, write = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R88, R0"
    assert early(check, PRODUCT, OTHER, wait, write, LANDED, "EXIT") == []
    assert early(check, OTHER, PRODUCT, wait, write, LANDED, "EXIT") == [write]
    assert early(check, PRODUCT, wait, write, LANDED, "EXIT") == [write]


def test_every_path_is_followed(check):
    # 0x00 product, 0x10 branch over the wait, 0x20 wait, 0x30 write
    assert early(check, PRODUCT, "@P0 BRA 0x30", LANDED, "MOV R88, R0", "EXIT") == ["MOV R88, R0"]
    assert early(check, PRODUCT, "BRA 0x30", "MOV R88, R0", LANDED, "EXIT") == []
    assert early(check, PRODUCT, "BRA UP0, 0x30", "MOV R88, R0", LANDED, "EXIT") == ["MOV R88, R0"]
    assert early(check, PRODUCT, "@P0 EXIT", "MOV R88, R0", "EXIT") == ["MOV R88, R0"]
    assert early(check, PRODUCT, "EXIT", "MOV R88, R0") == []
    # backwards: the loop's next round writes
    assert early(check, "MOV R88, R0", PRODUCT, "@P0 BRA 0x0", LANDED, "EXIT") == ["MOV R88, R0"]


@pytest.mark.parametrize("branch", ["@P0 BRA `(.L_x_1)", "BRA 0x990"])
def test_a_branch_that_cannot_be_followed_is_an_error(check, branch):
    with pytest.raises(ValueError, match="expected a target in the kernel"):
        early(check, PRODUCT, branch, LANDED, "EXIT")


def test_products_after_one_another_may_share_their_sums(check):
    more = PRODUCT.replace("RZ, !UPT", "R24")
    assert early(check, PRODUCT, more, LANDED, "EXIT") == []


def test_it_says_what_it_cannot_read(check, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_wgmma", str(tmp_path / "none.so")])
    assert check.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: library: expected a file") and len(error.strip().splitlines()) == 1
