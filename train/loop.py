"""One training, from its config to its last checkpoint.

A step depends on the weights, the optimiser's state and its number alone: batches are drawn from (seed, step), not from
a generator that runs on. So a resumed training has the bits of one that was never stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from delta_matching import probe, version

from . import distributed, optim
from .checkpoint import durable
from .config import MODES, Config
from .log import TrainLog, read
from .model import cross_entropy
from .run import Run, differences, prepare, repeatable, resume, save, warn
from .text import tokens

__all__ = ["NotFinite", "Run", "differences", "prepare", "repeatable", "resume", "save", "train"]


class NotFinite(RuntimeError):
    """The loss or the gradient is not finite: the weights before that step were kept."""


# ---- One step -------------------------------------------------------------------------------------------------------


def autocast(run: Run) -> contextlib.AbstractContextManager[Any]:
    if run.config.train.precision == "bf16":
        return torch.autocast(run.device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def gradient(run: Run) -> Tensor:
    """Add the step's gradient to the weights', and return its mean loss."""
    config = run.config.train
    seed = config.seed if config.data_seed is None else config.data_seed
    rows = config.batch // run.ranks.count
    inputs, targets = run.data.batch(
        run.step, seed, rows, config.context, split="train", rank=run.ranks.rank, ranks=run.ranks.count
    )
    total = torch.zeros((), device=run.device)
    parts = config.micro_batches
    for part, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        with autocast(run):
            logits = run.model(part.to(run.device, non_blocking=True))
        loss = cross_entropy(logits, wanted.to(run.device, non_blocking=True)) / parts
        loss.backward()
        total += loss.detach()
    return run.ranks.mean(total)


def update(run: Run) -> dict[str, float]:
    """One step of the optimisers. Errors: NotFinite, before any weight has changed."""
    loss = gradient(run)
    weights = [weight for weight in run.model.parameters() if weight.grad is not None]
    limit = run.config.optim.clip or math.inf
    norm = distributed.whole(nn.utils.clip_grad_norm_(weights, limit, foreach=True))
    values = torch.stack((loss, norm)).tolist()
    if not all(math.isfinite(value) for value in values):
        for optimiser in run.optimisers:
            optimiser.zero_grad(set_to_none=True)
        what = "loss" if not math.isfinite(values[0]) else "norm of the gradient"
        raise NotFinite(f"train: the {what} of step {run.step} is not finite")
    scale = optim.scale_at(run.step, run.config.train.steps, run.config.optim)
    optim.set_scale(run.optimisers, scale)
    for optimiser in run.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    run.step += 1
    return {"loss": values[0], "grad_norm": values[1], "lr": run.config.optim.lr * scale}


@torch.no_grad()
def validate(run: Run) -> float:
    """Mean loss of the held-out text, nats a token, over windows that are always the same, however many ranks."""
    config = run.config.train
    first, parts = run.ranks.rank * config.micro_batches, run.ranks.count * config.micro_batches
    own = slice(first, first + config.micro_batches)
    losses = []
    run.model.eval()
    for inputs, targets in run.data.validation(config.batch, config.context, config.validate_batches):
        for part, wanted in zip(inputs.chunk(parts)[own], targets.chunk(parts)[own], strict=True):
            with autocast(run):
                logits = run.model(part.to(run.device))
            losses.append(cross_entropy(logits, wanted.to(run.device)).double())
    run.model.train()
    return float(run.ranks.mean(torch.stack(losses).mean()))


# ---- The whole ------------------------------------------------------------------------------------------------------


def cut(path: Path, step: int) -> None:
    """Drop what a stopped training measured from step number ``step`` on: it is measured again."""
    if not path.exists():
        return
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                break
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"probe: {path}, line {len(kept) + 1}: not a measurement; move the file away") from None
        kept.append(line)
    durable.replace(path, b"".join(kept), "probe")


@contextlib.contextmanager
def watched(run: Run, out: Path) -> Iterator[Any]:
    """The package's probe on the model, or None."""
    config = run.config
    if not config.train.probe_every or run.ranks.rank:
        yield None
        return
    modes = config.train.probe_modes or ((config.attention.mode,) if config.attention.mode in MODES[1:] else None)
    numerics, centre = config.attention.numerics, config.attention.centre
    cut(out / "probe.jsonl", run.step)
    with probe(
        run.plain, every=config.train.probe_every, path=out / "probe.jsonl", start=run.step, modes=modes,
        numerics=numerics, centre=centre, heads=max(1, config.model.heads), threads=config.train.threads,
    ) as live:  # fmt: skip
        yield live


def train(
    config: Config, out: Path, *, device: str = "auto", resumed: bool = False, again: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Train, and return the document that ``result.json`` holds.

    Args:
        out: folder for ``log.jsonl``, ``probe.jsonl``, ``checkpoints/`` and ``result.json``.
        device: "cpu", "cuda", or "auto": a GPU where there is one.
        resumed: go on from the newest intact checkpoint of ``out``; its bits are those of a run that never stopped.
        again: drop what ``out`` holds of an earlier run, once it is known that this one can begin.

    Errors: ValueError for what cannot be trained, NotFinite (the weights before that step are saved), OSError.
    """
    ranks = distributed.start(device)
    # Rank 0 alone looks: its log may be there before the others come here.
    if ranks.rank == 0 and not (resumed or again) and holds_run(out):
        raise ValueError(
            f"--out: {out} holds a run; give --resume to go on with it, --again to drop it, or another folder"
        )
    run = prepare(config, device, ranks)
    if resumed:
        warn(run, resume(run, out / "checkpoints"))
    elif ranks.rank == 0 and (again or (out / "log.jsonl").exists()):
        drop(out)
    ranks.wait()
    out.mkdir(parents=True, exist_ok=True)
    with TrainLog(out / "log.jsonl", rank=ranks.rank, step=run.step, tensorboard=config.train.tensorboard) as log:
        log.run(
            config=config.document(), version=version(), torch=torch.__version__, device=distributed.name(run.device),
            parameters=sum(weight.numel() for weight in run.model.parameters()), step=run.step,
            tokens=run.data.tokens.fingerprint, data=run.data.fingerprint, ranks=ranks.count,
        )  # fmt: skip
        with watched(run, out) as live:
            steps(run, out, log, live, quiet)
        return conclude(run, out, log)


def holds_run(out: Path) -> bool:
    """Whether ``out`` has more than what a run leaves that was refused before its first step."""
    if (out / "checkpoints").exists() or (out / "result.json").exists():
        return True
    return (out / "log.jsonl").exists() and any(entry["kind"] != "run" for entry in read(out / "log.jsonl"))


def drop(out: Path) -> None:
    """Remove an earlier run. Errors: RuntimeError if it still runs."""
    if (out / "log.jsonl").exists():
        with (out / "log.jsonl").open("rb") as log:
            durable.claim(log.fileno(), f"--out: another process is training in {out}")
    for name in ("result.json", "probe.jsonl", "log.jsonl"):
        (out / name).unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(out / name, ignore_errors=True)


def finite(run: Run) -> bool:
    """Whether every weight is; the same on all ranks."""
    return all(bool(distributed.whole(torch.isfinite(weight).all())) for weight in run.model.parameters())


def steps(run: Run, out: Path, log: TrainLog, live: Any, quiet: bool) -> None:
    config = run.config.train
    tokens = config.batch * config.context
    with tqdm(total=config.steps, initial=run.step, unit="step", disable=quiet or run.ranks.rank > 0 or None) as bar:
        while run.step < config.steps:
            begun = time.perf_counter()
            at = run.step
            try:
                values = update(run)
            except NotFinite as error:
                log.event("nonfinite", step=at, message=str(error))
                if not finite(run):  # an update made them so: they must not take a good checkpoint's place
                    raise NotFinite(f"{error}, and neither are the weights before it, which are not saved") from None
                try:
                    save(run, out / "checkpoints", log)
                except RuntimeError as unsaved:
                    raise NotFinite(f"{error}; the weights before it are lost: {unsaved}") from None
                raise NotFinite(f"{error}; the weights before it are in {out / 'checkpoints'}") from None
            seconds = time.perf_counter() - begun
            log.step(at, tokens=(at + 1) * tokens, seconds=seconds, tokens_per_second=tokens / seconds, **values)
            if live is not None:
                live.step()
            bar.update()
            bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
            if config.validate_every and run.step % config.validate_every == 0 and run.step < config.steps:
                log.validation(run.step, loss=validate(run))
            if config.checkpoint_every and run.step % config.checkpoint_every == 0 and run.step < config.steps:
                save(run, out / "checkpoints", log)


def conclude(run: Run, out: Path, log: TrainLog) -> dict[str, Any]:
    """The last validation and checkpoint, and what the run came to."""
    save(run, out / "checkpoints", log)
    loss = validate(run)
    log.validation(run.step, loss=loss)
    finite = math.isfinite(loss)
    result: dict[str, Any] = {
        "schema": "dmattn.train_result/1",
        "step": run.step,
        "validation": loss if finite else None,
        "config": run.config.document(),
        "parameters": sum(weight.numel() for weight in run.plain.parameters()),
    }
    if run.config.train.recall_lengths and finite:
        from .text.recall import recall

        result["recall"] = recall(
            run.plain, run.data.tokens, run.data.text("valid"), run.config.train.recall_lengths, device=run.device
        )
    lost = f"train: the validation loss after step {run.step - 1} is not finite"
    if not finite:
        log.event("nonfinite", step=run.step, message=lost)
    if run.ranks.rank == 0:
        tokens.write_json(out / "result.json", result)
    if not finite:
        raise NotFinite(f"{lost}; the weights are in {out / 'checkpoints'}")
    return result
