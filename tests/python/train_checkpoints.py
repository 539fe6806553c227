"""What the tests of checkpoints share: a small model and its training, and what two states have in common."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train import checkpoint
from train.checkpoint import State

FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json")


def network(width: int = 16) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width, bias=False))


def optimisers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def advance(model: nn.Module, own: list[torch.optim.Optimizer], steps: int) -> None:
    """Steps on data from the generator, so that its state counts too."""
    for _ in range(steps):
        rows = torch.randn(8, 16)
        (model(rows) - rows.sin()).square().mean().backward()
        for optimiser in own:
            for group in optimiser.param_groups:
                group["lr"] *= 0.9
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


@functools.cache
def _trained() -> State:
    model = network()
    own = optimisers(model)
    advance(model, own, 2)
    return checkpoint.gather(model, own)


def trained() -> State:
    return copy.deepcopy(_trained())


def bits(value: Any) -> Any:
    """Something that is equal for the same bits, types, shapes and structure alone."""
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).numpy()) if len(flat) else b""
    if isinstance(value, dict):
        return {(type(key), key): bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [bits(item) for item in value]
    return type(value), value.hex() if isinstance(value, float) else value


def state_bits(state: State) -> Any:
    return bits([state.model, state.optimizers, state.rng, state.meta])


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def small(value: float = 1.0) -> State:
    return State({"w": torch.full((4,), value)}, [{"state": {}, "param_groups": []}])


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text and 0 < len(text) < 400
    return text
