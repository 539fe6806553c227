"""What a training needs to continue, taken out of its model and optimisers and put back, sharded or not."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

# States that have the shape and type of their weight: a wrong one would broadcast, or be rounded while loading.
_LIKE_WEIGHT: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


@dataclasses.dataclass
class State:
    """What a checkpoint holds; tensors on the CPU once gathered or loaded.

    ``model``: the state dict. ``optimizers``: a state dict of each. ``rng``: states of generators, of any form.
    ``meta``: JSON values with str keys (config, fingerprints, tokens seen, ...); ``step`` is added when saved.
    """

    model: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    rng: dict[str, Any] = dataclasses.field(default_factory=dict)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


def gather(model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Copies of all that changes in training, without ``meta``.

    Every rank must call it. Of a sharded model (FSDP2) rank 0 gets the whole and the others get empty dicts.
    """
    rng = _generators()
    if not _sharded(model):
        return State(_copied(model.state_dict()), [_copied(own.state_dict()) for own in optimizers], rng)
    from torch.distributed.checkpoint import state_dict as sharded

    options = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = sharded.get_model_state_dict(model, options=options)
    states = [sharded.get_optimizer_state_dict(model, own, options=options) for own in optimizers]
    return State(_copied(weights), _copied(states), rng)


def restore(model: nn.Module, optimizers: Sequence[Optimizer], state: State) -> None:
    """Put a gathered or loaded state back; ``state`` stays as it was.

    Every rank must call it; of a sharded model only rank 0's weights and states are used, and sent to the others.
    Errors: ValueError, one line, for another model, other optimisers or another number of ranks.
    """
    sharded = _sharded(model)
    if not sharded or dist.get_rank() == 0:
        _check(model, optimizers, state)
    if sharded:
        _restore_sharded(model, optimizers, state)
    else:
        model.load_state_dict(state.model)
        for own, saved in zip(optimizers, state.optimizers, strict=True):
            try:
                own.load_state_dict(copy.deepcopy(saved))
            except (KeyError, ValueError) as error:
                raise ValueError(f"checkpoint: {type(own).__name__}: {str(error).splitlines()[0]}") from error
            _check_states(own, saved)
    _set_generators(state.rng)


def _restore_sharded(model: nn.Module, optimizers: Sequence[Optimizer], state: State) -> None:
    from torch.distributed.checkpoint import state_dict as sharded

    first = dist.get_rank() == 0
    options = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    sharded.set_model_state_dict(model, dict(state.model) if first else {}, options=options)
    for at, own in enumerate(optimizers):
        saved = copy.deepcopy(state.optimizers[at]) if first else {}
        before = [dict(group) for group in own.param_groups]
        sharded.set_optimizer_state_dict(model, own, saved, options=options)
        for group, old in zip(own.param_groups, before, strict=True):  # it makes lists of tuples, such as betas
            group.update({key: tuple(group[key]) for key, value in old.items() if isinstance(value, tuple)})


def _sharded(model: nn.Module) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(weight, DTensor) for weight in model.parameters())


def _copied(value: Any) -> Any:
    """A copy on the CPU: an optimiser's state dict shares its tensors with the optimiser."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(_copied(item) for item in value) if isinstance(value, (list, tuple)) else value


# ---- checks --------------------------------------------------------------------------------------------------------


def _check(model: nn.Module, optimizers: Sequence[Optimizer], state: State) -> None:
    ours = model.state_dict()
    for name in sorted(ours.keys() ^ state.model.keys()):
        raise ValueError(f"checkpoint: the model {'has' if name in ours else 'lacks'} {name!r}, the checkpoint not")
    for name, weight in ours.items():
        saved = state.model[name]
        if weight.shape != saved.shape or weight.dtype != saved.dtype:
            theirs = f"{list(saved.shape)} {saved.dtype}"
            raise ValueError(f"checkpoint: {name!r}: expected {list(weight.shape)} {weight.dtype}, got {theirs}")
    if len(optimizers) != len(state.optimizers):
        raise ValueError(f"checkpoint: expected {len(optimizers)} optimisers, got {len(state.optimizers)}")


def _check_states(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for key, weight in zip(keys, weights, strict=True):
        for name in _LIKE_WEIGHT:
            value = saved["state"].get(key, {}).get(name)
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape != weight.shape:
                raise ValueError(f"checkpoint: {name} of weight {key}: expected the shape {list(weight.shape)}")
            if value.dtype != optimizer.state[weight][name].dtype:
                raise ValueError(f"checkpoint: {name} of weight {key}: {value.dtype} would be rounded while loading")


# ---- generators ----------------------------------------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    """States of Torch's generators: ``{"ranks": [{"cpu": state, "cuda": [state of each GPU]}]}``, one per rank."""
    own: dict[str, Any] = {"cpu": torch.get_rng_state(), "cuda": []}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        own["cuda"] = torch.cuda.get_rng_state_all()
    if not (dist.is_available() and dist.is_initialized()):
        return {"ranks": [own]}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {"ranks": ranks}


def _set_generators(rng: dict[str, Any]) -> None:
    """States of GPUs that are not here are left out: what ran on them runs elsewhere now."""
    if not rng:
        return
    spread = dist.is_available() and dist.is_initialized()
    rank, count = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
    ranks = rng.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != count:
        raise ValueError(f"checkpoint: expected generators of {count} ranks, got {len(ranks or ())}")
    try:
        torch.set_rng_state(ranks[rank]["cpu"])
        if torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), ranks[rank]["cuda"], strict=False):
                torch.cuda.set_rng_state(state, device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"checkpoint: states of generators: {str(error).splitlines()[0]}") from error
