"""train/bias/measure.py on a GPU: the same bits twice, exact in FP32, and errors of the size that the twin has."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_calls import DEVICE
from torch import Tensor

if sys.version_info < (3, 11):
    pytest.skip("train/ needs Python 3.11", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train.bias.measure import KeyColumns, Measured, chosen_weights, gradients, measure
from train.bias.statistics import noise_square
from train.config import REFERENCE, AttentionConfig, ModelConfig
from train.loop import repeatable
from train.model import Decoder

SHAPE = ModelConfig(width=128, layers=2, heads=4, kv_heads=2, head_dim=64, qk_norm=True, context=192, init_std=0.1)
MODES = ("stale", "consistent", "matched", "onepass")


def batch(at: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 50, (2, 193), generator=torch.Generator().manual_seed(at))
    return ids[:, :-1], ids[:, 1:]


def model_on(device: torch.device | str) -> Decoder:
    torch.manual_seed(1)
    return Decoder(SHAPE, AttentionConfig(), 50).to(device)


@pytest.fixture
def _repeatable():
    before = torch.are_deterministic_algorithms_enabled()
    repeatable(torch.device(DEVICE))
    yield
    torch.use_deterministic_algorithms(before)


def measured(device: torch.device | str) -> Measured:
    attentions = {mode: AttentionConfig(mode) for mode in MODES}
    return measure(model_on(device), batch, attentions, 8, against="matched")


def test_two_runs_and_the_twin(_repeatable):
    first, second, twin = measured(DEVICE), measured(DEVICE), measured("cpu")
    for mode, streams in first.moments.items():
        for key, moments in streams.items():
            np.testing.assert_array_equal(moments.gram, second.moments[mode][key].gram, err_msg=f"{mode} {key}")
            # The kernels' bits differ from the twin's, the size of their errors does not.
            ours, theirs = noise_square(moments), noise_square(twin.moments[mode][key])
            if mode in MODES and key[1] in "qkvo":
                assert ours == pytest.approx(theirs, rel=0.2), (mode, key)


def exact_gradients(device: torch.device | str) -> dict[tuple[str, str], Tensor]:
    model = model_on(device)
    model.set_attention(AttentionConfig(REFERENCE))
    columns = KeyColumns()
    with columns.watching(model, [name for name, _ in model.attention_layers()]):
        got, _ = gradients(model, chosen_weights(model, None), columns, *(x.to(device) for x in batch(0)))
    return {key: gradient.cpu().double() for key, gradient in got.items() if key[1] in "qkvo"}


def test_exact_is_fp32(_repeatable):
    """Two FP32 machines differ where q, k or v fall to another BF16 neighbour; TF32, planted here, differs by more."""
    cpu, gpu = exact_gradients("cpu"), exact_gradients(DEVICE)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        planted = exact_gradients(DEVICE)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

    def distance(got: dict[tuple[str, str], Tensor]) -> float:
        squares = [((got[key] - cpu[key]).norm() / cpu[key].norm()) ** 2 for key in cpu]
        return float(sum(squares) / len(squares)) ** 0.5

    assert distance(gpu) < 1e-3
    if torch.device(DEVICE).type == "cuda":
        assert distance(gpu) < distance(planted) / 2
