"""Tokenizers, the held-out split and batches of train/: round trips, no leak, no state, and hostile files."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.text import data, tokens
from train.text.documents import documents_of, draws, texts_of

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200)
FIXED = [11, 241, 111, 564]
WORDS = "the cat sat on the mat and the dog lay on the log; a bird sang, the sun shone, all was well. "


def folder_of(base: Path, texts: dict[str, str]) -> Path:
    folder = base / "texts"
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.fixture(scope="module")
def bpe() -> tokens.BackendTokens:
    return tokens.make_bpe([WORDS * 4], 290)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Ten documents of one letter each, as characters; the folder of their arrays."""
    texts = folder_of(tmp_path, {f"{letter}.txt": letter * 400 for letter in "abcdefghij"})
    data.prepare([texts], tmp_path / "out", "characters", held_out=0.25)
    return tmp_path / "out"


# ---- Tokenizers -----------------------------------------------------------------------------------------------------


@given(text=TEXT)
def test_round_trips(text: str, bpe: tokens.BackendTokens) -> None:
    for made in (tokens.ByteTokens(), tokens.make_characters([text]), bpe):
        ids = made.encode(text)
        assert ids.dtype == np.uint32 and (ids.size == 0 or int(ids.max()) < made.size)
        assert made.decode(ids) == text


@given(text=TEXT, limit=st.integers(2, 40))
def test_characters_have_the_size_asked_for_and_keep_the_most_frequent(text: str, limit: int) -> None:
    made = tokens.make_characters([text], limit)
    assert made.size == limit and len(made.characters) == min(limit - 1, len(set(text)))
    order = sorted(set(text), key=lambda one: (-text.count(one), one))
    assert made.characters == "".join(sorted(order[: limit - 1]))
    assert made.decode(made.encode(text)) == "".join(one if one in made.characters else "\ufffd" for one in text)


@given(text=TEXT)
def test_tokens_files_give_the_same_tokenizer(text: str, bpe: tokens.BackendTokens) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for made in (tokens.ByteTokens(), tokens.make_characters([text], 50), bpe):
            tokens.save(made, Path(folder, "tokens.json"))
            read = tokens.load(Path(folder, "tokens.json"))
            assert (read.kind, read.size, read.end) == (made.kind, made.size, made.end)
            assert read.fingerprint == made.fingerprint and np.array_equal(read.encode(text), made.encode(text))
            assert os.listdir(folder) == ["tokens.json"]


def test_fingerprints_differ_when_ids_do() -> None:
    made = [tokens.ByteTokens(), tokens.make_characters(["ab"]), tokens.make_characters(["ac"]),
            tokens.make_characters(["ab"], 97)]  # fmt: skip
    assert len({one.fingerprint for one in made}) == 4


def test_bpe_is_the_same_in_another_process(bpe: tokens.BackendTokens) -> None:
    code = f"from train.text import tokens; print(tokens.make_bpe([{WORDS * 4!r}], 290).fingerprint)"
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == bpe.fingerprint


def test_text_cannot_forge_the_end_of_a_document(bpe: tokens.BackendTokens, tmp_path: Path) -> None:
    assert bpe.end == 289 and bpe.end not in bpe.encode("a<|end|>b")
    ids = np.concatenate([bpe.encode("one"), [bpe.end], bpe.encode("two"), [bpe.end]])
    assert bpe.decode(ids) == "one<|end|>two<|end|>"


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokens.make_bpe([WORDS * 4], 290).content()["tokenizer"]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|stop|>")
    fast.save_pretrained(tmp_path / "model")
    made = tokens.from_transformers(tmp_path / "model")
    assert made.size == len(fast) == 290 and made.end == fast.eos_token_id
    assert made.encode(WORDS).tolist() == fast(WORDS, add_special_tokens=False)["input_ids"]
    assert made.end not in made.encode("a<|stop|>b") and made.decode(made.encode("a<|stop|>b")) == "a<|stop|>b"
    texts = folder_of(tmp_path, {"a": WORDS, "b": WORDS * 2, "c": WORDS * 3})
    read = data.prepare([texts], tmp_path / "out", "transformers", tokenizer=tmp_path / "model")
    assert read.tokens.fingerprint == made.fingerprint
    assert read.valid[-1] == made.end and read.tokens.decode(read.valid[:-1]) == WORDS
    with pytest.raises(ValueError, match=r"tokenizer: expected a folder of Transformers or a .gguf file"):
        tokens.from_transformers(tmp_path / "none")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises((ValueError, RuntimeError), match=r"tokenizer: .*") as caught:
        tokens.from_transformers(tmp_path / "bad.gguf")
    assert "\n" not in str(caught.value)


def test_the_tokenizer_of_an_import(tmp_path: Path, bpe: tokens.BackendTokens) -> None:
    """`train import` leaves tokens.json, and nothing that Transformers would read."""
    folder = tmp_path / "imported"
    folder.mkdir()
    tokens.save(bpe, folder / "tokens.json")
    texts = folder_of(tmp_path, {"a": WORDS, "b": WORDS * 2, "c": WORDS * 3})
    words = ["--tokens", "transformers", "--tokenizer", str(folder), "--out", str(tmp_path / "out")]
    assert data.main([str(texts), *words]) == 0
    read = data.open(tmp_path / "out")
    assert read.tokens.fingerprint == bpe.fingerprint
    assert read.valid[-1] == bpe.end and read.tokens.decode(read.valid[:-1]) == WORDS
    assert (tmp_path / "out" / "tokens.json").read_bytes() == (folder / "tokens.json").read_bytes()
    (folder / "tokens.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"^tokens.json: expected ") as caught:
        data.prepare([texts], tmp_path / "other", "transformers", tokenizer=folder)
    assert "\n" not in str(caught.value)


def test_ids_that_are_none(bpe: tokens.BackendTokens) -> None:
    for made in (tokens.ByteTokens(), tokens.make_characters(["abc"]), bpe):
        for bad in ([made.size], [-1], [2**40]):
            with pytest.raises(ValueError, match=r"ids: expected 0 ... "):
                made.decode(bad)
        assert made.decode([]) == ""


# ---- The split ------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 60), min_size=2, max_size=12), share=st.floats(0.01, 0.9), seed=st.integers(0, 9))
def test_no_token_of_a_held_out_document_is_trained_on(sizes: list[int], share: float, seed: int) -> None:
    texts = {f"{i:02}": chr(97 + i) * size for i, size in enumerate(sizes)}  # a document's own letter
    with tempfile.TemporaryDirectory() as base:
        read = data.prepare([folder_of(Path(base), texts)], Path(base, "out"), "bytes", held_out=share, seed=seed)
        train, valid = (read.text(split).split("\n\n") for split in ("train", "valid"))
        # Whole documents, each in one of the two, neither of them empty.
        assert sorted(train + valid) == sorted(texts.values()) and all(train) and all(valid)
        held = sum(map(len, valid))
        assert held <= share * sum(sizes) or held == min(sizes)


def test_a_single_file_is_cut_at_empty_lines(tmp_path: Path) -> None:
    parts = [f"{i} " + WORDS * 4 for i in range(100)]
    (tmp_path / "book.txt").write_text("\n\n".join(parts))
    read = data.prepare([tmp_path / "book.txt"], tmp_path / "out", "bytes", held_out=0.1)
    pieces, _ = documents_of([tmp_path / "book.txt"])
    assert 32 <= len(pieces) <= 64 and "".join(texts_of(pieces, "")) == "\n\n".join(parts)
    # Nothing lost, nothing twice, no paragraph in two halves.
    found = [part.strip() for split in ("train", "valid") for part in read.text(split).split("\n\n") if part.strip()]
    assert sorted(found) == sorted(part.strip() for part in parts)
    assert 0.05 < len(read.valid) / (len(read.train) + len(read.valid)) <= 0.1
    (tmp_path / "line.txt").write_text(WORDS * 50)
    with pytest.raises(ValueError, match=r"held_out: expected a text with empty lines"):
        data.prepare(tmp_path / "line.txt", tmp_path / "other", "bytes")
    whole = data.prepare(tmp_path / "line.txt", tmp_path / "other", "bytes", held_out=0)
    assert whole.text("train") == WORDS * 50 and len(whole.valid) == 0
    with pytest.raises(ValueError, match=r"context: expected at most -1, since valid has 0 tokens"):
        whole.validation(1, 8, 1)


def test_copies_of_a_file_are_one_document(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"a": "one", "b": "two", "c": "one", ".hidden": "no", "SOURCE": "no"})
    read = data.prepare([source, source / "b"], tmp_path / "out", "bytes", held_out=0.5)
    assert sorted([read.text("train"), read.text("valid")]) == ["one", "two"]
    assert read.header["copies"] == 2 and read.header["sources"] == ["texts"]


def test_the_same_bytes_each_time_and_an_old_folder_is_kept(tmp_path: Path) -> None:
    texts = {f"{i}": WORDS * (i + 1) for i in range(9)}
    for kind, size in (("bytes", None), ("characters", 20), ("bpe", 270)):
        outs = []
        for place in ("here", "there"):
            source = folder_of(tmp_path / place, texts)
            outs.append(tmp_path / place / kind)
            data.prepare([source], outs[-1], kind, size)
        one, two = ({path.name: path.read_bytes() for path in out.iterdir()} for out in outs)
        assert one == two and sorted(one) == ["data.json", "tokens.json", "train.bin", "valid.bin"]
        assert b"here" not in one["data.json"]
        stamp = outs[0].stat().st_mtime_ns
        data.prepare([tmp_path / "here" / "texts"], outs[0], kind, size).verify()
        assert outs[0].stat().st_mtime_ns == stamp
        with pytest.raises(
            ValueError, match=r"out: expected a new folder, got .* with data of other sources or settings"
        ):
            data.prepare([tmp_path / "here" / "texts"], outs[0], kind, size, seed=1)
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["bpe", "bytes", "characters", "texts"]


# ---- Batches --------------------------------------------------------------------------------------------------------


def test_batches_have_no_state(prepared: Path) -> None:
    straight = [data.open(prepared).batch(step, 3, 4, 16) for step in range(6)]
    resumed = data.open(prepared)
    for step in (5, 2, 4, 3):
        assert all(map(torch.equal, resumed.batch(step, 3, 4, 16), straight[step]))
    inputs, targets = straight[0]
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for a, b in itertools.combinations(straight, 2):
        assert not torch.equal(a[0], b[0])
    other = resumed.batch(0, 4, 4, 16)
    assert not torch.equal(other[0], inputs)


@given(ranks=st.integers(1, 5), rows=st.integers(1, 4), step=st.integers(0, 2**64 - 1), seed=st.integers(0, 2**64 - 1))
def test_ranks_share_one_batch(ranks: int, rows: int, step: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as base:
        Path(base, "text").write_text("".join(map(chr, range(0x100, 0x1000))))  # no window is like another
        read = data.prepare(Path(base, "text"), Path(base, "out"), "characters", held_out=0)
        everything = read.batch(step, seed, rows * ranks, 5)
        parts = [read.batch(step, seed, rows, 5, rank=rank, ranks=ranks) for rank in range(ranks)]
        for i in (0, 1):
            assert torch.equal(torch.cat([part[i] for part in parts]), everything[i])


def test_draws_are_these_numbers() -> None:
    """Fixed: a checkpoint of today resumes with the batches of today."""
    assert draws((0, 0), 0, [1000] * 4) == FIXED
    assert draws((0, 0), 1, [1000] * 4) != FIXED and draws((0, 1), 0, [1000] * 4) != FIXED
    found = draws((1, 2), 3, [7] * 7000)
    counts = np.bincount(found, minlength=7)
    assert len(counts) == 7 and counts.min() > 850 and counts.max() < 1150


def test_every_place_is_reached_and_none_past_the_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefgh")
    read = data.prepare(tmp_path / "text", tmp_path / "out", "bytes", held_out=0)
    inputs, targets = read.batch(0, 0, 500, 5)
    assert set(inputs[:, 0].tolist()) == set(b"abc") and set(targets[:, -1].tolist()) == set(b"fgh")
    assert read.batch(0, 0, 1, 7)[1][0, -1] == ord("h")
    with pytest.raises(ValueError, match=r"context: expected at most 7, since train has 8 tokens .* got 8"):
        read.batch(0, 0, 1, 8)


def test_validation_is_always_the_same_and_spans_all(tmp_path: Path) -> None:
    # No two windows are alike.
    texts = {"a": "".join(map(chr, range(0x100, 0x400))), "b": "".join(map(chr, range(0x400, 0x800)))}
    read = data.prepare(folder_of(tmp_path, texts), tmp_path / "out", "bytes", held_out=0.5)
    first, again = list(read.validation(2, 32, 5)), list(read.validation(2, 32, 5))
    assert len(first) == 5 and all(map(torch.equal, itertools.chain(*first), itertools.chain(*again)))
    assert first[0][0][0].tolist() == read.valid[:32].tolist()
    assert first[-1][1][-1].tolist() == read.valid[-32:].tolist()
    with pytest.raises(ValueError, match=r"batches: expected at most"):
        read.validation(2, 32, 10**9)


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": 2**64}, {"seed": -1}, {"seed": 0.5}, {"batch": 0}, {"context": 0}, {"rank": 2},
               {"rank": -1}, {"ranks": 0}, {"split": "test"}, {"batch": True}, {"context": 2**63}],
)  # fmt: skip
def test_bad_arguments_are_named(prepared: Path, change: dict[str, Any]) -> None:
    given = {"step": 0, "seed": 0, "batch": 2, "context": 8, "rank": 0, "ranks": 2, **change}
    with pytest.raises(ValueError, match=f"^({'rank|' if 'ranks' in change else ''}{next(iter(change))}): expected"):
        data.open(prepared).batch(**given)


# ---- Hostile files --------------------------------------------------------------------------------------------------


def refused(folder: Path, match: str, verify: bool = False) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        data.open(folder, verify)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "path, value",
    [(("dtype",), "float64"), (("dtype",), "uint32"), (("dtype",), ["uint16"]), (("train",), None), (("train",), {}),
     (("train", "count"), 1), (("train", "count"), -1), (("train", "count"), 2**63), (("train", "count"), 10**4000),
     (("train", "count"), 1e3), (("train", "count"), True), (("train", "count"), "9"), (("schema",), "dmattn.data/2"),
     (("tokens",), "0" * 64), (("valid", "sha256"), 5)],
)  # fmt: skip
def test_headers_that_lie(prepared: Path, path: tuple[str, ...], value: Any) -> None:
    header = json.loads((prepared / "data.json").read_text())
    part = header
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    (prepared / "data.json").write_text(json.dumps(header))
    refused(prepared, r"^(data.json|data.json: count of train|tokens.json|train.bin): expected ")


@pytest.mark.parametrize("name", ["data.json", "tokens.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100000, b'{"schema": 1}', b"{}"])
def test_json_that_is_none(prepared: Path, name: str, content: bytes) -> None:
    (prepared / name).write_bytes(content)
    refused(prepared, f"^{name}: expected ")


@pytest.mark.parametrize(
    "change", [{"size": 2**63}, {"size": "9"}, {"size": 3}, {"kind": "bpe"}, {"kind": []}, {"characters": "ba"},
               {"characters": "\ud800"}, {"characters": 7}, {"fingerprint": "0"}, {"end": "x"},
               {"kind": "bpe", "tokenizer": {"model": 1}}],
)  # fmt: skip
def test_tokenizers_that_lie(prepared: Path, change: dict[str, Any]) -> None:
    body = json.loads((prepared / "tokens.json").read_text())
    (prepared / "tokens.json").write_text(json.dumps({**body, **change}))
    refused(prepared, "^tokens.json: ")


def test_arrays_that_were_damaged(prepared: Path) -> None:
    path = prepared / "train.bin"
    intact = path.read_bytes()
    for broken in (intact[:-1], intact[:-2], intact + b"\0\0", b""):
        path.write_bytes(broken)
        refused(prepared, f"^train.bin: expected {len(intact)} bytes, as data.json says, got {len(broken)} bytes")
    path.write_bytes(intact[:-2] + b"\1\0")
    data.open(prepared)
    refused(prepared, "^train.bin: expected the SHA-256 that data.json states", verify=True)
    path.write_bytes(b"\xff" * len(intact))
    with pytest.raises(ValueError, match=r"train.bin: expected ids below \d+, got 65535"):
        data.open(prepared).batch(0, 0, 1, 8)
    path.unlink()
    refused(prepared, "^train.bin: expected .* got no such file")
    os.mkfifo(path)  # reading it would wait without end
    refused(prepared, "^train.bin: expected .* got no such file")
    refused(prepared / "none", "^data.json: .* cannot be read: No such file")


@pytest.mark.parametrize(
    "texts, change, match",
    [({"a": "x"}, {"kind": "words"}, "kind: expected one of bytes, characters, bpe, transformers, got 'words'"),
     ({"a": "x", "b": "y"}, {"held_out": float("nan")}, "held_out: expected a share"),
     ({"a": "x", "b": "y"}, {"held_out": 1}, "held_out: expected a share"),
     ({"a": "x", "b": "y"}, {"seed": -1}, "seed: expected a whole number"),
     ({"a": "x", "b": "y"}, {"kind": "bpe"}, "size: expected how many ids bpe is to have, got None"),
     ({"a": "x", "b": "y"}, {"kind": "bpe", "size": 9999}, "size: expected at most 257, all that bpe finds"),
     ({"a": "x", "b": "y"}, {"size": 255}, "size: expected 256 or None for kind bytes, got 255"),
     ({"a": "x", "b": "y"}, {"kind": "transformers"}, "tokenizer: expected a folder or a .gguf file"),
     ({"a": ""}, {}, "sources: expected text, got empty files"),
     ({".a": ""}, {}, "sources: expected text files, got the folder"),
     ({}, {}, "sources: expected a file or a folder, got ")],
)  # fmt: skip
def test_what_prepare_refuses(tmp_path: Path, texts: dict[str, str], change: dict[str, Any], match: str) -> None:
    source = folder_of(tmp_path, texts)
    with pytest.raises(ValueError, match=match) as caught:
        data.prepare(**{"sources": [source], "out": tmp_path / "out", "kind": "bytes", **change})
    assert "\n" not in str(caught.value) and {path.name for path in tmp_path.iterdir()} <= {"texts"}


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    (folder_of(tmp_path, {"a": "fine"}) / "b.txt").write_bytes(b"caf\xc3\xa9 caf\xe9")
    with pytest.raises(ValueError, match=r"sources: expected UTF-8, got '.*b.txt' with another byte at 9"):
        data.prepare(tmp_path / "texts", tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    source = folder_of(tmp_path, {"a": "one", "b": "two"})
    with pytest.raises(RuntimeError, match=r"out: .* cannot be written: No space left on device"):
        data.prepare(source, tmp_path / "out", "bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path, {"a": WORDS, "b": WORDS * 2})
    assert data.main([str(source), "--out", str(tmp_path / "out"), "--tokens", "characters", "--size", "97"]) == 0
    assert (
        "characters, 97 ids" in capsys.readouterr().out and data.open(tmp_path / "out", verify=True).tokens.size == 97
    )
