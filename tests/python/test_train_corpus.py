"""Text of packages: what is kept, what is left out, the same bytes each time, and nothing outside the folder."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.text import corpus
from train.text.prose import html_to_text, plain

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not on this machine")

PAGE = """<html><head><title>Left out</title><style>p {}</style></head><body><script>var a = "<p>";</script>
<h1>Head&nbsp;ing</h1><p>One   <i>two</i>
three.<br>Four &amp; five.</p><ul><li>six</li><li>seven</li></ul><pre>a
b</pre></body></html>"""
PROSE = "Head ing\n\nOne two three.\nFour & five.\n\nsix\n\nseven\n\na\nb\n"
FILES = {
    "usr/share/doc/tiny/html/a.html": PAGE.encode(),
    "usr/share/doc/tiny/html/b.html": "<p>caf\u00e9</p>".encode(),
    "usr/share/doc/tiny/html/sub/c.txt.gz": gzip.compress(b"line\r\nend  \n", mtime=0),
    "usr/share/doc/tiny/markdown/a.md.gz": gzip.compress(b"a copy of a.html", mtime=0),
    "usr/share/doc/tiny/html/latin.html": b"<p>caf\xe9</p>",
    "usr/share/doc/tiny/html/broken.txt.gz": b"no gzip",
    "usr/share/doc/tiny/changelog.txt": b"left out",
    "usr/share/doc/tiny/copyright": b"License: CC0-1.0\n and more\n",
    "usr/bin/tiny": b"\x7fELF",
}


def packed(folder: Path, files: dict[str, bytes], name: str = "tiny") -> Path:
    """A .deb made by dpkg-deb."""
    tree = folder / f"tree-{name}"
    for path, data in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    (tree / "DEBIAN").mkdir(parents=True)
    control = f"Package: {name}\nVersion: 1.2-3\nArchitecture: all\nMaintainer: A <a@b.c>\nDescription: tiny\n"
    (tree / "DEBIAN" / "control").write_text(control)
    deb = folder / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(tree), str(deb)], check=True, capture_output=True)
    return deb


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_text_of_a_page() -> None:
    text = html_to_text(PAGE)
    assert text.replace("\n\n", "\n") == PROSE.replace("\n\n", "\n")
    assert "Left out" not in text and "var a" not in text
    assert "ing\n\nOne" in text and "three.\nFour" in text


def test_a_head_that_is_never_closed_hides_nothing() -> None:
    assert html_to_text("<html><head><title>t</title><p>seen") == "seen\n"
    assert html_to_text("<head><title>t</title><body>seen") == "seen\n"


@given(st.text(alphabet="<>/!-[]&;pbr \n\u00a0a\"'=?", max_size=80))
def test_any_page_gives_normal_text_or_one_line(page: str) -> None:
    try:
        text = html_to_text(page)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    assert text == "" or (text.endswith("\n") and text == text.strip() + "\n")
    assert "\n\n\n" not in text and "  " not in text and "\u00a0" not in text


def test_plain_text_keeps_its_indents() -> None:
    assert plain("a\r\n  b\u00a0c  \rd") == "a\n  b c\nd\n"
    assert plain(" \n ") == ""


@needs_dpkg
def test_the_text_of_a_package(tmp_path: Path) -> None:
    out = corpus.fetch(packed(tmp_path, FILES), tmp_path / "out")
    found = contents(out)
    # One format for a stem, no change log, no copyright, nothing that is not UTF-8.
    assert sorted(found) == ["SOURCE", "a.txt", "b.txt", "sub/c.txt"]
    assert found["b.txt"].decode() == "caf\u00e9\n"
    assert found["sub/c.txt"] == b"line\nend\n"
    note = found.pop("SOURCE").decode()
    for line in ("package: tiny", "version: 1.2-3", "documents: 3", f"sha256: {corpus.digest(found)}",
                 "skipped: latin.html: not UTF-8 at byte 6", "skipped: broken.txt.gz: a broken .gz",
                 "  License: CC0-1.0"):  # fmt: skip
        assert line in note.splitlines()


@needs_dpkg
def test_the_same_bytes_each_time_and_nothing_left_behind(tmp_path: Path) -> None:
    deb = packed(tmp_path, FILES)
    first = contents(corpus.fetch(deb, tmp_path / "x" / "one"))
    assert contents(corpus.fetch(deb, tmp_path / "x" / "two")) == first
    stamp = (tmp_path / "x" / "one" / "a.txt").stat().st_mtime_ns
    corpus.fetch(deb, tmp_path / "x" / "one")
    assert (tmp_path / "x" / "one" / "a.txt").stat().st_mtime_ns == stamp
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["one", "two"]


@needs_dpkg
def test_a_corpus_that_is_there_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = corpus.fetch(packed(tmp_path, FILES), tmp_path / "out")
    monkeypatch.setenv("PATH", "")
    assert corpus.fetch("tiny", out) == out
    with pytest.raises(ValueError, match=r"out: expected the text of other, got .* with that of tiny"):
        corpus.fetch("other", out)
    (out / "a.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"out: the text in .* is not what its SOURCE says"):
        corpus.fetch("tiny", out)


@needs_dpkg
def test_other_content_in_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(ValueError, match=r"out: expected a new folder or an earlier corpus"):
        corpus.fetch(packed(tmp_path, FILES), tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_links_and_odd_paths_of_an_archive_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that dpkg-deb would not build: read from the stream that it would give."""
    (tmp_path / "secret.txt").write_text("secret")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("./usr/a.txt", "../b.txt", "/abs/c.txt", "./usr/../../d.txt", "./usr/e\n.txt", "./usr/f\x1b.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
        for kind, name in ((tarfile.SYMTYPE, "./usr/g.txt"), (tarfile.LNKTYPE, "./usr/h.txt")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(tmp_path / "secret.txt")
            archive.addfile(member)

    def run(command: list[str], what: str, folder: Path | None = None) -> bytes:
        return b"Package: tiny\nVersion: 1\n" if command[1] == "-f" else stream.getvalue()

    monkeypatch.setattr(corpus, "_run", run)
    (tmp_path / "x.deb").write_bytes(b"")
    out = corpus.fetch(tmp_path / "x.deb", tmp_path / "folder" / "out")
    assert {name for name in contents(out) if name != "SOURCE"} == {"a.txt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "secret.txt", "x.deb"]


def test_the_order_of_an_archive_does_not_matter() -> None:
    documents = [
        ("d/a.txt", b"plain"),
        ("d/a.txt.gz", b"packed"),
        ("d/b.md", b""),
        ("d/b.html", b""),
        ("c/b.html", b""),
    ]
    for order in (documents, documents[::-1]):
        found = list(corpus._chosen(order))
        assert found == [("c/b.html", b""), ("d/a.txt", b"plain"), ("d/b.html", b"")]


def test_a_bomb_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "DOCUMENT_LIMIT", 1000)
    with pytest.raises(ValueError, match=r"over"):
        corpus._text("a.txt.gz", gzip.compress(b"a" * 1001))
    assert corpus._text("a.txt.gz", gzip.compress(b"a" * 1000)) == "a" * 1000 + "\n"


@pytest.mark.parametrize("name", ["", "-o=evil", "../x", "A", "a b", "x\n"])
def test_names_that_are_no_package(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"package: expected the name of a Debian package"):
        corpus.fetch(name, tmp_path / "out")


def test_missing_files_commands_and_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"package: expected a .deb file"):
        corpus.fetch(tmp_path / "none.deb", tmp_path / "out")
    if shutil.which("dpkg-deb"):
        (tmp_path / "bad.deb").write_bytes(b"not a package")
        with pytest.raises(RuntimeError, match=r"package bad.deb: dpkg-deb -f failed: .*"):
            corpus.fetch(tmp_path / "bad.deb", tmp_path / "out")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"package tiny: expected the command apt-get") as caught:
        corpus.fetch("tiny", tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_what_apt_says_comes_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'W: unsandboxed' >&2\necho 'E: Unable to locate package tiny' >&2\nexit 100\n")
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(corpus, "_installed", lambda name: None)
    with pytest.raises(RuntimeError, match=r"apt-get download failed: E: Unable to locate package tiny \(is there"):
        corpus.fetch("tiny", tmp_path / "out")


@needs_dpkg
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert corpus.main([str(packed(tmp_path, FILES)), "--out", str(tmp_path / "out")]) == 0
    assert "documents: 3" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        corpus.main(["--help"])
    assert caught.value.code == 0 and "examples:" in capsys.readouterr().out
