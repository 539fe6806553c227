"""Names, configs and weights of Transformers' Llama and Qwen3 beside those of a Decoder.

Llama and Qwen3 are what a Decoder is with rotary positions, RMSNorm and SwiGLU, without and with QK-norm.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import safe_open
from torch import Tensor

from ..config import AttentionConfig, ModelConfig
from ..model import Decoder

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONFIG_LIMIT = 1 << 24  # bytes of a JSON file of a model

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INSIDE = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "norm_attention": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def their_name(name: str) -> str:
    """What Llama and Qwen3 call a parameter of a Decoder."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_TOP[module]}.{kind}"
    _, number, inside = module.split(".", 2)
    return f"model.layers.{number}.{_INSIDE[inside]}.{kind}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---- Out: a Decoder as Transformers has it ---------------------------------------------------------------------------


def refuse_export(model: ModelConfig) -> None:
    wanted = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "hybrid_every": 0}
    if model.qk_norm:
        wanted["mlp_bias"] = False  # Qwen3 has none
    for name, value in wanted.items():
        got = getattr(model, name)
        if got != value:
            kind = "Qwen3" if model.qk_norm else "Llama"
            raise ValueError(f"export: model.{name}: expected {value}, all that Transformers' {kind} has, got {got}")


def their_config(model: ModelConfig, vocabulary: int, dtype: torch.dtype, end: int | None) -> dict[str, Any]:
    """config.json of Transformers 4 and 5. Errors: ValueError that names the field no such model has."""
    refuse_export(model)
    kind = "qwen3" if model.qk_norm else "llama"
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv,
        "head_dim": model.dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # Transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # Transformers 5
        "tie_word_embeddings": model.tie,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": end,
    }
    return config | ({"use_sliding_window": False} if model.qk_norm else {"mlp_bias": model.mlp_bias})


# ---- In: what Transformers has as a Decoder --------------------------------------------------------------------------


_RENAMED = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "context": "max_position_embeddings",
}


def our_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a Transformers config (as a dict). Errors: ValueError that names the field in the way."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type: expected one of {', '.join(ARCHITECTURES)}, got {kind!r:.60}")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {"rope_type": rope}
    layers = theirs.get("layer_types") or []
    if not isinstance(layers, (list, tuple)):
        raise ValueError(f"layer_types: expected a list, got {layers!r:.60}")
    windowed = any(one != "full_attention" for one in layers)
    for name, value, wanted in (
        ("hidden_act", theirs.get("hidden_act", "silu"), "silu"),
        ("attention_bias", theirs.get("attention_bias", False), False),
        ("rope_parameters.rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("use_sliding_window", bool(theirs.get("use_sliding_window", False)) or windowed, False),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0)), 1.0),
    ):
        if value != wanted:
            raise ValueError(f"{name}: expected {wanted}, all that a Decoder has, got {value!r:.60}")
    numbers: dict[str, Any] = {"rope_theta": rope.get("rope_theta", theirs.get("rope_theta", 10000.0))}
    for ours, name in _RENAMED.items():
        numbers[ours] = theirs.get(name)
    for ours, value in numbers.items():
        kinds = (int, float) if ours in ("rope_theta", "norm_eps") else (int,)
        fine = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 2**31 and math.isfinite(value)
        if not fine and not (value is None and ours in ("kv_heads", "head_dim")):
            raise ValueError(f"{_RENAMED.get(ours, ours)}: expected a number above 0, got {value!r:.60}")
    if numbers["head_dim"] is None and kind == "qwen3":
        numbers["head_dim"] = 128  # its default, whatever the width
    switches = {"tie": bool(theirs.get("tie_word_embeddings", False)), "mlp_bias": bool(theirs.get("mlp_bias", False))}
    return ModelConfig(**numbers, **switches, qk_norm=kind == "qwen3", mlp="swiglu", norm="rmsnorm", position="rope")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ValueError(f"expected a file, got {'another thing' if path.exists() else 'none'}")
        if path.stat().st_size > CONFIG_LIMIT:
            raise ValueError(f"expected at most {CONFIG_LIMIT} bytes, got {path.stat().st_size}")
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")
        return body
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from None


def folder_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the files that its index lists; mapped, not read."""
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and (folder / "model.safetensors.index.json").exists():
        listed = read_json(folder / "model.safetensors.index.json").get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(one, str) for one in listed.values()):
            raise ValueError(f"{folder}/model.safetensors.index.json: expected a weight_map of file names")
        names = sorted(set(listed.values()))
    found: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ValueError(f"{folder}: expected the file {name[:100]!r} in it")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found.update((key, file.get_tensor(key)) for key in file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path}: {one_line(error)}") from None
    return found


def build(model: ModelConfig, vocabulary: int, weights: Mapping[str, Tensor], attention: AttentionConfig) -> Decoder:
    """A Decoder with these weights (their names), FP32; rows of the vocabulary past ``vocabulary`` are left out.

    Names and shapes are checked before anything is allocated.
    """
    try:
        with torch.device("meta"):
            # One layer stands for all: a hostile config may claim millions.
            pattern = Decoder(dataclasses.replace(model, layers=1), attention, vocabulary).state_dict()
    except RuntimeError as error:
        raise ValueError(f"its sizes are no tensor's: {one_line(error)}") from None
    wanted: dict[str, tuple[str, torch.Size]] = {}
    for at in range(min(model.layers, len(weights) + 1)):
        for name, tensor in pattern.items():
            own = name.replace("layers.0.", f"layers.{at}.", 1)
            wanted[own] = (their_name(own), tensor.shape)
    for theirs, shape in wanted.values():
        got = weights.get(theirs)
        if got is None:
            raise ValueError(f"weight {theirs}: missing")
        rows = theirs in ("model.embed_tokens.weight", "lm_head.weight")
        fits = got.ndim == len(shape) and got.shape[1:] == shape[1:] and got.shape[0] >= shape[0]
        if not fits or not (rows or got.shape == shape) or not got.is_floating_point() or got.element_size() < 2:
            raise ValueError(f"weight {theirs}: expected {list(shape)}, floating, got {list(got.shape)} {got.dtype}")
    extra = set(weights) - {theirs for theirs, _ in wanted.values()} - ({"lm_head.weight"} if model.tie else set())
    for name in sorted(name for name in extra if not name.endswith("rotary_emb.inv_freq")):
        raise ValueError(f"weight {name[:100]}: not one that this architecture has")
    decoder = Decoder(model, attention, vocabulary).float()
    with torch.no_grad():
        for name, tensor in decoder.state_dict().items():
            tensor.copy_(weights[wanted[name][0]][: tensor.shape[0]])
    return decoder
