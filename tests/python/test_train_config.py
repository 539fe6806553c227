"""What a training is made of, read from TOML: every mistake is one line that names the key."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from train import config
from train.config import Config, from_document, load
from train.run import differences

from train_runs import ROOT

TABLES = typing.get_type_hints(Config)
KEYS = [(table, field.name) for table, kind in TABLES.items() for field in dataclasses.fields(kind)]


def refused(document: dict[str, Any], *names: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_document(document)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500, text
    for name in names:
        assert name in text, text


def refused_text(tmp_path: Path, text: str | bytes, *names: str, sets: tuple[str, ...] = ()) -> None:
    path = tmp_path / "hostile.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        load(path, sets)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600, said
    for name in names:
        assert name in said, said


@pytest.mark.parametrize("path", sorted((ROOT / "train" / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads(path: Path) -> None:
    loaded = load(path)
    assert from_document(json.loads(json.dumps(loaded.document()))) == loaded


def test_the_defaults() -> None:
    assert from_document({}) == Config()
    assert from_document(json.loads(json.dumps(Config().document()))) == Config()


_NUMBERS = st.integers() | st.floats() | st.booleans()
_SCALARS = st.none() | _NUMBERS | st.text(max_size=20) | st.dates()
_ANYTHING = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(st.sampled_from(KEYS), _ANYTHING)
def test_any_value_of_a_key_is_taken_or_refused_by_name(key: tuple[str, str], value: Any) -> None:
    table, name = key
    try:
        loaded = from_document({table: {name: value}})
    except ValueError as error:
        # Some keys are refused for what another says, and either may be named.
        assert str(error).startswith(tuple(f"{t}." for t in TABLES)) and "\n" not in str(error)
        return
    taken = getattr(getattr(loaded, table), name)
    assert taken == (tuple(value) if isinstance(value, list) else value)
    assert isinstance(taken, bool) == isinstance(value, bool)
    numbers = taken if isinstance(taken, tuple) else (taken,)
    assert all(math.isfinite(one) and abs(one) < 2**63 for one in numbers if isinstance(one, (int, float)))
    json.dumps(loaded.document(), allow_nan=False)


@given(st.text(max_size=80))
def test_unknown_keys_and_tables(name: str) -> None:
    if name not in TABLES:
        refused({name: {}}, "unknown table", "train")
    if ("optim", name) not in KEYS:
        refused({"optim": {name: 1}}, "optim.", "unknown", "weight_decay")
        with pytest.raises(ValueError):
            from_document({"optim": {"lr": 1e-3, name: 1}})


@given(_ANYTHING.filter(lambda value: not isinstance(value, dict)))
def test_a_table_that_is_none(value: Any) -> None:
    refused({"model": value}, "model: expected a table")


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("model", "width", 0),
        ("model", "width", True),
        ("model", "width", 2.0),
        ("model", "width", 2**31),
        ("model", "layers", 4097),
        ("model", "kv_heads", 3),
        ("model", "kv_heads", 0),
        ("model", "heads", 3),
        ("model", "head_dim", 7),
        ("model", "norm_eps", math.nan),
        ("model", "rope_theta", math.inf),
        ("model", "rope_theta", 10**400),
        ("model", "init_std", 0),
        ("model", "init_std", "0.02"),
        ("model", "tie", 1),
        ("model", "mlp", "swish"),
        ("model", "hybrid_every", -1),
        ("attention", "mode", "Stale"),
        ("attention", "centre", "q"),
        ("optim", "lr", math.nan),
        ("optim", "lr", 0.0),
        ("optim", "lr", 1e7),
        ("optim", "beta1", 1.0),
        ("optim", "beta2", -0.1),
        ("optim", "clip", math.inf),
        ("optim", "weight_decay", math.inf),
        ("optim", "warmup", -1),
        ("optim", "final", 1.5),
        ("train", "steps", 0),
        ("train", "steps", 10**8),
        ("train", "context", 513),
        ("train", "micro_batches", 3),
        ("train", "seed", -1),
        ("train", "seed", 2**63),
        ("train", "data_seed", -1),
        ("train", "precision", "fp16"),
        ("train", "probe_modes", "stale"),
        ("train", "probe_modes", ["exact"]),
        ("train", "recall_lengths", [0]),
        ("train", "recall_lengths", [513]),
        ("train", "recall_lengths", [1.5]),
        ("train", "start_optimiser", True),
        ("data", "path", 3),
    ],
)
def test_values_that_are_refused(table: str, key: str, value: Any) -> None:
    refused({table: {key: value}}, f"{table}.{key}", "got" if key != "heads" else "3")


def test_ablations_are_of_paper_numerics() -> None:
    refused({"attention": {"mode": "per_tensor"}}, "attention.numerics", "per_tensor", "got hopper")
    assert from_document({"attention": {"mode": "per_tensor", "numerics": "paper"}}).attention.mode == "per_tensor"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("model = 3", ("model: expected a table",)),
        ("[[model]]\nwidth = 3", ("model: expected a table", "list")),
        ("[model]\n'a\\nb' = 1\n\"two\\nlines\" = 1", ("model.", "unknown")),
        ('["two\\nlines"]\n', ("unknown table",)),
        ("[model.width]\nx = 1", ("model.width", "whole number")),
        ("a = " + "[" * 100000, ("not TOML", "deep")),
        ("a = " + "{a=" * 20000, ("not TOML",)),
        ("[model]\nwidth = " + "9" * 5000, ("not TOML",)),
        ("[model]\nwidth = 0x" + "f" * 5000, ("model.width", "huge int")),
        ("[model]\nrope_theta = 0x" + "f" * 5000, ("model.rope_theta",)),
        ("[optim]\nlr = nan", ("optim.lr",)),
        ("[optim]\nlr = -inf", ("optim.lr",)),
        ("[optim]\nlr = 1e999", ("optim.lr",)),
        ("[optim]\nlr = 1979-05-27", ("optim.lr", "a number")),
        ("[optim]\nname = '" + "x" * 5000 + "'", ("optim.name", "...")),
        ("[" + "y" * 5000 + "]", ("unknown table", "...")),
        ("[model", ("not TOML",)),
        ("[model]\nwidth = 1\nwidth = 2", ("not TOML",)),
        (b"\xff\xfe[model]", ("not TOML",)),
        (b"\x00" * 100, ("not TOML",)),
        (b"#" + b" " * (1 << 20), ("longer than",)),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, (str, bytes)) else None,
)
def test_hostile_files(tmp_path: Path, text: str | bytes, names: tuple[str, ...]) -> None:
    refused_text(tmp_path, text, "hostile.toml", *names)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml", Path("/dev/zero")):
        with pytest.raises(ValueError, match=str(path)):
            load(path)


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    try:
        assert isinstance(load(path), Config)
    except ValueError as error:
        assert "\n" not in str(error) and "any.toml" in str(error)


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[optim]\nlr = 1e-2\n[model]\nwidth = 64\n", encoding="utf-8")
    loaded = load(path, [
        "optim.lr=0.5", "optim.lr = 3", "attention.mode=stale", 'attention.numerics = "paper"', "train.seed=7",
        "data.path=/a=b c", "model.tie=true", "train.probe_modes=['stale']", "train.recall_lengths=[64, 128]",
    ])  # fmt: skip
    assert loaded.optim.lr == 3.0 and loaded.attention.mode == "stale" and loaded.attention.numerics == "paper"
    assert loaded.data.path == "/a=b c" and loaded.model.tie and loaded.model.width == 64 and loaded.train.seed == 7
    assert loaded.train.probe_modes == ("stale",) and loaded.train.recall_lengths == (64, 128)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("optim.lr", ("--set optim.lr", "TABLE.KEY=VALUE")),
        ("lr=1", ("--set lr=1",)),
        ("=", ("--set =",)),
        (".lr=1", ("unknown table",)),
        ("optim.=1", ("optim.", "unknown")),
        ("optim.lr.x=1", ("optim.lr.x: unknown",)),
        ("optim.lr=", ("optim.lr", "a number", "''")),
        ("optim.lr=fast", ("optim.lr", "a number", "'fast'")),
        ("optim.lr=" + "[" * 100000, ("optim.lr",)),
        ("model.width=" + "9" * 5000, ("model.width",)),
        ("model.width=3\n[model]\nheads=3", ("model.width", "a whole number")),
        ("data=1", ("--set data=1",)),
        ("speed.x=1", ("speed: unknown table",)),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, str) else None,
)
def test_overrides_that_are_none(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    refused_text(tmp_path, "", *names, sets=(text,))


def test_an_override_of_a_table_that_is_none(tmp_path: Path) -> None:
    refused_text(tmp_path, "model = 3", "model: expected a table, got int", sets=("model.width=3",))


def test_configs_that_differ() -> None:
    ours = Config().document()
    theirs = json.loads(json.dumps(ours))
    assert differences(ours, theirs) == []
    for table, key in KEYS:
        changed = json.loads(json.dumps(ours))
        changed[table][key] = "another"
        free = differences(ours, changed) == []
        assert free or differences(ours, changed) == [f"{table}.{key}"]
        assert free == (key in {
            "path", "checkpoint_every", "keep", "probe_every", "probe_modes", "recall_lengths", "tensorboard",
            "threads", "validate_batches", "validate_every",
        }), key  # fmt: skip
        del changed[table][key]  # of a version that did not have it yet: the default
        assert differences(ours, changed) == []
    for broken in (None, [], "config", {"model": 3}, {"model": None}):
        assert "model.width" in differences(ours, broken)


def test_what_none_stands_for() -> None:
    model = config.ModelConfig(width=256, heads=4)
    assert (model.kv, model.dim, model.hidden) == (4, 64, 704)
    assert config.ModelConfig(width=256, mlp="gelu").hidden == 1024
    assert config.ModelConfig(width=250, heads=3, head_dim=64, kv_heads=1).kv == 1
