"""Optimisers and the learning rate's schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import OptimConfig


def scale_at(step: int, steps: int, config: OptimConfig) -> float:
    """What multiplies the learning rate in step ``step`` of ``steps``: a linear warm-up, then the schedule."""
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    if config.schedule == "cosine":
        done = (step - config.warmup) / max(1, steps - config.warmup)
        return config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "wsd":
        falling = max(1, round(steps * config.decay))
        done = max(0.0, (step - (steps - falling)) / falling)
        return 1 - (1 - config.final) * done
    return 1.0


def make(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW for all weights; or Muon for the matrices inside the layers, and AdamW for the rest.

    Norms, gains, biases and what else has one dimension are not decayed.
    """
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    muon = []
    if config.name == "muon":
        muon = [(name, weight) for name, weight in named if weight.dim() == 2 and "layers." in name]
    taken = {name for name, _ in muon}
    rest = [(name, weight) for name, weight in named if name not in taken]
    groups = [
        {"params": [weight for _, weight in rest if weight.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for _, weight in rest if weight.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=_fused(rest or named)
    )
    if not muon:
        return _with_rates([adamw])
    # "original": the update has a spectral norm of about 1, times sqrt(rows / columns) where there are more rows, which
    # is not the size of AdamW's; so muon_lr is a rate of its own.
    inner = torch.optim.Muon(
        [weight for _, weight in muon],
        lr=config.muon_lr,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="original",
    )
    return _with_rates([inner, adamw] if rest else [inner])


def _with_rates(optimisers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Each group remembers the rate it was made with, which the schedule scales."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return optimisers


def _fused(named: list[tuple[str, nn.Parameter]]) -> bool:
    """One kernel for all weights. On the CPU the loop over tensors is the better tested."""
    return all(weight.device.type == "cuda" for _, weight in named)


def set_scale(optimisers: list[torch.optim.Optimizer], scale: float) -> None:
    """Set every group's rate to ``scale`` times the one it was made with."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["initial_lr"] * scale
