"""Transformers models on delta_matching: the bits of plain calls in every layer, errors no larger than FP8's own, and
training that follows BF16."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from attention64 import error, same_bits
from delta_matching.integrations.transformers import attention_name, register
from transformers_models import FAMILIES, Sequence, build, cached, register_noisy, spied, tokens


def whole(batch: int, length: int) -> list[Sequence]:
    return [Sequence(row, slice(length), slice(length)) for row in range(batch)]


def run(model, **inputs):
    """Logits and the gradient of each parameter."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def checkpointing(model, reentrant: bool) -> None:
    # Renamed in Transformers 5, where the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    name = "activation" if "activation" in enable.__name__ else "gradient"
    enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": reentrant}})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_the_bits_of_a_plain_call(family):
    model = build(family)
    with spied(model, whole(2, 40)) as layers:
        model(tokens(2, 40))
    assert layers == [2]


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_those_of_fp8(family):
    # What FP8 may do to this model: exact attention with random errors of the size that a direct call makes, in the
    # same layers, and what BF16 does to everything else. Twice that, since it is one draw of many.
    ids = tokens(2, 40)
    batch = dict(input_ids=ids, labels=ids, use_cache=False)
    logits, gradients = run(build(family, "eager").float(), **batch)
    noisy = run(build(family, register_noisy()).float(), **batch)
    bf16 = run(build(family, "sdpa"), **batch)
    ours = run(build(family), **batch)
    assert error(ours[0], logits) < 2 * (error(noisy[0], logits) + error(bf16[0], logits))
    for name, exact in gradients.items():
        if exact.any():
            limit = 2 * (error(noisy[1][name], exact) + error(bf16[1][name], exact))
            assert error(ours[1][name], exact) < limit, name


@pytest.mark.parametrize("mode,centre", [("matched", None), ("onepass", None), ("stale", "k"), ("consistent", "none")])
def test_names_choose_mode_and_centre(mode, centre):
    # The integration sees no more of a mode than its name; that the name arrives shows in the gradients.
    from delta_matching import dm_attn_func

    name = register(mode, centre)
    assert name == attention_name(mode, centre) and register(mode, centre) == name
    model = build(attention=name)
    ids = tokens(1, 33)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        import delta_matching.integrations.transformers as integration

        def recorded(*args, **options):
            calls.append((options["mode"], options["centre"]))
            return dm_attn_func(*args, **options)

        patch.setattr(integration, "dm_attn_func", recorded)
        model(ids)
    assert calls == [(mode, centre)] * 2


def test_the_default_is_matched():
    assert register() == "delta_matching" == attention_name("matched")
    ids = tokens(1, 33)
    results = {
        name: run(build(attention=name), input_ids=ids, labels=ids)[1] for name in ("delta_matching", register("stale"))
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not same_bits(*(gradients[name] for gradients in results.values()))


# --- Decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_decoding_follows_the_full_pass(family):
    model = build(family).eval()
    ids = tokens(2, 40)
    cache = DynamicCache(config=model.config)
    parts = []
    with torch.no_grad():
        full = model(ids).logits
        # A prompt, then several tokens at once, then one by one: each query sees what it sees in the full pass.
        for start, stop in [(0, 25), (25, 33), *((i, i + 1) for i in range(33, 40))]:
            rows = [Sequence(row, slice(stop - start), slice(stop)) for row in range(2)]
            with spied(model, rows) as layers:
                parts.append(model(ids[:, start:stop], **cached(model, cache)).logits)
            assert layers == [2]
        # The mean of K moves with every key, so codes differ; beyond FP8's error nothing does. Both carry it.
        exact = build(family, "eager").float().eval()(ids).logits
    assert error(torch.cat(parts, 1), full.float()) < 2 * error(full, exact)


@pytest.mark.parametrize("padded", [False, True])
def test_generate(padded):
    model = build().eval()
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 17)
    # The same loop by hand: equal calls give equal bits.
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    step = ids
    for new in range(5):
        with torch.no_grad():
            logits = model(step, attention_mask=mask, position_ids=positions, **cached(model, cache)).logits
        step = logits[:, -1:].argmax(-1)
        assert torch.equal(step[:, 0], out[:, 12 + new])
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        positions = positions[:, -1:] + 1


# --- With the rest of PyTorch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    ids = tokens(2, 33)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    batch = dict(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False)
    expected = run(build(), **batch)
    model = build()
    checkpointing(model, reentrant)
    logits, gradients = run(model, **batch)
    assert same_bits(logits, expected[0])
    assert all(same_bits(gradients[name], expected[1][name]) for name in gradients)


def test_autocast_runs_an_fp32_model():
    ids = tokens(2, 33)
    model = build().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, gradients = run(model, input_ids=ids, labels=ids)
        exact, _ = run(build(attention="sdpa").float(), input_ids=ids, labels=ids)
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    assert error(logits, exact) < 2 * error(build()(ids).logits, exact)


def _compiled(**batch):
    """Compiled with a backend that runs the graph as it is, so that bits may be compared; number of its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    result = run(torch.compile(build(num_hidden_layers=3), backend=counter), **batch)
    return result, counter.frame_count


@pytest.mark.parametrize("padded", [False, True])
def test_compiled(padded):
    ids = tokens(2, 33)
    batch = dict(input_ids=ids, labels=ids, use_cache=False)
    if padded:
        batch["attention_mask"] = (torch.arange(33) < torch.tensor([[33], [20]])).long()
    (logits, gradients), graphs = _compiled(**batch)
    expected = run(build(num_hidden_layers=3), **batch)
    assert same_bits(logits, expected[0])
    assert all(
        same_bits(gradient, expected[1][name.removeprefix("_orig_mod.")]) for name, gradient in gradients.items()
    )
    # One before the mask, two around reading it, and all layers in the last: a break in each would make more.
    assert graphs <= 4


def test_compiled_packing_that_cannot_be_seen_is_refused():
    ids = tokens(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    # With a cache Transformers does not look for packed sequences, and a traced layer cannot read positions.
    with pytest.raises(RuntimeError, match="position_ids: packed sequences in a compiled or captured model need"):
        _compiled(input_ids=ids, labels=ids, position_ids=positions, use_cache=True)


# --- Training --------------------------------------------------------------------------------------------------------


def losses(attention: str, seed: int, steps: int = 20) -> torch.Tensor:
    """Learn to repeat the first half of a sequence: only attention can."""
    model = build(attention=attention)
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for _ in range(steps):
        half = torch.randint(1, 16, (8, 12), generator=draw)
        ids = torch.cat([half, half], 1)
        labels = ids.masked_fill(torch.arange(24) < 12, -100)
        loss = model(ids, labels=labels, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        values.append(loss.item())
    return torch.tensor(values)


@pytest.mark.parametrize("mode", ["matched", "onepass"])
def test_training_follows_bf16(mode):
    exact = losses("sdpa", seed=0)
    ours = losses(register(mode), seed=0)
    # Noise is what other data does to the same run. FP8 must do less.
    noise = (losses("sdpa", seed=1) - exact).abs().mean()
    assert ours[-3:].mean() < 0.7 * ours[0]
    assert (ours - exact).abs().mean() < noise
