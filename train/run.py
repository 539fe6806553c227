"""A training between two steps: how it begins, what is saved of it, and how it is continued."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from . import checkpoint, distributed, optim
from .config import Config
from .log import TrainLog
from .model import Decoder
from .text import data, recall


@dataclass
class Run:
    """What a step needs."""

    config: Config
    data: data.Data
    device: torch.device
    ranks: distributed.Ranks
    model: nn.Module
    optimisers: list[torch.optim.Optimizer]
    step: int = 0

    @property
    def plain(self) -> Decoder:
        """The model without what torch.compile puts around it."""
        return getattr(self.model, "_orig_mod", self.model)


def repeatable(device: torch.device) -> None:
    """The same bits in every run: what PyTorch offers for that, set for the process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False


# ---- The beginning --------------------------------------------------------------------------------------------------


def prepare(config: Config, device: str, ranks: distributed.Ranks) -> Run:
    """Model and optimisers of a config, with the weights it starts from.

    Errors: ValueError, one line, for what would only be found after the last step too.
    """
    where = ranks.device(device)
    repeatable(where)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    texts = opened(config, ranks)
    torch.manual_seed(config.train.seed)
    model = Decoder(config.model, config.attention, texts.tokens.size)
    started = None
    if config.train.start:
        started = checkpoint.load(checkpoint.found(Path(config.train.start)))
        check_start(model, started, texts, config.train.start)
        model.load_state_dict(started.model)
    model.to(where)
    if ranks.count > 1:
        distributed.shard(model)
    optimisers = optim.make(model, config.optim)
    if started is not None and config.train.start_optimiser:
        try:  # without its generators, which are of as many ranks as there were
            restore(model, optimisers, dataclasses.replace(started, rng={}))
        except ValueError as error:
            raise ValueError(f"train.start_optimiser: {config.train.start}: {error}") from None
    compiled = torch.compile(model) if config.train.compile else model
    return Run(config, texts, where, ranks, compiled, optimisers)


def opened(config: Config, ranks: distributed.Ranks) -> data.Data:
    """The data, with as much of it as the config wants."""
    train = config.train
    if not config.data.path:
        raise ValueError("data.path: expected a folder that `python -m train prepare` made, got none")
    if train.batch % (ranks.count * train.micro_batches):
        parts = f"{ranks.count} ranks of {train.micro_batches} micro-batches"
        raise ValueError(f"train.batch: expected a multiple of {parts}, got {train.batch}")
    try:
        texts = data.open(Path(config.data.path))
        texts.batch(0, 0, 1, train.context)
        texts.validation(train.batch, train.context, train.validate_batches)
    except ValueError as error:
        raise ValueError(f"data.path: {config.data.path}: {error}") from None
    if train.recall_lengths:  # of which the end of the run would tell
        try:
            recall.check(texts.tokens, texts.text("valid"), train.recall_lengths)
        except ValueError as error:
            raise ValueError(f"train.recall_lengths: {error}") from None
    return texts


def check_start(model: Decoder, state: checkpoint.State, texts: data.Data, name: str) -> None:
    """Refuse weights of another vocabulary or another shape, by name."""
    theirs = state.meta.get("tokens")
    if theirs is not None and theirs != texts.tokens.fingerprint:
        raise ValueError(
            f"train.start: {name} was trained on another vocabulary "
            f"(tokens {str(theirs)[:12]}, those of data.path are {texts.tokens.fingerprint[:12]})"
        )
    ours = model.state_dict()
    for key in sorted(ours.keys() ^ state.model.keys()):
        raise ValueError(f"train.start: {name} {'lacks' if key in ours else 'has an unknown'} weight {key}")
    for key, weight in ours.items():
        if weight.shape != state.model[key].shape:
            shapes = f"{list(weight.shape)}, got {list(state.model[key].shape)}"
            raise ValueError(f"train.start: weight {key} of {name}: expected {shapes}")


def restore(model: nn.Module, optimisers: list[torch.optim.Optimizer], state: checkpoint.State) -> None:
    """Weights, moments and counts of steps; rates, betas, decay and momentum stay this config's.

    A sharded state comes back without the key that the schedule has put into it, and with the rate of its last step.
    """
    settings = [[dict(group) for group in optimiser.param_groups] for optimiser in optimisers]
    checkpoint.restore(model, optimisers, by_name(model, optimisers, state))
    for optimiser, groups in zip(optimisers, settings, strict=True):
        for group, before in zip(optimiser.param_groups, groups, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})


def by_name(model: nn.Module, optimisers: list[torch.optim.Optimizer], state: checkpoint.State) -> checkpoint.State:
    """One process numbers an optimiser's weights, in the order of its groups; a sharded model wants their names."""
    if not any(hasattr(weight, "full_tensor") for weight in model.parameters()):
        return state
    names = {weight: name for name, weight in model.named_parameters()}
    found = []
    for at, saved in enumerate(state.optimizers):
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        weights = [
            weight for own in optimisers[at : at + 1] for group in own.param_groups for weight in group["params"]
        ]
        if len(keys) != len(weights):
            raise ValueError(f"checkpoint: optimiser {at}: expected {len(weights)} weights, got {len(keys)}")
        called = {key: names[weight] if type(key) is int else key for key, weight in zip(keys, weights, strict=True)}
        groups = [{**group, "params": [called[key] for key in group["params"]]} for group in saved["param_groups"]]
        found.append({"state": {called[key]: own for key, own in saved["state"].items()}, "param_groups": groups})
    return dataclasses.replace(state, optimizers=found)


# ---- Saved and continued --------------------------------------------------------------------------------------------


def meta(run: Run) -> dict[str, Any]:
    return {
        "step": run.step,
        "config": run.config.document(),
        "tokens": run.data.tokens.fingerprint,
        "data": run.data.fingerprint,
        "ranks": run.ranks.count,
    }


def save(run: Run, folder: Path, log: TrainLog) -> None:
    log.sync()
    state = checkpoint.gather(run.plain, run.optimisers)
    if run.ranks.rank == 0:
        state.meta = meta(run)
        checkpoint.save(folder, run.step, state, keep=run.config.train.keep)
    run.ranks.wait()


def resume(run: Run, folder: Path) -> list[str]:
    """Continue at the newest intact checkpoint; returns what a user should know of it, a line each."""
    path, warnings = checkpoint.latest(folder)
    if path is None:
        found = "".join(f"; {warning}" for warning in warnings)
        raise ValueError(f"--resume: no intact checkpoint in {folder}, --again begins anew{found}")
    state = checkpoint.load(path)
    for name, ours in (("tokens", run.data.tokens.fingerprint), ("data", run.data.fingerprint)):
        if state.meta.get(name) != ours:
            what = "has another vocabulary than" if name == "tokens" else "is not what"
            raise ValueError(
                f"data.path: {run.config.data.path} {what} {path} was trained on ({name} "
                f"{ours[:12]}, there {str(state.meta.get(name))[:12]})"
            )
    differing = differences(run.config.document(), state.meta.get("config"))
    if differing:
        raise ValueError(f"--resume: the config differs from the checkpoint's in {', '.join(differing)}")
    if state.meta.get("ranks") != run.ranks.count:
        # No step draws from the generators, so the training is the same but for the order of its sums.
        warnings.append(
            f"{path} is of {state.meta.get('ranks')} ranks, here are {run.ranks.count}: sums round otherwise"
        )
        state = dataclasses.replace(state, rng={})
    restore(run.plain, run.optimisers, state)
    run.step = int(state.meta["step"])
    if run.step:  # the rates that its last step had
        optim.set_scale(run.optimisers, optim.scale_at(run.step - 1, run.config.train.steps, run.config.optim))
    return warnings


#: What may change between the parts of a training: its steps stay the same.
_FREE = {
    "data.path",
    *(f"train.{name}" for name in ("checkpoint_every", "keep", "probe_every", "probe_modes", "recall_lengths")),
    *(f"train.{name}" for name in ("tensorboard", "threads", "validate_batches", "validate_every")),
}


def differences(ours: dict[str, Any], theirs: Any, free: set[str] = _FREE) -> list[str]:
    """Names of the keys that differ, without those that are ``free`` to; what theirs lacks has its default."""
    found = []
    defaults = Config().document()
    for table, values in json.loads(json.dumps(ours)).items():
        there = theirs.get(table) if isinstance(theirs, dict) else None
        for key, value in values.items():
            default = json.loads(json.dumps(defaults[table][key]))
            same = value == (there.get(key, default) if isinstance(there, dict) else None)
            if not same and f"{table}.{key}" not in free:
                found.append(f"{table}.{key}")
    return found


def warn(run: Run, lines: list[str]) -> None:
    for line in lines if run.ranks.rank == 0 else ():
        tqdm.write(f"warning: {line}", file=sys.stderr)
