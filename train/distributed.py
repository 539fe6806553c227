"""One process, or several with a GPU each, started by torchrun: the weights are sharded by FSDP2."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1

    def device(self, wanted: str) -> torch.device:
        """ "cpu", "cuda" (this rank's own GPU), or "auto"."""
        if wanted not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device: expected auto, cpu or cuda, got {wanted!r}")
        there = torch.cuda.is_available()
        if wanted == "cuda" and not there:
            raise RuntimeError("--device: cuda was asked for, and PyTorch sees no GPU")
        if wanted == "cpu" or not there:
            return torch.device("cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks, the same bits on each."""
        if self.count > 1:
            dist.all_reduce(value)
            value /= self.count
        return value

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()


def start(device: str) -> Ranks:
    """Join the other processes if torchrun started several."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal():
        raise ValueError(f"WORLD_SIZE: expected how many processes there are, got {said!r}")
    if int(said) <= 1:
        return Ranks()
    if not dist.is_initialized():
        on_gpu = device != "cpu" and torch.cuda.is_available()
        Ranks().device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size())


def stop() -> None:
    """Leave the other processes, at the end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module) -> None:
    """FSDP2: each layer's weights are gathered when it runs, and freed after."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)


def whole(value: Tensor) -> Tensor:
    """A DTensor's value as a plain one."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
