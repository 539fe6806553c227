"""Processes that form a process group and run functions of the tests, started once for many of them.

    with Ranks(2) as ranks:
        results = ranks.run(function, *arguments)  # a list, by rank

A function must be one of a module's top level, and its arguments and result picklable. If it fails in any process, the
test fails with that process's traceback and the processes are started anew for the next one.
"""

from __future__ import annotations

import datetime
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A rank that waits for one that has failed gives up after this long.
_PATIENCE = 120


def _work(rank: int, world: int, backend: str, store: str, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    file = dist.FileStore(store, world)
    patience = datetime.timedelta(seconds=_PATIENCE)
    dist.init_process_group(backend, store=file, rank=rank, world_size=world, timeout=patience)
    while (job := pipe.recv()) is not None:
        function, arguments = job
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    os._exit(0)  # as train/__main__.py, and for its reason


def here() -> torch.device:
    """Where the tensors of this rank lie: its GPU under NCCL, else the CPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


class Ranks:
    """``world`` processes, one rank each, with the default process group of ``backend``."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        self.world, self.backend = world, backend
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(_PATIENCE)
        self._stop()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, self.backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stop(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._processes, self._pipes = None, [], []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(*arguments)`` in every process, and what each returned."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            answered = multiprocessing.connection.wait(waiting, timeout=3 * _PATIENCE)
            fine, text = bool(answered), "no answer"
            for pipe in answered:
                try:
                    fine, text = pipe.recv()
                except EOFError:
                    fine, text = False, "the process is gone"
                results[waiting[pipe]] = text
                if not fine:
                    break
            if not fine:
                self._stop()  # the others may wait for the one that failed
                raise AssertionError(f"of ranks {sorted(waiting.values())}, one failed:\n{text}")
        return [results[rank] for rank in range(self.world)]


def words(calls: Iterable[Callable[[], object]]) -> list[str]:
    """What each call is refused with, or "not refused"."""
    messages = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("not refused")
    return messages
