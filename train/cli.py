"""``python -m train``: the command line. One line for every mistake, and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

EPILOG = """examples:
  python -m train corpus anarchism --out build/corpus/anarchism         # English prose from a Debian package
  python -m train prepare build/corpus/anarchism --tokens bytes --out build/data/bytes
  python -m train run train/configs/toy.toml --out build/runs/toy --set attention.mode=stale
  python -m train run train/configs/toy.toml --out build/runs/toy --resume
  python -m train compare train/configs/toy.toml --modes exact stale matched --seeds 0 1 2 --out build/runs/toy3
  torchrun --nproc-per-node 2 -m train run CONFIG --out FOLDER          # several GPUs (FSDP2)
  python -m train bias build/runs/toy --data build/data/characters --out build/bias.json
"""


RUN = """examples:
  python -m train run train/configs/toy.toml --out build/runs/toy
  python -m train run train/configs/toy.toml --out build/runs/stale --set attention.mode=stale --set train.seed=1
  python -m train run train/configs/toy.toml --out build/runs/toy --resume
"""
COMPARE = """examples:
  python -m train compare train/configs/toy.toml --out build/runs/toy3
  python -m train compare CONFIG --out FOLDER --modes exact stale matched --seeds 0 1 --grid optim.lr=1e-3,5e-3
  python -m train compare CONFIG --out FOLDER --set train.steps=300 --jobs 8 --device cuda
"""


class Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}; {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m train",
        description="Train decoder language models with FP8 attention, and compare its modes. docs/training.md tells.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_run(commands)
    add_compare(commands)
    for name, text in (
        ("corpus", "fetch English prose from a Debian package"),
        ("prepare", "turn text files into tokens on disk"),
        ("recall", "can a trained model find a key's value in a long text?"),
        ("bias", "what of the gradient's error averages out over batches, and what does not"),
        ("import", "a Transformers folder or a GGUF file as weights to start from"),
        ("export", "a trained model as a Transformers folder"),
        ("report", "an HTML page of what `compare` and `bias` wrote"),
    ):
        commands.add_parser(name, help=text, add_help=False)
    return top


def add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="train one model",
        description="Train one model.",
        epilog=RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("config", type=Path, help="TOML file")
    run.add_argument("--out", type=Path, required=True, help="folder for the log, checkpoints and result.json")
    run.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides",
                     help="wins over the file; may be repeated")  # fmt: skip
    how = run.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="go on from the newest intact checkpoint in --out")
    how.add_argument("--again", action="store_true", help="drop what --out holds of an earlier run, and begin anew")
    run.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu or cuda")
    run.add_argument("--quiet", action="store_true", help="no progress bar")


def add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    compare = commands.add_parser(
        "compare",
        help="the same training in several modes and with several seeds",
        description="Train a config in every mode, with every seed and at every point of a grid; what is done is not "
        "repeated. Prints a table, and writes compare.json and compare.md into --out.",
        epilog=COMPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("config", type=Path, help="TOML file")
    compare.add_argument("--out", type=Path, required=True, help="a folder; each run has one inside it")
    compare.add_argument("--modes", nargs="+", default=["exact", "stale", "consistent", "matched", "onepass"])
    compare.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    compare.add_argument("--grid", action="append", default=[], metavar="TABLE.KEY=A,B,...", help="may be repeated")
    compare.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", dest="overrides")
    compare.add_argument("--device", default="auto", help="auto, cpu or cuda")
    compare.add_argument("--jobs", type=int, default=1, help="runs at a time")
    compare.add_argument("--threads", type=int, default=1, help="CPU threads of each run")


def command_run(chosen: argparse.Namespace) -> int:
    from . import config, distributed
    from .loop import train

    loaded = config.load(chosen.config, chosen.overrides)
    try:
        result = train(
            loaded, chosen.out, device=chosen.device, resumed=chosen.resume, again=chosen.again, quiet=chosen.quiet
        )
    finally:
        distributed.stop()
    if os.environ.get("RANK", "0") == "0":
        loss, steps = result["validation"], result["step"]
        print(f"validation {loss:.4f} nats a token after {steps} steps; {chosen.out / 'result.json'}")
    return 0


def command_compare(chosen: argparse.Namespace) -> int:
    from .compare import compare
    from .outcome import markdown

    document = compare(
        chosen.config, chosen.out, modes=chosen.modes, seeds=chosen.seeds, grid=chosen.grid,
        overrides=chosen.overrides, device=chosen.device, jobs=chosen.jobs, threads=chosen.threads,
    )  # fmt: skip
    print(markdown(document))
    for line in document["failed"]:
        print(f"failed: {line}", file=sys.stderr)
    print(chosen.out / "compare.json")
    return 1 if document["failed"] else 0


def module_main(command: str) -> Callable[[Sequence[str]], int]:
    """``main(arguments)`` of the commands that have a file of their own."""
    if command == "corpus":
        from .text.corpus import main
    elif command == "prepare":
        from .text.data import main
    elif command == "recall":
        from .text.recall import main
    elif command == "bias":
        from .bias import main
    elif command == "import":
        from .interchange import main_import as main
    elif command == "export":
        from .interchange import main_export as main
    else:
        from .report import main
    return main


#: What Ctrl-C leaves of commands that go on where they were.
STOPPED: Final = {
    "run": "stopped; --resume goes on from the last checkpoint",
    "compare": "stopped; the same command goes on, runs that are done are not repeated",
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = {"run": command_run, "compare": command_compare}
    try:
        if given and given[0] not in own and not given[0].startswith("-"):
            parser().parse_args(given[:1])  # refuses what is no command
            return module_main(given[0])(given[1:]) or 0
        chosen = parser().parse_args(given)
        return own[chosen.command](chosen)
    except KeyboardInterrupt:
        print(STOPPED.get(given[0], "stopped"), file=sys.stderr)
        return 130
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
