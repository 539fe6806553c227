"""Padding, packed sequences, windows and caches in Transformers models: the bits of each sequence alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers import masking_utils as masks
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from attention64 import error, same_bits
from delta_matching import dm_attn_func
from delta_matching.integrations import _masks
from delta_matching.integrations.transformers import register
from transformers_models import LENGTHS, Sequence, attend, build, cached, offsets, packing, padded, spied, tokens

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


def test_positions_that_were_written_to_are_looked_at_again():
    positions, sequences = packing()
    ids, model = tokens(*positions.shape), build()
    model(ids, position_ids=positions, use_cache=True)
    positions.copy_(torch.arange(positions.shape[1]))
    rows = slice(positions.shape[1])
    with spied(model, [Sequence(0, rows, rows)]) as layers:
        model(ids, position_ids=positions, use_cache=True)
    assert layers == [2] and len(sequences) > 1


@pytest.mark.parametrize("rows", [1, 0])
def test_rows_of_padding_alone(rows):
    mask = torch.tensor([[1] * 9] * rows + [[0] * 9] * (2 - rows))
    model = build()
    with spied(model, [Sequence(0, slice(9), slice(9))] * rows) as layers:
        logits = model(tokens(2, 9), attention_mask=mask, use_cache=False).logits
    assert layers == [2] and logits.isfinite().all()


def test_plans():
    # What the mask function finds has to be in the plan, whatever a layer is told besides.
    def plan(function=masks.causal_mask_function, queries=5, keys=5, **options):
        return _masks.make_plan(batch_size=1, q_length=queries, kv_length=keys, mask_function=function, **options)

    assert plan() == (5, 5, True, None, None, None)
    if hasattr(masks, "bidirectional_mask_function"):  # Transformers 5
        assert plan(masks.bidirectional_mask_function).causal is False
    assert plan(masks.sliding_window_causal_mask_function(8)).window == 8

    def packed(*numbers):
        return masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(torch.tensor([numbers])))

    assert plan(packed(0, 0, 0, 0, 0)).rows is None
    rows = plan(packed(0, 0, 1, 1, 1)).rows
    assert rows.cu_seqlens_q.tolist() == rows.cu_seqlens_k.tolist() == [0, 2, 5] and rows.longest_k == 3
    # A cache that holds the last four keys: padding before them is gone.
    recent = dict(queries=1, keys=4, q_offset=5, kv_offset=2)
    assert plan(**recent, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]])).rows is None
    rows = plan(**recent, attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1]])).rows
    assert rows.k_rows.tolist() == [1, 2, 3] and rows.cu_seqlens_q.tolist() == [0, 1]
    with pytest.raises(ValueError, match="attention_mask: expected 5 columns, got 4"):
        plan(attention_mask=torch.ones(1, 4))


@pytest.mark.parametrize("is_causal,causal", [(None, False), (False, True), (None, True), (True, False)])
def test_causal_or_not(is_causal, causal):
    q, k, v, o = attend(is_causal=is_causal, causal=causal)
    expected = causal if is_causal is None else is_causal
    assert same_bits(o, dm_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=expected))


def test_padding_without_causality():
    # Both ways, and other queries than keys: queries are never padding.
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    q, k, v, o = attend(mask, causal=False, lengths=(5, 7))
    for row, keys in ((0, slice(3)), (1, slice(7))):
        alone = [x[row : row + 1].transpose(1, 2) for x in (q, k[:, :, keys], v[:, :, keys])]
        assert same_bits(o[row : row + 1], dm_attn_func(*alone))


def test_the_default_device_does_not_matter():
    """As after torch.set_default_device: what is looked at lies on the CPU all the same."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    plan = _masks.make_plan(
        batch_size=2, q_length=9, kv_length=9, mask_function=masks.causal_mask_function, attention_mask=mask
    )
    with torch.device("meta"):
        again = _masks.make_plan(
            batch_size=2, q_length=9, kv_length=9, mask_function=masks.causal_mask_function, attention_mask=mask
        )
    assert (
        torch.equal(plan.rows.cu_seqlens_q, again.rows.cu_seqlens_q)
        and plan.rows.longest_q == again.rows.longest_q == 9
    )
