"""What dmattn writes: pages whole or not at all, the document alone on standard output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cli_helpers import DMATTN, dmattn, layer_file, refused


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    return layer_file(tmp_path / "layer.safetensors")


@pytest.mark.parametrize("command", [["row"], ["sweep", "--tokens", "16", "--seeds", "1"], ["probe", "FILE"]])
def test_unwritable_pages_leave_nothing(layer: Path, tmp_path: Path, command: list[str]) -> None:
    command = [str(layer) if part == "FILE" else part for part in command]
    folder = tmp_path / "folder"
    folder.mkdir()
    file = tmp_path / "file"
    file.write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    refused(*command, "--html", tmp_path / "none" / "page.html", says="--html: cannot write")
    refused(*command, "--html", folder, says="is a directory")
    refused(*command, "--html", file / "page.html", says="--html: cannot write")
    refused(*command, "--html", "/dev/null", says="not a regular file")
    assert sorted(tmp_path.rglob("*")) == before
    assert file.read_text() == "kept"
    assert Path("/dev/null").is_char_device()


def test_unwritable_page_is_known_before_the_work(layer: Path, tmp_path: Path) -> None:
    # The file is not even looked at: its fault would be named otherwise.
    refused("probe", tmp_path / "no such layer", "--html", "/nonexistent/page.html", says="--html")


def test_bad_input_keeps_the_old_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    refused("probe", tmp_path / "none", "--html", page, says="no such file")
    assert page.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html"]


def test_the_page_does_not_replace_the_layer(layer: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(layer)
    content = layer.read_bytes()
    refused("probe", layer, "--html", layer, says="input file")
    refused("probe", layer, "--html", link, says="input file")
    assert layer.read_bytes() == content


def test_a_page_goes_where_a_link_points(tmp_path: Path) -> None:
    target = tmp_path / "target.html"
    target.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(target)
    assert dmattn("row", "--html", link).returncode == 0
    assert link.is_symlink() and target.read_text().startswith("<!doctype html>")


def test_stdout_holds_the_document_alone(layer: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = dmattn("probe", layer, "--json", "--html", page)
    assert done.returncode == 0 and done.stderr == ""
    json.loads(done.stdout)
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.safetensors", "page.html"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([DMATTN, "row"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "dmattn: cannot write to standard output: No space left on device\n"
