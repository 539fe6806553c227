"""Transformers models on the GPU: the bits of plain calls in every layer, and training that follows BF16.

Where the twin stands in for the GPU the models are tiny, which checks these tests and nothing else.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from gpu_calls import DEVICE, ON_GPU
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import test_guide
import transformers_models
from delta_matching.integrations.transformers import register

STEPS = 50
BATCH, LENGTH = (4, 512) if ON_GPU else (2, 48)
SYMBOLS = 512 if ON_GPU else 32  # of the vocabulary that occur
_SIZE = (
    dict(vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=True)
    if ON_GPU
    else dict(vocab_size=128, max_position_embeddings=128, tie_word_embeddings=True)
)

# With these sizes 0.10, 0.13 and 0.13 billion weights.
SHAPES = {
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12),
        dict(num_attention_heads=12, num_key_value_heads=4, head_dim=64),
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8),
        dict(num_attention_heads=8, num_key_value_heads=4, head_dim=128),
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8),
        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=256, sliding_window=4096),
    ),
}
_TINY = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2)


def build(family: str, attention: str):
    config_class, model_class, width, heads = SHAPES[family]
    if not ON_GPU:
        width, heads = _TINY, heads | dict(num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(1)
    model = model_class(config_class(**_SIZE, **width, **heads, pad_token_id=0, attn_implementation=attention))
    return model.to(DEVICE).train()


def batches(seed: int):
    """Sequences in which each symbol has four successors: the loss can fall from ln(vocabulary) to ln 4."""
    successors = torch.randint(1, SYMBOLS, (SYMBOLS, 4), generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    while True:
        choices = torch.randint(4, (LENGTH, BATCH), generator=draw)
        symbols = [torch.randint(1, SYMBOLS, (BATCH,), generator=draw)]
        for choice in choices[1:]:
            symbols.append(successors[symbols[-1], choice])
        yield torch.stack(symbols, 1).to(DEVICE)


def _optimiser(name: str, model) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def _warm_up(step: int) -> float:
    """Without one AdamW makes Gemma's loss leap, under SDPA too (0.33 apart between seeds, ten times what the others
    are), and leaps tell nothing of the attention."""
    return min(1.0, (step + 1) / 10)


NUDGE = 2.0**-12  # of a weight: an eighth of what BF16 rounds
#: Standard deviation of what rounding to E4M3 does to a number: half a unit of three bits is 2^-4 / m of a mantissa m
#: in [1, 2), its root mean square over rounding and over mantissas 2^-4 / sqrt(3) * sqrt(3 / (8 ln 2)).
E4M3_ERROR = 2.0**-4 / math.sqrt(3) * math.sqrt(3 / (8 * math.log(2)))


def sdpa_with_errors() -> str:
    """SDPA whose inputs and output, and with them their gradients, carry errors as large as E4M3's, but random ones:
    what FP8 does to a training where nothing is wrong with it."""

    def attend(module, query, key, value, *arguments, **options):
        def err(x):
            return x * (1 + E4M3_ERROR * torch.randn_like(x))

        out, weights = sdpa_attention_forward(module, err(query), err(key), err(value), *arguments, **options)
        return err(out), weights

    name = "sdpa_with_errors"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def losses(family: str, attention: str, optimiser: str, seed: int, nudged: int = 0) -> torch.Tensor:
    """FP32 weights under BF16 autocast. Losses of every step, on the CPU. ``nudged``: seed of a change of the first
    weights, by :data:`NUDGE` of their size; 0: none."""
    model = build(family, attention)
    if nudged:
        draw = torch.Generator().manual_seed(nudged)
        with torch.no_grad():
            for weight in model.parameters():
                weight *= 1 + NUDGE * torch.randn(weight.shape, generator=draw).to(weight.device)
    steps = _optimiser(optimiser, model)
    rates = torch.optim.lr_scheduler.LambdaLR(steps, _warm_up)
    data = batches(seed)
    values = []
    for _ in range(STEPS):
        ids = next(data)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        steps.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        rates.step()
        values.append(loss.detach())
    return torch.stack(values).float().cpu()


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("family", SHAPES)
def test_training_follows_bf16(family, optimiser, judge):
    exact = losses(family, "sdpa", optimiser, seed=0)
    assert exact[-5:].mean() < exact[0] - 0.5, "the task was not learned, so nothing would be compared"
    # Noise: how far SDPA is taken from itself by other data, by its other backend's roundings, by weights that differ
    # in what BF16 does not see, and by errors of E4M3's size that favour nothing. FP8 has to do no more than the most
    # of those, over the run and at its end, where a gradient that is wrong would have added up.
    runs = {f"data {seed}": losses(family, "sdpa", optimiser, seed) for seed in (1, 2, 3)}
    runs |= {f"nudged weights {n}": losses(family, "sdpa", optimiser, seed=0, nudged=n) for n in (1, 2)}
    with sdpa_kernel(SDPBackend.MATH):
        runs["math backend"] = losses(family, "sdpa", optimiser, seed=0)
    runs |= {"errors of E4M3's size": losses(family, sdpa_with_errors(), optimiser, seed=0)}
    others = {name: (values - exact).abs() for name, values in runs.items()}
    for name, other in others.items():  # for the reader of a failure
        print(f"{name}: {other.mean():.4f} over the run, {other[-10:].mean():.4f} over its last ten steps")
    print(f"SDPA's last ten losses: {exact[-10:].mean():.4f}")
    for mode in ("matched", "onepass") if optimiser == "adamw" else ("matched",):
        run = losses(family, register(mode), optimiser, seed=0)
        print(f"{mode}'s last ten losses: {run[-10:].mean():.4f}")
        distance = (run - exact).abs()
        for what, rows in (("the run", slice(None)), ("its last ten steps", slice(-10, None))):
            name = f"{mode}: distance of the loss from SDPA's, mean over {what}"
            noise = max(other[rows].mean().item() for other in others.values())
            judge.at_most(name, distance[rows].mean().item(), noise, grade="property")


@pytest.mark.parametrize("how", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama_d128", "gemma3_d256"])
def test_every_layer_has_the_bits_of_plain_calls(family, how):
    options, sequences = {}, []
    if how == "packed":
        positions, sequences = transformers_models.packing()
        ids = transformers_models.tokens(*positions.shape)
        options = dict(position_ids=positions.to(DEVICE))
    elif how == "plain":
        ids = transformers_models.tokens(2, 47)
        sequences = [transformers_models.Sequence(row, slice(47), slice(47)) for row in range(2)]
    else:
        mask, sequences = transformers_models.padded(how)
        ids = transformers_models.tokens(*mask.shape)
        options = dict(attention_mask=mask.to(DEVICE))
    model = transformers_models.build(family).to(DEVICE)
    with transformers_models.spied(model, sequences) as layers:
        model(ids.to(DEVICE), use_cache=False, **options)
    assert layers == [2]


# The guide's model, made 0.19 billion weights large.
LARGER = {
    "vocab_size=64": "vocab_size=32000",
    "hidden_size=128": "hidden_size=1024",
    "intermediate_size=256": "intermediate_size=2816",
    "num_hidden_layers=2": "num_hidden_layers=12",
    "num_attention_heads=4": "num_attention_heads=8",
    "num_key_value_heads=2": "num_key_value_heads=4",
    "head_dim=64": "head_dim=128",
    "initializer_range=0.1": "initializer_range=0.02",
    "lr=2e-3": "lr=3e-4",
}


@pytest.mark.cuda_only
@pytest.mark.slow
def test_the_guide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a model
    text = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    for small, large in LARGER.items():
        assert text.count(small) == 1, small
        text = text.replace(small, large)
    space: dict = {}
    with torch.device(DEVICE):
        for block in test_guide.blocks(text):
            if block.startswith("optimiser ="):
                space["model"].to(DEVICE)
            exec(block, space)
    assert all(parameter.is_cuda for parameter in space["model"].parameters())
    assert space["losses"][0] > 9 and space["losses"][-1] < 6, space["losses"]
    assert len(space["watch"].last["layers"]) == 12 and space["watch"].last["not_measured"] == []


def _waits(function) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.cuda_only
def test_no_layer_waits_for_the_gpu():
    # Transformers and the plan look at position_ids or the mask; more layers must not mean more looks.
    mask, _ = transformers_models.padded("right")
    ids, mask = transformers_models.tokens(*mask.shape).to(DEVICE), mask.to(DEVICE)
    assert _waits(lambda: ids.sum().item()) >= 1, "the counter sees nothing"
    for options in ({}, dict(attention_mask=mask)):
        counts = []
        for layers in (2, 6):
            model = transformers_models.build(num_hidden_layers=layers).to(DEVICE)
            model(ids, use_cache=False)
            counts.append(_waits(lambda: model(ids, use_cache=False, **options)))  # noqa: B023
        assert counts[0] == counts[1]
