"""The recall test, on models whose answers are known: one that looks, one that guesses, one that is broken."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.text import tokens
from train.text.recall import LETTERS, Prompt, copying, recall

TEXT = "It was a bright day, and the clocks of the town struck one after the other; nobody counted them. " * 40
BYTES = tokens.ByteTokens()
SURE = 50.0  # a logit: its probability is 1 to within FP32


class Looking:
    """Gives the token that followed the longest earlier match of what it has just read, which needs no weights."""

    def __init__(self, window: int = 12, reach: int = 1 << 30) -> None:
        self.window, self.reach, self.seen = window, reach, []

    def __call__(self, ids: Tensor) -> Tensor:
        self.seen.append(ids.clone())
        logits = torch.zeros(*ids.shape, 256)
        for row, line in enumerate(ids.tolist()):
            for at in range(1, len(line)):
                best = max(
                    (self._match(line, at, other), other) for other in range(max(0, at - self.reach), at)
                )  # fmt: skip
                if best[0] > 0:
                    logits[row, at, line[best[1] + 1]] = SURE
        return logits

    def _match(self, line: list[int], at: int, other: int) -> int:
        length = 0
        while length < min(self.window, other + 1) and line[at - length] == line[other - length]:
            length += 1
        return length


def uniform(ids: Tensor) -> Any:
    return SimpleNamespace(logits=torch.zeros(*ids.shape, 256))


def summaries(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for one in result["lengths"] for part in one["depths"]]


def test_a_model_that_looks_finds_every_value() -> None:
    result = recall(Looking(), BYTES, TEXT, [160, 200], samples=3)
    assert [part["depth"] for part in summaries(result)] == [0, 0.25, 0.5, 0.75, 1] * 2
    for part in summaries(result):
        assert part["accuracy"] == part["whole"] == 1.0 and -1e-6 < part["likelihood"] <= 0 and part["not_finite"] == 0
    for one in result["lengths"]:
        # Without the sentence there is nothing to find.
        assert one["absent"]["accuracy"] < 0.2 and one["absent"]["likelihood"] < -4
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_model_that_forgets_finds_only_what_is_near() -> None:
    result = recall(Looking(reach=60), BYTES, TEXT, [200], depths=(0.0, 1.0), samples=3)
    far, near = summaries(result)
    assert near["whole"] == 1.0 and far["whole"] == 0.0 and far["likelihood"] < near["likelihood"] - 1


def test_a_model_that_does_not_know_scores_as_chance() -> None:
    for part in summaries(recall(uniform, BYTES, TEXT, [160], samples=4)):
        assert part["accuracy"] == part["whole"] == 0.0
        assert part["likelihood"] == pytest.approx(-math.log(256), abs=1e-5)


def test_broken_numbers_are_no_scores() -> None:
    def broken(ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, 256)
        logits[0, -2] = math.nan
        return logits

    for part in summaries(recall(broken, BYTES, TEXT, [160], samples=4, batch=2)):
        assert part == {"depth": part["depth"], "accuracy": None, "whole": None, "likelihood": None, "not_finite": 2}


def test_the_same_prompts_each_time_and_for_any_batch() -> None:
    one, two, other, four = Looking(), Looking(), Looking(), Looking()
    assert recall(one, BYTES, TEXT, [160], samples=4, batch=1) == recall(two, BYTES, TEXT, [160], samples=4, batch=1)
    assert all(map(torch.equal, one.seen, two.seen))
    recall(other, BYTES, TEXT, [160], samples=4, batch=1, seed=1)
    assert not any(map(torch.equal, one.seen, other.seen))
    recall(four, BYTES, TEXT, [160], samples=4, batch=4)
    assert torch.equal(torch.cat(one.seen), torch.cat(four.seen))


@given(length=st.integers(70, 400), depth=st.none() | st.floats(0, 1), sample=st.integers(0, 99))
def test_a_prompt_has_its_length_and_the_sentence_at_its_depth(length: int, depth: float | None, sample: int) -> None:
    prompt = Prompt(BYTES, TEXT, BYTES.encode(TEXT), length, (0, 3), sample)
    ids = prompt.ids(depth)
    assert len(ids) == length and ids[-len(prompt.question) :].tolist() == prompt.question.tolist()
    text, sentence = BYTES.decode(ids), BYTES.decode(prompt.sentence)
    value = BYTES.decode(prompt.value)
    assert text.endswith(f" is {value}") and value.isdecimal() and len(value) == 4
    if depth is None:
        assert sentence not in text and text.count(value) == 1
    else:
        assert text.index(sentence) == round(depth * prompt.room) and text.count(value) == 2


def test_a_name_that_the_text_has_is_not_taken() -> None:
    first = BYTES.decode(Prompt(BYTES, TEXT, BYTES.encode(TEXT), 160, (0, 3), 0).sentence).split()[3]
    known = f"{TEXT} {first}"
    again = Prompt(BYTES, known, BYTES.encode(known), 160, (0, 3), 0)
    assert BYTES.decode(again.sentence).split()[3] != first


def test_the_value_has_the_same_tokens_where_it_is_told_and_asked() -> None:
    made = tokens.make_bpe([TEXT, "The code of Tamiro is 4821.\n\n" * 9, "0123456789 " * 9], 330)
    filler = made.encode(TEXT)
    for sample in range(20):
        prompt = Prompt(made, TEXT, filler, 120, (0, 3), sample)
        ids, value = prompt.ids(0.5).tolist(), prompt.value.tolist()
        found = [at for at in range(len(ids)) if ids[at : at + len(value)] == value]
        assert len(found) >= 2 and found[-1] == len(ids) - len(value)


def test_copying_tells_a_model_that_copies_from_one_that_does_not() -> None:
    result = copying(Looking(), BYTES, [24], gap=5, samples=3)["copying"][0]
    # The start of the second occurrence may be taken for another place with the same letter.
    assert result["second"]["accuracy"] > 0.85 and result["first"]["accuracy"] < 0.3
    knows = torch.full((256,), -SURE)
    knows[list(map(ord, LETTERS))] = 0
    alphabet = copying(lambda ids: knows.expand(*ids.shape, 256), BYTES, [8, 40], samples=3)
    assert [one["length"] for one in alphabet["copying"]] == [8, 40]
    for one in alphabet["copying"]:
        for part in (one["first"], one["second"]):
            assert part["likelihood"] == pytest.approx(-math.log(26), abs=1e-5)


def test_copying_repeats_the_segment_after_the_gap() -> None:
    model = Looking()
    copying(model, BYTES, [16], gap=3, samples=2, batch=2)
    firsts, both = model.seen
    assert both.shape == (2, 35) and torch.equal(both[:, :16], both[:, 19:]) and torch.equal(firsts, both[:, :16])
    assert set(both.unique().tolist()) <= set(map(ord, LETTERS)) and not torch.equal(both[0], both[1])


def test_a_module_is_evaluated_without_gradients_and_put_back() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
            self.modes: list[bool] = []

        def forward(self, ids: Tensor) -> Tensor:
            self.modes.append(self.training or torch.is_grad_enabled())
            return self.head(self.embed(ids))

    model = Small().train()
    recall(model, BYTES, TEXT, [120], samples=2)
    copying(model, BYTES, [9], samples=2)
    assert model.modes and not any(model.modes) and model.training and torch.is_grad_enabled()


@pytest.mark.parametrize(
    "change, match",
    [({"lengths": [20]}, "lengths: expected at least [0-9]+ tokens for the sentence and the question, got 20"),
     ({"lengths": [10**7]}, "text: expected at least 10000000 tokens to fill the prompt with, got "),
     ({"lengths": [True]}, "lengths: expected a whole number"),
     ({"depths": [1.5]}, "depths: expected numbers of 0 ... 1, got 1.5"),
     ({"depths": [math.nan]}, "depths: expected numbers of 0 ... 1, got nan"),
     ({"samples": 0}, "samples: expected"), ({"seed": -1}, "seed: expected"),
     ({"tokens": tokens.make_characters(["abc "])}, "tokens: expected a vocabulary with the letters and digits")],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], match: str) -> None:
    given = {"model": uniform, "tokens": BYTES, "text": TEXT, "lengths": [160], **change}
    with pytest.raises(ValueError, match=match) as caught:
        recall(**given)
    assert "\n" not in str(caught.value)


def test_copying_refuses_an_alphabet_without_letters() -> None:
    with pytest.raises(ValueError, match="tokens: expected a vocabulary with the letters a"):
        copying(uniform, tokens.make_characters([""]), [8])
    with pytest.raises(ValueError, match="lengths: expected a whole number of 2"):
        copying(uniform, BYTES, [1])


class Short:
    """A model of this package, as far as its context goes."""

    config = SimpleNamespace(context=200)

    def __call__(self, ids: Tensor) -> Any:
        assert ids.shape[1] <= self.config.context
        return uniform(ids)


def test_longer_than_the_context_is_refused_by_name() -> None:
    recall(Short(), BYTES, TEXT, [200], samples=1)
    with pytest.raises(ValueError, match=r"^lengths: expected lengths of at most 200 \(.* context is 200\), got 201$"):
        recall(Short(), BYTES, TEXT, [201], samples=1)
    copying(Short(), BYTES, [95], gap=10, samples=1)
    with pytest.raises(ValueError, match=r"^copying: expected lengths of at most 95 \(.* context is 200\), got 96$"):
        copying(Short(), BYTES, [96], gap=10, samples=1)


def test_unknown_letters_are_not_in_the_alphabet() -> None:
    made = tokens.make_characters(["abc"])
    model = Looking()
    copying(model, made, [30], samples=2)
    assert {int(one) for ids in model.seen for one in ids.unique()} == set(np.arange(1, 4).tolist())
