"""To and from Transformers: a Decoder as a Llama or Qwen3 folder, and such a folder, or a GGUF file, as a Decoder.

Folders of Llama and Qwen3 are read straight from safetensors, by name and shape (convert.py); GGUF files through
Transformers, which takes the packages gguf and accelerate. Other architectures can be trained as Transformers has them,
with this project's attention inside (:func:`load_transformers`). Nothing is downloaded, and no code of a model is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .. import checkpoint
from ..config import MODES, AttentionConfig, Config, ModelConfig, TrainConfig
from ..model import Decoder
from ..text import tokens
from . import tokenizer_files
from .convert import ARCHITECTURES, build, folder_weights, one_line, our_config, read_json, their_config, their_name

__all__ = ["Foreign", "decoder_from_transformers", "export", "import_model", "load_transformers"]

EXACT = AttentionConfig()


# ---- Out ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` that takes its name once whole.

    Errors: ValueError if that is in use; RuntimeError, one line, for a disk that is full or cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise ValueError(f"out: expected a folder that is new or empty, got {folder}")
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise RuntimeError(
            f"out: cannot write {folder}: {getattr(error, 'strerror', None) or one_line(error)}"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export(model: Decoder, texts: tokens.Tokens | None, folder: str | Path) -> Path:
    """Write a folder that ``AutoModelForCausalLM.from_pretrained`` reads: LlamaForCausalLM, or Qwen3ForCausalLM with
    QK-norm; with a tokenizer if ``texts`` is given. Weights keep their dtype, and the logits are the Decoder's.

    Raises:
        ValueError: one line that names what the model has and Transformers' has not, or a folder that is in use.
        RuntimeError: the folder cannot be written, in one line; nothing is left of it.
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a Decoder, got {type(model).__name__}")
    if texts is not None and texts.size != model.vocabulary:
        raise ValueError(f"tokens: expected {model.vocabulary} ids, the model's vocabulary, got {texts.size}")
    end = None if texts is None else texts.end
    config = their_config(model.config, model.vocabulary, model.embed.weight.dtype, end)
    weights = {their_name(name): tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with _new_folder(Path(folder)) as temporary:
        safetensors.torch.save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if texts is not None:
            tokenizer_files.write(texts, temporary, model.config.context)
    return Path(folder)


# ---- In -------------------------------------------------------------------------------------------------------------


def _transformers(source: Path) -> Any:
    """The package, and what reading ``source`` takes besides. Errors: RuntimeError that says what to install."""
    needed = ["transformers"] + (["gguf", "accelerate"] if source.suffix == ".gguf" else [])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{source}: reading it takes packages that are missing: pip install {' '.join(missing)}")
    return importlib.import_module("transformers")


def _read_by_transformers(source: Path) -> nn.Module:
    """A causal model of Transformers in FP32. Errors: ValueError, one line, for whatever goes wrong in there."""
    package = _transformers(source)
    folder, extra = (
        (source, {"use_safetensors": True}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    )
    try:
        model, report = package.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True,
            **extra,
        )  # fmt: skip
    except Exception as error:  # a damaged file raises anything
        raise ValueError(f"{source}: Transformers cannot read it: {one_line(error)}") from None
    # Transformers makes up what a file lacks.
    for kind in ("missing_keys", "mismatched_keys"):
        for key in sorted(map(str, report.get(kind) or ())):
            raise ValueError(f"{source}: weight {key[:200]}: {kind.partition('_')[0]}")
    loaded: nn.Module = model
    return loaded


def _source(source: str | Path) -> Path:
    path = Path(source)
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise ValueError(f"source: expected a folder of Transformers or a .gguf file, got {str(path)!r}")
    return path


def _parts(source: nn.Module | str | Path) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config and weights, as Transformers names them."""
    if isinstance(source, nn.Module):
        return source.config.to_dict(), source.state_dict()  # type: ignore[operator, union-attr]
    path = _source(source)
    if path.is_dir():
        config = read_json(path / "config.json")
        if config.get("quantization_config") is not None:
            raise ValueError("quantization_config: expected weights that are not quantised")
        our_config(config)  # refuses before weights are looked for
        return config, folder_weights(path)
    return _parts(_read_by_transformers(path))


def decoder_from_transformers(
    source: nn.Module | str | Path, attention: AttentionConfig = EXACT, vocabulary: int | None = None
) -> tuple[Decoder, ModelConfig]:
    """A Decoder that computes what a Llama or Qwen3 of Transformers does, in FP32 on the CPU.

    Args:
        source: a LlamaForCausalLM or Qwen3ForCausalLM, a folder with config.json and safetensors, or a GGUF file.
        attention: what the Decoder attends with.
        vocabulary: how many ids there are, if fewer than the model has rows; the others are left out.

    Raises:
        ValueError: one line: another architecture, a setting that a Decoder has not, a damaged or incomplete file.
        RuntimeError: a GGUF file without the packages that read it.
    """
    name = type(source).__name__ if isinstance(source, nn.Module) else source
    try:
        theirs, weights = _parts(source)
        config = our_config(theirs)
        embed = weights.get("model.embed_tokens.weight")
        if embed is None or embed.ndim != 2:
            raise ValueError("weight model.embed_tokens.weight: expected a matrix")
        return build(config, embed.shape[0] if vocabulary is None else vocabulary, weights, attention), config
    except ValueError as error:
        line = one_line(error)
        raise ValueError(line if line.startswith(("source:", str(name))) else f"{name}: {line}") from None


class Foreign(nn.Module):
    """A causal model of Transformers with the face of a Decoder: ``ids [batch, length]`` -> logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def load_transformers(source: str | Path, attention: AttentionConfig = EXACT) -> tuple[nn.Module, ModelConfig | None]:
    """A model to train, from a Transformers folder or a GGUF file: a Decoder and its config for Llama and Qwen3, else
    :class:`Foreign` and None.

    A Foreign attends through ``delta_matching.integrations.transformers`` (under torch.autocast to BF16), or, exact,
    through Transformers' own "sdpa".

    Raises: as :func:`decoder_from_transformers`; ValueError for an attention that Transformers' models cannot have.
    """
    path = _source(source)
    if path.is_dir() and read_json(path / "config.json").get("model_type") in ARCHITECTURES:
        return decoder_from_transformers(path, attention)
    if attention.mode not in MODES or attention.numerics != "hopper" or attention.simulated:
        wanted = f"one of {', '.join(MODES)} in hopper numerics, not simulated"
        raise ValueError(f"attention: expected {wanted}, for a model of Transformers; got {attention}")
    model: Any = _read_by_transformers(path)
    if model.config.model_type in ARCHITECTURES:
        return decoder_from_transformers(model, attention)
    name = "sdpa"
    if attention.mode != "exact":
        from delta_matching.integrations.transformers import register

        name = register(attention.mode, attention.centre)  # type: ignore[arg-type]
    try:
        model.set_attn_implementation(name)
    except Exception as error:
        raise ValueError(f"{path}: {type(model).__name__} cannot attend by {name}: {one_line(error)}") from None
    return Foreign(model), None


def _tokenizer(source: Path) -> tokens.Tokens | None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if source.is_dir() and not any((source / name).is_file() for name in names):
        return None
    return tokens.from_transformers(source)


def import_model(source: str | Path, out: str | Path) -> tuple[Path, list[str]]:
    """Write a Llama or Qwen3 as weights to start from.

    ``out`` then holds ``step-00000000`` (a checkpoint without optimisers, for ``train.start``), ``tokens.json`` (for
    `train prepare`, where the source has a tokenizer) and ``model.toml``, the [model] that a config then needs.

    Returns: the checkpoint, and lines worth telling. Raises: as :func:`decoder_from_transformers`, and ValueError or
    RuntimeError in one line for a folder that is in use or cannot be written.
    """
    path, out, lines = _source(source), Path(out), []
    _transformers(path)
    texts = _tokenizer(path)
    decoder, config = decoder_from_transformers(path)
    if texts is None:
        lines.append("no tokenizer in the source: ids must come from elsewhere")
    elif texts.size > decoder.vocabulary:
        raise ValueError(f"{path}: expected rows for the {texts.size} ids of its tokenizer, got {decoder.vocabulary}")
    elif texts.size < decoder.vocabulary:
        lines.append(
            f"{decoder.vocabulary - texts.size} rows of the vocabulary that no id of the tokenizer has: left out"
        )
        decoder, config = decoder_from_transformers(path, vocabulary=texts.size)
    document = Config(model=config, train=TrainConfig(context=min(512, config.context))).document()
    meta = {"config": document, "tokens": None if texts is None else texts.fingerprint, "source": path.name}
    weights = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
    with _new_folder(out) as temporary:
        saved = checkpoint.save(temporary, 0, checkpoint.State(weights, [], {}, meta))
        if texts is not None:
            tokens.save(texts, temporary / "tokens.json")
        (temporary / "model.toml").write_text(model_table(config), encoding="utf-8")
    return out / saved.name, lines


def model_table(config: ModelConfig) -> str:
    """[model] of a TOML file."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return "\n".join(["[model]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""])
