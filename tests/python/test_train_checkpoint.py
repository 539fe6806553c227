"""Checkpoints of train/: bits, folders, several ranks; what a resumed optimiser computes."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from train import checkpoint
from train.checkpoint import State

from ranks import Ranks
from train_checkpoints import FILES, advance, contents, network, one_line, optimisers, small, state_bits, trained

# ---- bits ----------------------------------------------------------------------------------------------------------


def every_type() -> dict[str, torch.Tensor]:
    payloads = torch.tensor([0x7F800001, 0x7FC12345, -0x400000, 0x7F800000, 1, -0x80000000], dtype=torch.int32)
    anything = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    tensors = {
        "f32": payloads.view(torch.float32),
        "f64": torch.tensor([0x7FF0000000000001, -1], dtype=torch.int64).view(torch.float64),
        "bf16": torch.tensor([0x7F81, 0x7FFF, -1, 0x0001], dtype=torch.int16).view(torch.bfloat16),
        "f16": torch.tensor([0x7C01, -1], dtype=torch.int16).view(torch.float16),
        "e4m3": anything.view(torch.float8_e4m3fn).reshape(16, 16),
        "e5m2": anything.view(torch.float8_e5m2),
        "i64": torch.tensor([-(2**63), 2**63 - 1]),
        "i32": payloads,
        "u8": anything,
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(7.0),
        "scalar bool": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "a.b/c~d é": torch.ones(1),
    }
    tensors["alias"] = tensors["f32"]
    return tensors


def test_every_type_keeps_its_bits(tmp_path):
    nested = {"state": {3: {"t": torch.tensor(2.0)}, 1: {}}, "param_groups": [{"params": [3, 1], "betas": (0.1, 0.2)}]}
    odd = {
        "x": math.nan,
        "y": [math.inf, -math.inf, -0.0, 5e-324],
        "$z": {},
        "n": None,
        "t": (),
        "both": {0: 1, "0": 2},
    }
    odd["tensors"] = {0: torch.ones(1), "0": torch.zeros(2)}
    state = State(every_type(), [nested, {"state": {}, "param_groups": [], "odd": odd}], {"cpu": torch.get_rng_state()})
    state.meta = {"step": 7, "best": math.inf, "config": {"text": "é\n", "rates": [0.1, 1e-300]}}
    loaded = checkpoint.load(checkpoint.save(tmp_path, 7, state))
    assert state_bits(loaded) == state_bits(state)


def test_the_same_state_has_the_same_bytes(tmp_path):
    state = trained()
    first = contents(checkpoint.save(tmp_path / "a", 5, state))
    other = State(dict(reversed(state.model.items())), state.optimizers, dict(state.rng), {})
    assert contents(checkpoint.save(tmp_path / "b", 5, other)) == first
    assert tuple(first) == FILES
    assert contents(checkpoint.save(tmp_path / "c", 5, checkpoint.load(tmp_path / "a" / "step-00000005"))) == first
    changed = copy.deepcopy(state)
    changed.model["0.weight"][0, 0] += 1
    assert contents(checkpoint.save(tmp_path / "d", 5, changed)) != first


def test_resumed_is_uninterrupted(tmp_path):
    whole = network()
    own = optimisers(whole)
    advance(whole, own, 10)
    expected = contents(checkpoint.save(tmp_path / "whole", 10, checkpoint.gather(whole, own)))

    first = network()
    own = optimisers(first)
    advance(first, own, 5)
    checkpoint.save(tmp_path / "parts", 5, checkpoint.gather(first, own))

    second = network()
    for weight in second.parameters():
        nn.init.constant_(weight, 0.5)
    own = optimisers(second)
    torch.manual_seed(99)
    state = checkpoint.load(checkpoint.latest(tmp_path / "parts").path)
    before = state_bits(state)
    checkpoint.restore(second, own, state)
    advance(second, own, 5)
    assert state_bits(state) == before  # restoring hands out no tensor of the state
    assert contents(checkpoint.save(tmp_path / "parts", 10, checkpoint.gather(second, own))) == expected


def test_gather_copies():
    model = network()
    own = optimisers(model)
    advance(model, own, 1)
    state = checkpoint.gather(model, own)
    before = state_bits(state)
    advance(model, own, 1)
    assert state_bits(state) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.model.pop("0.weight"), "the model has '0.weight'"),
        (lambda s: s.model.update(more=torch.ones(1)), "the model lacks 'more'"),
        (lambda s: s.model.update({"0.bias": torch.ones(3)}), "'0.bias': expected [16] torch.float32, got [3]"),
        (lambda s: s.model.update({"0.bias": torch.ones(16).bfloat16()}), "got [16] torch.bfloat16"),
        (lambda s: s.optimizers.pop(), "expected 2 optimisers, got 1"),
        (lambda s: s.optimizers.reverse(), "Muon: "),
        (
            lambda s: s.optimizers[1]["state"][0].update(exp_avg=torch.ones(1)),
            "exp_avg of weight 0: expected the shape",
        ),
        (lambda s: s.optimizers[1]["state"][0].update(exp_avg=torch.ones(16).double()), "would be rounded"),
        (lambda s: s.rng["ranks"].append({}), "generators of 1 ranks, got 2"),
        (lambda s: s.rng["ranks"][0].update(cpu=torch.ones(3)), "states of generators"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    model = network()
    state = trained()
    change(state)
    with pytest.raises(ValueError) as error:
        checkpoint.restore(model, optimisers(model), state)
    assert words in one_line(error)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State({"w": torch.ones(2, device="meta")}, []), "'w': expected a dense tensor"),
        (State({"w": torch.ones(2, dtype=torch.complex64)}, []), "'w': torch.complex64 cannot be saved"),
        (State({}, [{"f": print}]), "'optimizers/0/f': expected tensors, plain values"),
        (State({}, [{1.5: 0}]), "expected str or int as keys"),
        (State({}, [], {}, {"t": torch.ones(1)}), "meta: expected JSON values, got a tensor"),
        (State({}, [], {}, {"step": 4}), "its step is 4, but step 3"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, state, words):
    with pytest.raises((TypeError, ValueError)) as error:
        checkpoint.save(tmp_path / "new", 3, state)
    assert words in one_line(error)
    assert not (tmp_path / "new").exists()


# ---- folders -------------------------------------------------------------------------------------------------------


def test_older_ones_are_deleted_and_later_ones_left(tmp_path):
    checkpoint.save(tmp_path, 90, small())
    (tmp_path / "step-1").mkdir()
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, small(step), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000030", "step-00000090", "step-1"]


def test_the_same_step_is_replaced(tmp_path):
    checkpoint.save(tmp_path, 10, small(1))
    checkpoint.save(tmp_path, 10, small(2), keep=1)
    assert os.listdir(tmp_path) == ["step-00000010"]
    assert checkpoint.load(tmp_path / "step-00000010").model["w"][0] == 2


def test_what_a_kill_leaves_is_put_right(tmp_path):
    checkpoint.save(tmp_path, 10, small(1))
    os.rename(tmp_path / "step-00000010", tmp_path / ".replaced-step-00000010")  # between its two renames
    for hidden in (".saving-step-00000020", ".deleting-step-00000005"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == (tmp_path / ".replaced-step-00000010", [])
    assert checkpoint.load(checkpoint.latest(tmp_path).path).model["w"][0] == 1
    checkpoint.save(tmp_path, 20, small(2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000020"]


def test_a_deletion_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    for step in (10, 20):
        checkpoint.save(tmp_path, step, small(1))
    own = shutil.rmtree

    def interrupted(path, **options):
        monkeypatch.setattr(shutil, "rmtree", own)
        assert Path(path).name == ".deleting-step-00000010"
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 30, small(2))
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000030"]
    assert checkpoint.load(tmp_path / "step-00000030").model["w"][0] == 2


def test_found(tmp_path):
    run = tmp_path / "run"
    path = checkpoint.save(run / "checkpoints", 10, small())
    assert [checkpoint.found(own) for own in (run, run / "checkpoints", path)] == [path] * 3
    with pytest.raises(ValueError, match="no intact checkpoint in"):
        checkpoint.found(tmp_path)
    assert checkpoint.latest(tmp_path / "none") == (None, [])


# ---- several ranks -------------------------------------------------------------------------------------------------


def _shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])
    return fully_shard(model)


def _resume_sharded(folder: str) -> list[str]:
    """Digests of the last checkpoint of six steps in one go, and of three and three."""
    import torch.distributed as dist

    digests = []
    for parts in ((6,), (3, 3)):
        state = None
        for at, steps in enumerate(parts):
            model = _shard(network())
            own = optimisers(model)
            torch.manual_seed(dist.get_rank() + 100 * at)
            if state is not None:
                checkpoint.restore(model, own, state)
            advance(model, own, steps)
            gathered = checkpoint.gather(model, own)
            where = Path(folder) / f"{len(parts)}"
            if dist.get_rank() == 0:
                checkpoint.save(where, sum(parts[: at + 1]), gathered, keep=1)
            dist.barrier()
            path = checkpoint.latest(where).path
            state = checkpoint.load(path)
            dist.barrier()
        digests.append(str({name: hashlib.sha256(data).hexdigest() for name, data in contents(path).items()}))
    return digests


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def test_sharded_resumes_bit_for_bit(tmp_path, two):
    for whole, parts in two.run(_resume_sharded, str(tmp_path)):
        assert whole == parts
    saved = checkpoint.load(checkpoint.latest(tmp_path / "2").path)
    assert saved.model["0.weight"].shape == (16, 16)  # the whole, not a shard
    assert len(saved.rng["ranks"]) == 2
