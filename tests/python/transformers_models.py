"""Transformers models of a few thousand weights, built from their configs, and an attention that checks every layer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from attention64 import attention64, bf16, gradients64, same_bits
from delta_matching import dm_attn_func
from delta_matching.integrations._masks import make_plan
from delta_matching.integrations.transformers import register

VOCABULARY = 128

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    max_position_embeddings=128,
    pad_token_id=0,
    # Near 1 / sqrt(hidden_size): scores of a few units, so that attention is far from a plain mean.
    initializer_range=0.1,
)
_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)

# name: config, model, options. Qwen3 and Gemma3 normalise q and k, Gemma3 scales S by query_pre_attn_scalar.
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, _HEADS),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(num_attention_heads=2, num_key_value_heads=1)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, _HEADS),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _HEADS | dict(query_pre_attn_scalar=100, sliding_window=64)),
    "llama_d128": (LlamaConfig, LlamaForCausalLM, dict(num_attention_heads=1, num_key_value_heads=1, head_dim=128)),
    "gemma3_d256": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        dict(num_attention_heads=1, num_key_value_heads=1, head_dim=256, sliding_window=64),
    ),
}


def build(family: str = "llama", attention: str = "delta_matching", **options) -> PreTrainedModel:
    """A BF16 model in training mode, with the same weights in every call."""
    register()
    config_class, model_class, own = FAMILIES[family]
    config = config_class(**(_COMMON | own | dict(attn_implementation=attention) | options))
    torch.manual_seed(1)
    return model_class(config).to(torch.bfloat16).train()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def cached(model: PreTrainedModel, cache) -> dict:
    """The cache as an argument of ``model``; newer versions of Transformers have another name for it."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


class Sequence(NamedTuple):
    """Rows of one sequence: its row of the batch, and which of the queries and keys there are its own."""

    row: int
    queries: slice
    keys: slice


LENGTHS = (40, 23, 31)  # of sequences in one batch


def padded(side: str) -> tuple[Tensor, list[Sequence]]:
    """A padding mask for rows of ``LENGTHS``, and the rows that they keep."""
    longest = max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    kept = [slice(longest - n, longest) if side == "left" else slice(n) for n in LENGTHS]
    for row, rows in enumerate(kept):
        mask[row, rows] = 1
    return mask, [Sequence(row, rows, rows) for row, rows in enumerate(kept)]


def packing() -> tuple[Tensor, list[Sequence]]:
    """position_ids of sequences of ``LENGTHS`` in one row, and where they lie."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    rows = [slice(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)]
    return torch.cat([torch.arange(n) for n in LENGTHS])[None], [Sequence(0, each, each) for each in rows]


def offsets() -> dict:
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))


def _check_layer(attend, module, q, k, v, sequences: list[Sequence], options: dict) -> None:
    """Attention of a layer, called by the integration, has the bits of a plain call for each sequence alone."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, probabilities = attend(module, *leaves, **options)
    assert probabilities is None
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(o)
    gradients = torch.autograd.grad(o, leaves, d_o)
    expected = [torch.zeros_like(o), *(torch.zeros_like(x) for x in leaves)]
    for row, queries, keys in sequences:
        parts = ((leaves[0], queries), (leaves[1], keys), (leaves[2], keys))
        alone = [x[row : row + 1, :, rows].detach().transpose(1, 2).requires_grad_() for x, rows in parts]
        o1 = dm_attn_func(*alone, causal=True, softmax_scale=module.scaling)
        expected[0][row, queries] = o1.detach()[0]
        grads = torch.autograd.grad(o1, alone, d_o[row : row + 1, queries])
        for whole, part, (_, rows) in zip(expected[1:], grads, parts, strict=True):
            whole[row, :, rows] = part[0].transpose(0, 1)
    assert o.shape == (q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    for got, want in zip((o, *gradients), expected, strict=True):
        assert same_bits(got, want)


@contextlib.contextmanager
def spied(model: PreTrainedModel, sequences: list[Sequence]) -> Iterator[list[int]]:
    """While it lasts, each layer of ``model`` is checked against plain calls for ``sequences``; gives the number of
    layers that were, as a list with one element."""
    register()
    count = [0]
    attend = ALL_ATTENTION_FUNCTIONS["delta_matching"]

    def check(module, query, key, value, attention_mask, **options):
        options["attention_mask"] = attention_mask
        with torch.enable_grad():
            _check_layer(attend, module, query, key, value, sequences, options)
        count[0] += 1
        return attend(module, query, key, value, **options)

    AttentionInterface.register("spied", check)
    AttentionMaskInterface.register("spied", make_plan)
    before = model.config._attn_implementation
    model.set_attn_implementation("spied")
    try:
        yield count
    finally:
        model.set_attn_implementation(before)


def attend(mask=None, is_causal=None, causal=True, lengths=(6, 6), **options):
    """The attention function on its own, as a module with ``is_causal`` calls it."""
    q, k, v = bf16(2, 4, lengths[0], 64), *(bf16(2, 2, lengths[1], 64) for _ in range(2))
    module = torch.nn.Module()
    module.is_causal = causal
    function = ALL_ATTENTION_FUNCTIONS[register()]
    return q, k, v, function(module, q, k, v, mask, is_causal=is_causal, **options)[0]


class Noisy(torch.autograd.Function):
    """Exact attention with random errors of the sizes that a direct call of dm_attn_func has on the same operands."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        exact, _ = attention64(q, k, v, True, scale)
        o8 = dm_attn_func(*(x.to(torch.bfloat16) for x in (q, k, v)), causal=True, softmax_scale=scale)
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return _disturbed(exact, o8).to(q.dtype)

    @staticmethod
    def backward(ctx, d_o: Tensor):
        q, k, v = ctx.saved_tensors
        with torch.enable_grad():
            exact = gradients64(q, k, v, d_o, True, ctx.scale)[2:]
            leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
            o8 = dm_attn_func(*leaves, causal=True, softmax_scale=ctx.scale)
        gradients = torch.autograd.grad(o8, leaves, d_o.to(torch.bfloat16))
        return *(_disturbed(a, b).to(q.dtype) for a, b in zip(exact, gradients, strict=True)), None


def _disturbed(exact: Tensor, measured: Tensor) -> Tensor:
    draw = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return exact + draw * (measured.double() - exact).norm() / draw.norm()


def register_noisy() -> str:
    """``attn_implementation`` of :class:`Noisy`, for causal batches without padding."""

    def attend(module, query, key, value, attention_mask, scaling, **_):
        return Noisy.apply(*(x.transpose(1, 2) for x in (query, key, value)), scaling), None

    AttentionInterface.register("noisy", attend)
    AttentionMaskInterface.register("noisy", lambda **_: None)
    return "noisy"
