"""probe: what it returns, on Torch and NumPy arrays of every accepted kind, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from attention64 import MODES, bf16
from delta_matching import probe

STATISTIC = {"median", "p95", "max"}


def layer(q_len: int = 40, k_len: int | None = None, q_heads: int = 4, kv_heads: int = 2, head_dim: int = 64):
    k_len = q_len if k_len is None else k_len
    return {
        "q": bf16(q_len, q_heads, head_dim),
        "k": bf16(k_len, kv_heads, head_dim),
        "v": bf16(k_len, kv_heads, head_dim),
        "d_o": bf16(q_len, q_heads, head_dim),
    }


def check_mode(entry: dict) -> None:
    for name in ("residual", "residual_after_cast"):
        assert set(entry[name]) == STATISTIC
        assert 0 <= entry[name]["median"] <= entry[name]["p95"] <= entry[name]["max"]
    assert set(entry["error"]) == {"o", "dq", "dk", "dv"}
    assert all(1e-3 < value < 1 for value in entry["error"].values())
    assert entry["column_sum"] >= 0


@pytest.mark.parametrize("numerics", ["hopper", "paper"])
def test_document(numerics):
    document = probe(**layer(q_len=200), numerics=numerics)
    assert document["schema"] == "dmattn.probe/1"
    assert document["numerics"] == numerics and document["device"] == "cpu"
    assert document["centre"] == {"hopper": "qk", "paper": "k"}[numerics]
    described = document["input"]
    sizes = {name: described[name] for name in ("tokens", "q_heads", "kv_heads", "head_dim", "causal")}
    assert sizes == {"tokens": 200, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True}
    assert described["softmax_scale"] == 0.125
    assert set(document["modes"]) == set(MODES)
    for entry in document["modes"].values():
        check_mode(entry)
        assert 0 <= entry["worst_head"]["head"] < 4
    assert [head["head"] for head in document["heads"]] == [0, 1, 2, 3]
    for head in document["heads"]:
        assert set(head["modes"]) == set(MODES)
        for entry in head["modes"].values():
            check_mode(entry)


def test_it_shows_what_the_modes_do():
    modes = probe(**layer(q_len=300), numerics="paper")["modes"]
    residual = {mode: modes[mode]["residual"]["median"] for mode in MODES}
    assert residual["stale"] > residual["consistent"] > 1e3 * residual["matched"]
    assert residual["matched"] < 2e-7 and residual["onepass"] < 5e-7
    assert modes["stale"]["column_sum"] > 1e3 * modes["matched"]["column_sum"]


def test_batch_is_optional():
    tensors = layer()
    assert probe(**tensors) == probe(**{name: x[None] for name, x in tensors.items()})


def test_every_kind_of_array():
    tensors = layer()
    expected = probe(**tensors)
    kinds = {
        "float32 tensor": lambda x: x.float(),
        "float64 tensor": lambda x: x.double(),
        "tensor that needs a gradient": lambda x: x.clone().requires_grad_(),
        "strided tensor": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        "float32 array": lambda x: x.float().numpy(),
        "float64 array": lambda x: x.double().numpy(),
        "bits": lambda x: x.view(torch.int16).numpy().view(np.uint16),
        "strided array": lambda x: np.asfortranarray(x.float().numpy()),
        "strided bits": lambda x: np.asfortranarray(x.view(torch.int16).numpy().view(np.uint16)),
    }
    for name, convert in kinds.items():
        assert probe(**{key: convert(x) for key, x in tensors.items()}) == expected, name


def test_numpy_rounds_as_torch_does():
    from delta_matching._probe import _bits

    rng = np.random.default_rng(0)
    # Every kind of float there is, the halfway cases between two BF16 values included.
    words = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    words[:20_000] = (words[:20_000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = words.view(np.float32).reshape(1, -1, 1, 1)
    ours = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint16 * words.size).from_address(_bits("q", values).pointer))
    owner = _bits("q", values)
    ours = owner.owner.reshape(-1)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)
    nan = np.isnan(values).reshape(-1)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.isnan((ours[nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_values_are_rounded_first():
    """FP64 sees the rounded values: precision that BF16 does not have changes nothing."""
    tensors = {name: x.float() for name, x in layer().items()}
    finer = {name: x * (1 + 2.0**-12) for name, x in tensors.items()}
    assert probe(**finer) == probe(**tensors)


def test_options_reach_the_library():
    tensors = layer()
    base = probe(**tensors)
    for options in ({"causal": False}, {"softmax_scale": 0.5}, {"numerics": "paper"}, {"centre": "k"}):
        assert probe(**tensors, **options)["modes"] != base["modes"], options
    assert probe(**tensors, threads=1) == base


def test_some_modes():
    tensors = layer()
    every = probe(**tensors)
    some = probe(**tensors, modes=["stale", "onepass"])
    assert set(some["modes"]) == {"stale", "onepass"}
    assert all(some["modes"][mode] == every["modes"][mode] for mode in some["modes"])
    assert set(probe(**tensors, modes="matched")["modes"]) == {"matched"}


def test_non_finite_heads_are_named():
    tensors = layer()
    tensors["q"][3, 2, 5] = torch.nan
    document = probe(**tensors)
    assert document["nonfinite_heads"] == [2]
    assert document["heads"][2]["modes"]["matched"]["error"]["dq"] is None
    assert document["heads"][1]["modes"]["matched"]["error"]["dq"] < 1


@pytest.mark.parametrize("q_len,k_len", [(0, 0), (0, 5), (5, 0), (1, 1), (7, 3)])
def test_short_rows(q_len, k_len):
    document = probe(**layer(q_len, k_len))
    assert document["input"]["tokens"] == q_len and set(document["modes"]) == set(MODES)


def test_a_real_layer(root: Path):
    """The layer that ships, against the numbers of an independent simulation: 10 % for each."""
    files = sorted(root.glob("examples/**/*.safetensors"))
    assert files, "examples/ ships a layer"
    from safetensors import safe_open

    with safe_open(files[0], framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in ("q", "k", "v", "d_o")}
        scale = float(file.metadata().get("softmax_scale", tensors["q"].shape[-1] ** -0.5))
    document = probe(**tensors, softmax_scale=scale, modes=["stale", "matched"])
    worst = document["modes"]["stale"]["worst_head"]
    # One saturated head: the shortcut's dQ there is not even the right size.
    assert worst["head"] == 1 and worst["dq"] > 5
    assert document["heads"][1]["modes"]["matched"]["error"]["dq"] < 0.3


@pytest.mark.parametrize(
    "change,kind,message",
    [
        (dict(q=[[1.0]]), TypeError, r"q: expected a torch\.Tensor or a numpy\.ndarray, got list"),
        (
            dict(k=torch.zeros(40, 2, 64, dtype=torch.int32)),
            TypeError,
            r"k: expected a floating dtype, got torch\.int32",
        ),
        (dict(v=np.zeros((40, 2, 64), np.int32)), TypeError, r"v: expected a floating dtype, or uint16"),
        (dict(q=bf16(40, 256)), ValueError, r"q: expected 3 or 4 dimensions"),
        (dict(v=bf16(41, 2, 64)), ValueError, r"v: expected k's shape \(1, 40, 2, 64\), got \(1, 41, 2, 64\)"),
        (dict(d_o=bf16(40, 3, 64)), ValueError, r"d_o: expected q's shape"),
        (dict(q=bf16(40, 3, 64), d_o=bf16(40, 3, 64)), ValueError, r"q has 3 heads, k and v have 2"),
        (dict(q=bf16(40, 4, 32), d_o=bf16(40, 4, 32)), ValueError, r"k: expected q's batch 1 and head_dim 32"),
        (dict(modes=["exact"]), ValueError, r"modes: expected one of stale, consistent, matched, onepass, got 'exact'"),
        (dict(modes=[]), ValueError, r"modes: expected at least one"),
        (dict(numerics="fp8"), ValueError, r"numerics: expected one of hopper, paper, got 'fp8'"),
        (dict(centre="v"), ValueError, r"centre: expected one of none, k, qk, got 'v'"),
        (dict(softmax_scale=math.nan), ValueError, r"softmax_scale"),
        (dict(softmax_scale=0.0), ValueError, r"softmax_scale"),
        (dict(threads=-1), ValueError, r"threads"),
    ],
)
def test_refused(change, kind, message):
    with pytest.raises(kind, match=message):
        probe(**{**layer(), **change})


def test_head_dim_that_hopper_does_not_have():
    with pytest.raises(RuntimeError, match="head_dim"):
        probe(**layer(head_dim=40))
    assert set(probe(**layer(head_dim=40), numerics="paper")["modes"]) == set(MODES)
