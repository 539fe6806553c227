"""Which attention a config's name calls."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)

from train.attention import attend
from train.attention.simulated import Recipe, attention
from train.config import AttentionConfig

from delta_matching import dm_attn_func


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 70, heads, 64, generator=generator) for heads in (4, 2, 2))
    return 3 * q, k, v


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (AttentionConfig("per_tensor", "paper"), Recipe("per_tensor", "paper", "k")),
        (AttentionConfig("bf16_dp", "paper"), Recipe("bf16_dp", "paper", "k")),
        (AttentionConfig("stale", normaliser="unrounded"), Recipe("stale", "hopper", "qk", "unrounded")),
        (AttentionConfig("matched", simulated=True, centre="k"), Recipe("matched", "hopper", "k")),
    ],
)
def test_what_the_library_does_not_offer_is_simulated(config: AttentionConfig, recipe: Recipe) -> None:
    q, k, v = inputs()
    assert torch.equal(attend(q, k, v, config), attention(q, k, v, recipe, causal=True))


def test_the_normaliser_is_not_ignored() -> None:
    q, k, v = inputs()
    default, unrounded = (attend(q, k, v, AttentionConfig("stale", normaliser=n)) for n in ("default", "unrounded"))
    assert not torch.equal(default, unrounded)


@pytest.mark.parametrize(
    ("mode", "numerics", "centre"), [("stale", "paper", None), ("matched", "hopper", "k"), ("onepass", "hopper", None)]
)
def test_the_library_computes_the_modes(mode: str, numerics: str, centre: str | None) -> None:
    q, k, v = inputs()
    low = (x.bfloat16() for x in (q, k, v))
    wanted = dm_attn_func(*low, causal=True, mode=mode, numerics=numerics, centre=centre).float()
    assert torch.equal(attend(q, k, v, AttentionConfig(mode, numerics, centre)), wanted)
