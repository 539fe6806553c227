"""What attention in Transformers does not compute is refused by name instead of ignored."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache
from transformers import masking_utils as masks

from attention64 import same_bits
from delta_matching import _device
from delta_matching.integrations import _masks
from delta_matching.integrations.transformers import register
from transformers_models import attend, build, cached, offsets, packing, tokens

IDS = torch.arange(1, 25).view(2, 12)
ZEROS = torch.ones(2, 12, dtype=torch.int64).tril(5)


@pytest.mark.parametrize(
    "options,inputs,message",
    [
        (dict(attention_dropout=0.1), {}, r"dropout: expected 0, got 0\.1; set attention_dropout=0\.0"),
        ({}, dict(output_attentions=True), r"output_attentions: attention probabilities are never formed"),
        ({}, dict(head_mask=torch.ones(4)), r"head_mask: masked heads are not supported"),
        ({}, dict(position_bias=torch.ones(1)), r"position_bias: an additive bias is not supported"),
        ({}, dict(s_aux=torch.ones(4)), r"s_aux: learned attention sinks are not supported"),
        ({}, dict(softcap=30.0), r"softcap: capped logits are not supported"),
        ({}, dict(tilt=1.0), r"tilt: not an argument that delta_matching attention knows"),
        ({}, dict(attention_mask=torch.ones(2, 1, 12, 12)), r"attention_mask: expected a padding mask \[batch, keys\]"),
        ({}, dict(attention_mask=torch.ones(2, 12, 12)), r"attention_mask: expected a padding mask \[batch, keys\]"),
        ({}, dict(position_ids=torch.tensor([[*range(6), *range(9, 15)]])), r"position_ids: .* got a jump to 9"),
        ({}, offsets() | dict(max_length_k=None), r"max_length_k: expected beside cu_seq_lens_q"),
        ({}, offsets() | dict(attention_mask=ZEROS), r"cu_seq_lens_q: expected without padding"),
    ],
)
def test_refused(options, inputs, message):
    model = build(**options)
    with pytest.raises((TypeError, ValueError), match=message):
        model(IDS, **(dict(use_cache=True) | inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"query: expected torch\.bfloat16, got {dtype}; load the model with dtype="):
        build().to(dtype)(IDS)


def test_a_head_dim_that_is_not_offered():
    with pytest.raises(RuntimeError, match="head_dim"):
        build(head_dim=32)(IDS)


def test_dropout_is_for_training_alone():
    build(attention_dropout=0.1).eval()(IDS)


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_a_window_smaller_than_the_sequence_is_refused(family):
    sliding = ["sliding_attention", "full_attention"]
    own = dict(use_sliding_window=True) if family == "qwen3" else {}
    model = build(family, sliding_window=8, layer_types=sliding, **own)
    with pytest.raises(TypeError, match="sliding_window: expected at least the longest sequence, 12 keys, got 8"):
        model(IDS, use_cache=False)
    # Padding does not count, nor do the neighbours in a packed row.
    model(IDS, attention_mask=(torch.arange(12) < 8).expand(2, -1), use_cache=False)
    model(IDS, position_ids=torch.tensor([[*range(5), *range(7)]]), use_cache=False)
    # A model of full layers alone never asks for it.
    build(family, sliding_window=8, layer_types=["full_attention"] * 2)(IDS, use_cache=False)


def test_a_window_in_decoding():
    # The cache of a sliding layer holds as many keys as the window.
    model = build("gemma3", sliding_window=14, layer_types=["sliding_attention", "full_attention"]).eval()
    out = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    reference = build("gemma3", "eager", sliding_window=14, layer_types=["sliding_attention", "full_attention"])
    exact = reference.float().eval()(out[:, :-1], use_cache=False).logits[:, 11:]
    assert out.shape == (2, 18)
    # Each token that was chosen is, in exact attention, within FP8's error of the best one.
    chosen = exact.gather(-1, out[:, 12:, None]).squeeze(-1)
    assert ((exact.amax(-1) - chosen) < 0.2 * exact.std(-1)).all()


def test_a_cache_of_fixed_size_is_refused():
    with pytest.raises(
        TypeError, match=r"cache: expected one that grows \(DynamicCache\), got \d+ keys where 12 tokens"
    ):
        build().eval().generate(
            IDS, max_new_tokens=2, do_sample=False, cache_implementation="static", disable_compile=True
        )


def test_packing_beside_padding_is_refused():
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    right, left = torch.ones(2, 12), torch.ones(2, 12)
    right[:, 10:] = left[:, :2] = 0
    for mask in (right, left):
        with pytest.raises(TypeError, match="position_ids: sequences that start again beside an attention_mask with"):
            build()(IDS, attention_mask=mask, position_ids=positions, use_cache=False)
    # Where padding is, positions may be anything; holes in a mask let them jump.
    left[0, 6] = 0
    positions = torch.tensor([[7, 0, 0, 1, 2, 3, 9, 5, 6, 7, 8, 9], [1, 1, *range(10)]])
    build()(IDS, attention_mask=left, position_ids=positions, use_cache=False)


def test_packing_after_a_cache_is_refused():
    model = build().eval()
    cache = DynamicCache(config=model.config)
    model(IDS, **cached(model, cache))
    with pytest.raises(TypeError, match="position_ids: packed sequences after 12 cached tokens"):
        model(IDS, position_ids=torch.tensor([[*range(5), *range(7)]]), **cached(model, cache))


def test_mask_functions_that_are_not_known_are_refused():
    causal = masks.causal_mask_function
    refused = [
        (masks.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64)), "attention_chunk_size"),
        (masks.or_masks(causal, lambda *_: True), "or_mask_function or block_sequence_ids"),
        (masks.and_masks(causal, lambda b, h, q, k: k > 1), "and_mask_function: a mask function of one's own"),
        (masks.padding_mask_function(torch.ones(1, 4)), "mask_function: padding_mask_function of Transformers"),
    ]
    for function, message in refused:
        with pytest.raises(TypeError, match=message):
            _masks.make_plan(batch_size=1, q_length=4, kv_length=4, mask_function=function)


@pytest.mark.parametrize("use_cache", [False, True])
def test_what_cannot_be_read_while_a_graph_is_captured(monkeypatch, use_cache):
    positions, _ = packing()
    ids, model = tokens(*positions.shape), build()
    packed = dict(position_ids=positions, use_cache=use_cache)
    expected = [model(ids, **options).logits for options in (packed, dict(use_cache=use_cache))]
    monkeypatch.setattr(_device, "capturing", lambda device: True)
    # What Transformers itself asks: then it hands over the numbers of sequences without a look at them.
    monkeypatch.setattr(masks, "is_tracing", lambda tensor=None: True, raising=False)
    with pytest.raises(RuntimeError, match="position_ids: packed sequences in a compiled or captured model need"):
        model(ids, **packed)
    for options, logits in zip((packed | offsets(), dict(use_cache=use_cache)), expected, strict=True):
        assert same_bits(model(ids, **options).logits, logits)
    # A layer that gets no position_ids has to go by what the mask function was told.
    told = masks.and_masks(
        masks.causal_mask_function, masks.packed_sequence_mask_function(torch.tensor([[0, 0, 1]] * 2))
    )
    plan = _masks.make_plan(batch_size=2, q_length=3, kv_length=3, mask_function=told)
    with pytest.raises(RuntimeError, match="position_ids: packed sequences in a compiled or captured model need"):
        attend(plan, lengths=(3, 3))
    with pytest.raises(RuntimeError, match="attention_mask: a padding mask cannot be read while a CUDA graph"):
        model(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache)


def test_an_unknown_argument_of_masks_is_refused():
    with pytest.raises(TypeError, match="tilt: not an argument of masks that delta_matching knows"):
        _masks.make_plan(
            batch_size=1, q_length=4, kv_length=4, mask_function=masks.causal_mask_function, dtype=None, tilt=1
        )


def test_a_plan_for_other_sizes_is_refused():
    plan = _masks.Plan(6, 6, True, None, None)
    with pytest.raises(TypeError, match="is_causal: expected True, as the model's mask is, got False"):
        attend(plan, is_causal=False)
    with pytest.raises(TypeError, match="attention_mask: made for 6 queries and 6 keys, got 6 and 9"):
        attend(plan, lengths=(6, 9))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 9\], got \[2, 6\]"):
        attend(torch.ones(2, 6), lengths=(6, 9))
    with pytest.raises(TypeError, match=r"attention_mask: expected a padding mask \[batch, keys\], got str"):
        attend("causal")
    with pytest.raises(TypeError, match=r"position_ids: expected shape \[batch, 6\], got \[3, 2, 6\]"):
        attend(position_ids=torch.zeros(3, 2, 6))


def test_unknown_names():
    with pytest.raises(ValueError, match="mode: expected one of stale, consistent, matched, onepass, got 'exact'"):
        register("exact")
    with pytest.raises(ValueError, match="centre"):
        register(centre="v")


# --- Without Transformers --------------------------------------------------------------------------------------------

_BLOCKED = """
import sys
sys.modules[{module!r}] = {value}
from delta_matching.integrations import transformers as integration
try:
    integration.register()
except ImportError as error:
    assert "\\n" not in str(error)
    print(error)
"""


@pytest.mark.parametrize("module,value", [("transformers", "None"), ("transformers.masking_utils", "type(sys)('old')")])
def test_transformers_missing_or_too_old(module, value):
    assert importlib.util.find_spec("transformers") is not None
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED.format(module=module, value=value)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("delta_matching.integrations.transformers needs Transformers 4.56 or newer")


@pytest.mark.parametrize(
    "offsets,keys,positions,message",
    [
        ([0, 6, 12], 24, None, "cu_seq_lens_q: expected 24, all rows of the batch, as the last offset, got 12"),
        ([0, 4, 24], 24, [*range(6), *range(6)], "position_ids: expected the sequences of cu_seq_lens_q"),
    ],
)
def test_offsets_of_something_else(offsets, keys, positions, message):
    cu = torch.tensor(offsets, dtype=torch.int32)
    options = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=keys, max_length_k=keys)
    if positions is not None:
        options["position_ids"] = torch.tensor([positions, positions])
    with pytest.raises((TypeError, ValueError), match=message):
        build()(tokens(2, 12), use_cache=False, **options)


def test_padding_between_tokens_counts_for_a_window():
    """Packed rows leave it out, a window does not."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[:, 2:7] = 0
    function = masks.sliding_window_causal_mask_function(8)
    with pytest.raises(TypeError, match=r"sliding_window: expected at least the span of tokens .* 12 keys, got 8"):
        _masks.make_plan(batch_size=2, q_length=12, kv_length=12, mask_function=function, attention_mask=mask)
