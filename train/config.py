"""What a training is made of, read from TOML.

Every table of a file is one of the classes here and every key one of their fields; a name that is not here is refused,
as are values of another type or outside their domain, each in a line that names it. docs/training.md lists them all.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODES = ("exact", "stale", "consistent", "matched", "onepass")
REFERENCE = "reference"  # FP32 attention of q, k and v rounded to BF16: what FP8 is compared with
ABLATIONS = ("per_tensor", "bf16_dp")
HEAD_DIMS = (64, 128, 256)  # of hopper numerics

_LARGEST = 2**31 - 1  # of a whole number: what tensors of any model here have room for
_LAYERS = 4096
THREADS = 4096  # OpenMP ends the process where it cannot have them
_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class AttentionConfig:
    """Which attention: ``exact`` is PyTorch's, in the dtype of the activations."""

    mode: str = "exact"
    numerics: str = "hopper"  # hopper | paper
    centre: str | None = None  # none | k | qk; None: qk in hopper, k in paper
    simulated: bool = False  # by Torch operations; always so for the ablations, and for paper numerics on a GPU
    normaliser: str = "default"  # default | unrounded: what divides O; unrounded in a simulation only

    def __post_init__(self) -> None:
        _one_of("attention.mode", self.mode, (*MODES, REFERENCE, *ABLATIONS))
        _one_of("attention.numerics", self.numerics, ("hopper", "paper"))
        if self.centre is not None:
            _one_of("attention.centre", self.centre, ("none", "k", "qk"))
        _one_of("attention.normaliser", self.normaliser, ("default", "unrounded"))
        if self.mode in ABLATIONS and self.numerics != "paper":
            raise ValueError(f"attention.numerics: {self.mode} is offered in paper numerics, got {self.numerics}")
        if self.numerics == "paper" and self.centre == "qk":
            raise ValueError("attention.centre: expected none or k in paper numerics, got qk")

    @property
    def by_torch(self) -> bool:
        """Whether the simulation computes it on every device."""
        return self.simulated or self.mode in ABLATIONS or self.normaliser != "default"


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. None stands for: kv_heads = heads, head_dim = width / heads, mlp_width = 4 width (8/3 for swiglu)."""

    width: int = 256
    layers: int = 4
    heads: int = 2
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp: str = "swiglu"  # swiglu | silu | gelu
    mlp_width: int | None = None
    mlp_bias: bool = False
    norm: str = "rmsnorm"  # rmsnorm | layernorm
    norm_eps: float = 1e-5
    position: str = "rope"  # rope | learned | none
    rope_theta: float = 10000.0
    qk_norm: bool = False
    tie: bool = False
    context: int = 512  # longest sequence
    hybrid_every: int = 0  # 4: layers 3, 7, ... attend and the others are Gated DeltaNet; 0: all attend
    delta_heads: int | None = None
    delta_head_dim: int = 128
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "context", "delta_head_dim"):
            _positive(f"model.{name}", getattr(self, name))
        if self.layers > _LAYERS:
            raise ValueError(f"model.layers: expected 1 to {_LAYERS}, got {self.layers}")
        for name in ("kv_heads", "head_dim", "mlp_width", "delta_heads"):
            if getattr(self, name) is not None:
                _positive(f"model.{name}", getattr(self, name))
        _one_of("model.mlp", self.mlp, ("swiglu", "silu", "gelu"))
        _one_of("model.norm", self.norm, ("rmsnorm", "layernorm"))
        _one_of("model.position", self.position, ("rope", "learned", "none"))
        _above_zero("model.norm_eps", self.norm_eps, 1.0)
        _above_zero("model.rope_theta", self.rope_theta, 1e12)
        _above_zero("model.init_std", self.init_std, 1e3)
        _between("model.hybrid_every", self.hybrid_every, 0, _LARGEST)
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"model.heads: {self.heads} do not divide width {self.width}; say model.head_dim")
        if self.heads % self.kv:
            raise ValueError(f"model.kv_heads: expected a divisor of {self.heads} heads, got {self.kv}")
        if self.position == "rope" and self.dim % 2:
            raise ValueError(f"model.head_dim: expected an even number with rope, got {self.dim}")

    @property
    def kv(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def dim(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Width inside the MLP: as many weights in swiglu's three matrices as in the two of the others."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.mlp != "swiglu" else -(-8 * self.width // (3 * 64)) * 64


@dataclass(frozen=True)
class DataConfig:
    path: str = ""  # a folder that `train prepare` made


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, or Muon for the matrices inside the layers and AdamW for the rest."""

    name: str = "adamw"  # adamw | muon
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    schedule: str = "constant"  # constant | cosine | wsd, each after the warm-up
    warmup: int = 0  # steps
    final: float = 0.0  # where cosine and wsd end, as a share of lr
    decay: float = 0.2  # wsd: the share of all steps that fall

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, ("adamw", "muon"))
        _one_of("optim.schedule", self.schedule, ("constant", "cosine", "wsd"))
        for name in ("lr", "muon_lr", "eps"):
            _above_zero(f"optim.{name}", getattr(self, name))
        for name in ("beta1", "beta2", "muon_momentum"):
            _between(f"optim.{name}", getattr(self, name), 0.0, 1.0, open_end=True)
        for name in ("final", "decay"):
            _between(f"optim.{name}", getattr(self, name), 0.0, 1.0)
        for name in ("lr", "muon_lr", "weight_decay"):  # larger ones leave FP32 inside an optimiser
            _between(f"optim.{name}", getattr(self, name), 0.0, 1e6)
        _finite("optim.clip", self.clip)
        _between("optim.warmup", self.warmup, 0, _LARGEST)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    batch: int = 8  # sequences a step, over all ranks and micro-batches
    micro_batches: int = 1  # the gradient of a step is summed over so many parts
    context: int = 512
    precision: str = "fp32"  # fp32 | bf16: autocast of the activations; weights and optimiser stay FP32
    seed: int = 0
    data_seed: int | None = None  # None: seed
    start: str = ""  # weights to start from: a folder that `train import` or `train run` made
    start_optimiser: bool = False  # take its optimiser's state too: a further stage of the same training
    compile: bool = False
    threads: int = 0  # CPU threads; 0: PyTorch's own choice
    validate_every: int = 0  # steps; 0: at the end alone
    validate_batches: int = 16
    checkpoint_every: int = 0  # steps; 0: at the end alone
    keep: int = 2
    probe_every: int = 0  # steps between measurements of every attention layer; 0: never
    probe_modes: tuple[str, ...] = ()  # what to measure; none: the mode that trains
    tensorboard: bool = False
    recall_lengths: tuple[int, ...] = ()  # after the last step: the recall test at these lengths

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_batches", "context", "validate_batches", "keep"):
            _positive(f"train.{name}", getattr(self, name))
        _between("train.steps", self.steps, 1, 99_999_999)  # the name of a checkpoint has eight digits
        for name in ("validate_every", "checkpoint_every", "probe_every"):
            _between(f"train.{name}", getattr(self, name), 0, _LARGEST)
        _between("train.threads", self.threads, 0, THREADS)
        for name in ("seed", "data_seed"):
            if getattr(self, name) is not None:
                _between(f"train.{name}", getattr(self, name), 0, 2**63 - 1)
        for length in self.recall_lengths:
            _positive("train.recall_lengths", length)
        _one_of("train.precision", self.precision, ("fp32", "bf16"))
        for mode in self.probe_modes:
            _one_of("train.probe_modes", mode, MODES[1:])
        if self.batch % self.micro_batches:
            raise ValueError(f"train.micro_batches: expected a divisor of batch {self.batch}, got {self.micro_batches}")
        if self.start_optimiser and not self.start:
            raise ValueError("train.start_optimiser: expected train.start to name whose, got none")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.train.context > self.model.context:
            most, got = self.model.context, self.train.context
            raise ValueError(f"train.context: expected at most model.context {most}, got {got}")
        for length in self.train.recall_lengths:
            if length > self.model.context:
                most = self.model.context
                raise ValueError(f"train.recall_lengths: expected at most model.context {most}, got {length}")

        attention = self.attention
        if attention.mode in (*MODES[1:], *ABLATIONS):
            if not attention.by_torch and attention.numerics == "hopper" and self.model.dim not in HEAD_DIMS:
                raise ValueError(f"model.head_dim: hopper numerics offers {HEAD_DIMS}, got {self.model.dim}")
            if attention.by_torch and self.train.probe_every:
                raise ValueError("train.probe_every: simulated attention cannot be measured; expected 0")

    def document(self) -> dict[str, Any]:
        """The tables as JSON has them."""
        return dataclasses.asdict(self)


# ---- Checks ---------------------------------------------------------------------------------------------------------


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {_short(value)}")


def _positive(name: str, value: int) -> None:
    if not 1 <= value <= _LARGEST:
        raise ValueError(f"{name}: expected 1 to {_LARGEST}, got {_short(value)}")


def _above_zero(name: str, value: float, most: float = math.inf) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")
    if value > most:
        raise ValueError(f"{name}: expected at most {most:g}, got {value}")


def _between(name: str, value: float, least: float, most: float, open_end: bool = False) -> None:
    if not (least <= value <= most) or (open_end and value == most):
        raise ValueError(f"{name}: expected {least} to {'below ' if open_end else ''}{most}, got {_short(value)}")


def _finite(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number, 0 or more, got {value}")


def _short(value: object) -> str:
    """For a message: one line, of a value of any size."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _key(name: str) -> str:
    return name if name.isprintable() and len(name) <= 60 else _short(name)


# ---- TOML -----------------------------------------------------------------------------------------------------------


def _fits(value: Any, wanted: Any) -> Any:
    """``value`` as the field's type, or TypeError."""
    origin = typing.get_origin(wanted)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _fits(value, next(a for a in typing.get_args(wanted) if a is not type(None)))
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError("a list")
        return tuple(_fits(one, typing.get_args(wanted)[0]) for one in value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise TypeError("a number that a float can hold") from None
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise TypeError({int: "a whole number", float: "a number", str: "text", bool: "true or false"}[wanted])
    return value


def _table(kind: type, name: str, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{name}: expected a table, got {type(values).__name__}")
    wanted = typing.get_type_hints(kind)
    taken = {}
    for key, value in values.items():
        if key not in wanted:
            raise ValueError(f"{name}.{_key(key)}: unknown; there are: {', '.join(wanted)}")
        try:
            taken[key] = _fits(value, wanted[key])
        except TypeError as expected:
            raise ValueError(f"{name}.{key}: expected {expected}, got {_short(value)}") from None
    return kind(**taken)


def from_document(document: dict[str, Any]) -> Config:
    """A Config of tables as TOML or JSON has them. Errors: ValueError that names the key."""
    tables = typing.get_type_hints(Config)
    for name in document:
        if name not in tables:
            raise ValueError(f"{_key(name)}: unknown table; there are: {', '.join(tables)}")
    return Config(**{name: _table(tables[name], name, values) for name, values in document.items()})


def _override(document: dict[str, Any], text: str) -> None:
    """``table.key=value``, value as in TOML; what TOML does not read is text."""
    name, equals, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not equals or not dot:
        raise ValueError(f"--set {_key(text)}: expected TABLE.KEY=VALUE")
    try:
        read = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        read = {}
    parsed = read["value"] if list(read) == ["value"] else value.strip()  # other names: lines of the value's own
    document.setdefault(table, {})
    if not isinstance(document[table], dict):
        raise ValueError(f"{_key(table)}: expected a table, got {type(document[table]).__name__}")
    document[table][key.strip()] = parsed


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file; each override ``table.key=value`` wins over it.

    Errors: ValueError in one line for what cannot be read, unknown names, wrong types and values.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_FILE_BYTES + 1)
        if len(text) > _FILE_BYTES:
            raise ValueError(f"longer than {_FILE_BYTES} bytes")
        document = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not TOML: nested too deep") from None
    except ValueError as error:  # of decoding, of TOML, and of integers of thousands of digits
        raise ValueError(f"{path}: not TOML: {' '.join(str(error).split())}") from None
    for override in overrides:
        _override(document, override)
    try:
        return from_document(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
