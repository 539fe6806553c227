"""Saved codes without a GPU: the setting, what the operators refuse and, over a stand-in, what autograd does."""

from __future__ import annotations

import pytest
import torch

import saved_codes_cases as cases
from delta_matching import dm_attn_func, save_codes, set_save_codes
from delta_matching._saved_codes import SAVE_VARIABLE
from twin_codes import codes_on_the_twin


@pytest.fixture(autouse=True)
def _default(monkeypatch):
    monkeypatch.delenv(SAVE_VARIABLE, raising=False)
    yield
    set_save_codes(None)


def test_the_setting(monkeypatch):
    assert save_codes()
    for text, expected in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv(SAVE_VARIABLE, text)
        assert save_codes() is expected
    monkeypatch.setenv(SAVE_VARIABLE, "0")
    set_save_codes(True)
    assert save_codes()
    set_save_codes(None)
    assert not save_codes()


@pytest.mark.parametrize("value", [0, 1, "1", 1.0])
def test_a_setting_is_a_bool(value):
    with pytest.raises(TypeError, match=f"^save: expected True, False or None, got {type(value).__name__}$"):
        set_save_codes(value)
    assert save_codes()


@pytest.mark.parametrize("text", ["yes", "2", "-1", " 1", "true"])
def test_a_variable_that_is_neither_0_nor_1(monkeypatch, text):
    monkeypatch.setenv(SAVE_VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{SAVE_VARIABLE}: expected 0 or 1, got '{text}'$"):
        save_codes()
    leaves = cases._leaves(torch.device("cpu"))
    dm_attn_func(*leaves).sum().backward()  # the CPU does not ask
    with codes_on_the_twin(), pytest.raises(ValueError, match=SAVE_VARIABLE):
        dm_attn_func(*leaves)
    set_save_codes(False)
    with codes_on_the_twin():
        dm_attn_func(*leaves)


def test_the_cpu_keeps_k_and_v():
    q, k, v = cases._leaves(torch.device("cpu"))
    out = dm_attn_func(q, k, v)
    assert cases._holds(out, k) and cases._holds(out, v) and not cases._keeps_codes(out)


OPTIONS = (None, True, "matched", "hopper", None)


def test_the_operator_refuses_by_name():
    q, k, v = (x.detach() for x in cases._leaves(torch.device("cpu")))
    o, _, *saved = torch.ops.delta_matching.forward(q, k, v, None, None, 0, 0, *OPTIONS)

    def call(codes, d_o=o, kv_heads=2):
        return torch.ops.delta_matching.backward_from_codes(
            d_o, q, codes, o, *saved, None, None, k.shape[1], kv_heads, *OPTIONS, True, True, True
        )

    codes = torch.zeros(2 * k.numel() * 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"^codes: expected tensors on one of cuda, got q on cpu$"):
        call(codes)
    with codes_on_the_twin():
        for wrong, kind, message in (
            (codes.view(torch.int8), TypeError, r"^codes: expected torch\.uint8, got torch\.int8$"),
            (codes.view(2, -1), ValueError, r"^codes: expected one dimension, got shape \[2, "),
            (codes.to("meta"), RuntimeError, "^codes is on meta, q on cpu: expected one device$"),
            (codes[:-1], ValueError, r"^saved\.codes_bytes: expected at least [0-9]+, got [0-9]+$"),
        ):
            with pytest.raises(kind, match=message):
                call(wrong)
        with pytest.raises(ValueError, match=r"^d_o: expected o's shape"):
            call(codes, d_o=o[:, 1:])
        with pytest.raises(ValueError, match="expected a multiple of k's heads in q"):
            call(codes, kv_heads=3)


def test_the_operator_is_one_of_torchs():
    q, k, v = (x.detach() for x in cases._leaves(torch.device("cpu")))
    with codes_on_the_twin() as stand:
        o, _, *saved = torch.ops.delta_matching.forward(q, k, v, None, None, 0, 0, *OPTIONS)
        codes = torch.cat([x.reshape(-1).view(torch.uint8) for x in (k, v)])
        arguments = (torch.ones_like(o), q, codes, o, *saved, None, None, k.shape[1], 2, *OPTIONS)
        torch.library.opcheck(torch.ops.delta_matching.backward_from_codes.default, (*arguments, True, False, True))
        assert stand.backwards > 0


@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.__name__)
def test_over_a_stand_in(case):
    with codes_on_the_twin() as stand:
        case(torch.device("cpu"))
        assert stand.forwards > 0 or case is cases.nothing_is_kept_without_a_graph
