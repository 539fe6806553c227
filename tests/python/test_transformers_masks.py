"""Padding and packed sequences in Transformers models, and what is refused instead of ignored."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from attention64 import bf16, error, same_bits
from delta_matching.integrations import _masks
from delta_matching.integrations.transformers import register
from tiny_models import Sequence, build, cached, spied, tokens

LENGTHS = (40, 23, 31)


def padded(side: str) -> tuple[torch.Tensor, list[Sequence]]:
    """A padding mask for rows of ``LENGTHS``, and the rows that they keep."""
    longest = max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.int64)
    kept = [slice(longest - n, longest) if side == "left" else slice(n) for n in LENGTHS]
    for row, rows in enumerate(kept):
        mask[row, rows] = 1
    return mask, [Sequence(row, rows, rows) for row, rows in enumerate(kept)]


def packing() -> tuple[torch.Tensor, list[Sequence]]:
    """position_ids of sequences of ``LENGTHS`` in one row, and where they lie."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    rows = [slice(end - n, end) for n, end in zip(LENGTHS, ends, strict=True)]
    return torch.cat([torch.arange(n) for n in LENGTHS])[None], [Sequence(0, each, each) for each in rows]


def offsets() -> dict:
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))


# --- Right, bit by bit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_every_layer(side):
    mask, sequences = padded(side)
    model = build()
    with spied(model, sequences) as layers:
        model(tokens(*mask.shape), attention_mask=mask, use_cache=False)
    assert layers == [2]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("how", ["position_ids", "position_ids with a cache", "position_ids and ones", "cu_seq_lens"])
def test_packing_in_every_layer(how, family):
    positions, sequences = packing()
    options = dict(position_ids=positions, use_cache=how == "position_ids with a cache")
    if how == "cu_seq_lens":
        options |= offsets()
    if how == "position_ids and ones":
        options |= dict(attention_mask=torch.ones_like(positions))
    # Gemma3's window of 64 is larger than each sequence and smaller than their sum.
    model = build(family)
    with spied(model, sequences) as layers:
        model(tokens(*positions.shape), **options)
    assert layers == [2]


def test_packing_in_several_rows():
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    parts = [(0, slice(5)), (0, slice(5, 12)), (1, slice(12))]
    model = build()
    with spied(model, [Sequence(row, rows, rows) for row, rows in parts]) as layers:
        model(tokens(2, 12), position_ids=positions, use_cache=False)
    assert layers == [2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_a_padded_batch(side):
    mask, sequences = padded(side)
    model = build().eval()
    cache = None
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    length = mask.shape[1]
    model(tokens(*mask.shape), attention_mask=mask, **cached(model, cache))
    for new in range(1, 3):
        mask = torch.cat([mask, mask.new_ones(len(LENGTHS), 1)], 1)
        # Keys of right padding lie between the prompt and what was generated.
        keys = [torch.cat([torch.arange(length)[rows], torch.arange(length, length + new)]) for _, _, rows in sequences]
        expected = [Sequence(row, slice(1), each) for row, each in enumerate(keys)]
        positions = mask.sum(-1, keepdim=True) - 1
        with spied(model, expected) as layers:
            model(tokens(len(LENGTHS), 1), attention_mask=mask, position_ids=positions, **cached(model, cache))
        assert layers == [2]


def test_a_window_that_is_not_smaller_changes_nothing():
    ids = tokens(2, 40)
    wide, narrow = build("gemma3", sliding_window=4096), build("gemma3", sliding_window=40)
    assert same_bits(wide(ids).logits, narrow(ids).logits)


# --- The same at the level of a model --------------------------------------------------------------------------------


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


@pytest.mark.parametrize("side", ["left", "right", "packed"])
def test_together_as_alone(side):
    # Attention has the same bits (above); what is around it works on tensors of other shapes, in another order of
    # sums, so BF16's error is allowed, twice: once for each side. FP8 codes jump where a BF16 value moves by a unit in
    # its last place, which the error of FP8 against exact attention bounds; it is what BF16's is compared with.
    positions, sequences = packing() if side == "packed" else (None, padded(side)[1])
    mask = None if side == "packed" else padded(side)[0]
    ids = tokens(1, sum(LENGTHS)) if side == "packed" else tokens(*mask.shape)
    results = {}
    for attention in ("delta_matching", "eager"):
        model = build(attention=attention)
        if attention == "eager":
            model = model.float()
        alone = [model(ids[row : row + 1, rows], use_cache=False).logits[0] for row, rows, _ in sequences]
        labels = [ids[row, rows] for row, rows, _ in sequences]
        results[attention] = alone, gradients(model, summed(torch.cat(alone), torch.cat(labels)))
    model = build()
    if side == "packed":
        logits = model(ids, position_ids=positions, use_cache=False).logits
    else:
        # Positions are counted from the first token, as generate() does, so that rotary embeddings agree.
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    together = [logits[row, rows] for row, rows, _ in sequences]
    found = gradients(model, summed(torch.cat(together), torch.cat([ids[row, rows] for row, rows, _ in sequences])))
    (alone, ours), (exact, reference) = results["delta_matching"], results["eager"]
    for a, b, c in zip(together, alone, exact, strict=True):
        assert error(a, b) < error(b, c)
    for name, gradient in ours.items():
        assert error(found[name], gradient) < error(gradient, reference[name]), name


def test_without_the_mask_function_padding_would_be_lost():
    # What registering attention alone would do: Transformers drops the mask, and tokens see padding. This is what the
    # tests above would see if register() forgot the mask.
    mask, _ = padded("left")
    ids = tokens(*mask.shape)
    AttentionInterface.register("attention_alone", ALL_ATTENTION_FUNCTIONS[register()])
    assert "attention_alone" not in AttentionMaskInterface._global_mapping
    dropped = build(attention="attention_alone")(ids, attention_mask=mask, use_cache=False).logits[1, -1]
    kept, exact = (
        build(attention=x)(ids, attention_mask=mask, use_cache=False).logits[1, -1] for x in (register(), "sdpa")
    )
    assert error(dropped, exact) > 3 * error(kept, exact)


def test_a_plan_is_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(_masks, "rows_of", lambda *a, _f=_masks.rows_of: calls.append(a) or _f(*a))
    mask, _ = padded("right")
    build(num_hidden_layers=4)(tokens(*mask.shape), attention_mask=mask, use_cache=False)
    assert len(calls) == 1
    positions, _ = packing()
    build(num_hidden_layers=4)(tokens(*positions.shape), position_ids=positions, use_cache=True)
    assert len(calls) == 2


def test_a_row_of_padding_alone():
    mask = torch.tensor([[1] * 9, [0] * 9])
    model = build()
    with spied(model, [Sequence(0, slice(9), slice(9))]) as layers:
        logits = model(tokens(2, 9), attention_mask=mask, use_cache=False).logits
    assert layers == [2] and logits.isfinite().all()


# --- Refused ---------------------------------------------------------------------------------------------------------

IDS = torch.arange(1, 25).view(2, 12)
ZEROS = torch.ones(2, 12, dtype=torch.int64).tril(5)


def _static(model):
    model.eval().generate(IDS, max_new_tokens=2, do_sample=False, cache_implementation="static", disable_compile=True)


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
        (dict(dtype="float32"), {}, r"query: expected torch\.bfloat16, got torch\.float32; load the model with dtype="),
        (dict(dtype="float16"), {}, r"query: expected torch\.bfloat16, got torch\.float16"),
    ],
)
def test_refused(options, inputs, message):
    dtype = getattr(torch, options.pop("dtype", "bfloat16")) if "dtype" in options else torch.bfloat16
    model = build(**options).to(dtype)
    with pytest.raises((TypeError, ValueError), match=message):
        model(IDS, **(dict(use_cache=True) | inputs))


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
        _static(build())


def test_packing_after_a_cache_is_refused():
    from transformers import DynamicCache

    model = build().eval()
    cache = DynamicCache(config=model.config)
    model(IDS, **cached(model, cache))
    with pytest.raises(TypeError, match="position_ids: packed sequences after 12 cached tokens"):
        model(IDS, position_ids=torch.tensor([[*range(5), *range(7)]]), **cached(model, cache))


def test_attention_that_looks_ahead_in_places_is_refused():
    # Gemma3's embedding models: an or_mask_function.
    with pytest.raises(TypeError, match="or_mask_function or block_sequence_ids"):
        build("gemma3", use_bidirectional_attention=True)(IDS, use_cache=False)


def test_mask_functions_that_are_not_known_are_refused():
    from transformers import masking_utils as masks

    plan = dict(batch_size=1, q_length=4, kv_length=4)
    chunked = masks.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64))
    own = masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k > 1)
    for function, message in [
        (chunked, "attention_chunk_size"),
        (own, "and_mask_function: a mask function of one's own"),
    ]:
        with pytest.raises(TypeError, match=message):
            _masks.make_plan(mask_function=function, **plan)


def attend(mask=None, is_causal=None, causal=True, lengths=(6, 6), **options):
    """The attention function on its own, as a module with ``is_causal`` calls it."""
    q, k, v = bf16(2, 4, lengths[0], 64), *(bf16(2, 2, lengths[1], 64) for _ in range(2))
    module = torch.nn.Module()
    module.is_causal = causal
    function = ALL_ATTENTION_FUNCTIONS[register()]
    return q, k, v, function(module, q, k, v, mask, is_causal=is_causal, **options)[0]


@pytest.mark.parametrize("is_causal,causal", [(None, False), (False, True), (None, True), (True, False)])
def test_causal_or_not(is_causal, causal):
    from delta_matching import dm_attn_func

    q, k, v, o = attend(is_causal=is_causal, causal=causal)
    expected = causal if is_causal is None else is_causal
    assert same_bits(o, dm_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=expected))


def test_padding_without_causality():
    # Both ways, and other queries than keys: queries are never padding.
    from delta_matching import dm_attn_func

    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    q, k, v, o = attend(mask, causal=False, lengths=(5, 7))
    for row, keys in ((0, slice(3)), (1, slice(7))):
        alone = [x[row : row + 1].transpose(1, 2) for x in (q, k[:, :, keys], v[:, :, keys])]
        assert same_bits(o[row : row + 1], dm_attn_func(*alone))


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
