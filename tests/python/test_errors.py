"""Every kind of failure: the right exception, one line that says what to change, and no check that -O removes."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import delta_matching
from attention64 import bf16, inputs
from delta_matching import dm_attn_func, dm_attn_varlen_func


def call(q=(2, 5, 4, 64), k=(2, 7, 2, 64), v=(2, 7, 2, 64), dtypes=(torch.bfloat16,) * 3, **options):
    q, k, v = (
        x if isinstance(x, torch.Tensor) else torch.zeros(x, dtype=t) for x, t in zip((q, k, v), dtypes, strict=True)
    )
    return dm_attn_func(q, k, v, **options)


MODES = "expected one of stale, consistent, matched, onepass"

REFUSED = [
    (dict(mode="exact"), ValueError, f"mode: {MODES}, got 'exact'"),
    (dict(mode="Matched"), ValueError, f"mode: {MODES}, got 'Matched'"),
    (dict(mode=0), TypeError, "mode: expected a name, got int"),
    (dict(numerics="fp8"), ValueError, "numerics: expected one of hopper, paper, got 'fp8'"),
    (dict(centre="v"), ValueError, "centre: expected one of none, k, qk, got 'v'"),
    (dict(centre=1), TypeError, "centre: expected a name or None, got int"),
    (dict(softmax_scale=0.0), ValueError, "softmax_scale: expected a finite value above 0, got 0.0"),
    (dict(softmax_scale=-1.0), ValueError, "softmax_scale"),
    (dict(softmax_scale=float("nan")), ValueError, "softmax_scale: expected a finite value above 0, got nan"),
    (dict(softmax_scale=float("inf")), ValueError, "softmax_scale"),
    (dict(softmax_scale=1e-60), ValueError, "softmax_scale"),  # not 0 in Python, 0 in the FP32 of the ABI
    (dict(softmax_scale=1e60), ValueError, "softmax_scale"),
    (dict(dtypes=(torch.float32,) * 3), TypeError, r"q: expected torch\.bfloat16, got torch\.float32; cast it"),
    (dict(dtypes=(torch.bfloat16, torch.float16, torch.bfloat16)), TypeError, r"k: .* got torch\.float16"),
    (dict(dtypes=(torch.bfloat16, torch.bfloat16, torch.int32)), TypeError, r"v: .* got torch\.int32"),
    (
        dict(q=(5, 4, 64)),
        ValueError,
        r"q: expected 4 dimensions \[batch, length, heads, head_dim\], got shape \[5, 4, 64\]",
    ),
    (dict(k=(2, 7, 128)), ValueError, "k: expected 4 dimensions"),
    (dict(v=(2, 6, 2, 64)), ValueError, r"v: expected k's shape \[2, 7, 2, 64\], got \[2, 6, 2, 64\]"),
    (dict(q=(3, 5, 4, 64)), ValueError, "k: expected q's batch 3, got 2"),
    (dict(q=(2, 5, 4, 128)), ValueError, "k: expected q's head_dim 128, got 64"),
    (dict(q=(2, 5, 3, 64)), ValueError, "q has 3 heads, k and v have 2: expected a multiple of k's heads in q"),
    (dict(q=(2, 5, 0, 64)), ValueError, "q has 0 heads"),
    (dict(q=(2, 5, 4, 0), k=(2, 7, 2, 0), v=(2, 7, 2, 0)), ValueError, "head_dim"),
    (dict(q=(2, 5, 4, 80), k=(2, 7, 2, 80), v=(2, 7, 2, 80)), RuntimeError, "head_dim.*80"),
    (
        dict(q=(2, 5, 4, 5000), k=(2, 7, 2, 5000), v=(2, 7, 2, 5000), numerics="paper"),
        (RuntimeError, ValueError),
        "head_dim",
    ),
    (dict(k=torch.zeros(2, 7, 2, 64, dtype=torch.bfloat16, device="meta")), RuntimeError, "k is on meta, q on cpu"),
    (
        dict(dropout_p=0.1),
        TypeError,
        "argument 'dropout_p' is refused: dropout of attention probabilities is not supported",
    ),
    (dict(dropout_p=0.0), TypeError, "dropout_p"),
    (dict(bias=None), TypeError, "bias"),
    (dict(attn_bias=None), TypeError, "attn_bias"),
    (dict(attn_mask=None), TypeError, "'attn_mask' is refused: a mask"),
    (dict(window_size=(-1, -1)), TypeError, "'window_size' is refused: a sliding window"),
    (dict(softcap=30.0), TypeError, "'softcap' is refused: capped logits"),
    (dict(sinks=None), TypeError, "'sinks' is refused: learned attention sinks"),
    (dict(is_causal=True), TypeError, "unknown argument 'is_causal'"),
]


@pytest.mark.parametrize("options,kind,message", REFUSED)
def test_refused(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call(**options)
    assert "\n" not in str(caught.value)


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        dm_attn_func(*inputs(q_len=5), 0.1)


def test_varlen_refuses_by_its_own_name():
    x, offsets = bf16(10, 2, 64), torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(TypeError, match="dm_attn_varlen_func: argument 'softcap' is refused"):
        dm_attn_varlen_func(x, x, x, offsets, offsets, 10, 10, softcap=1.0)


def test_not_a_tensor():
    x = bf16(1, 5, 2, 64)
    with pytest.raises(TypeError, match=r"k: expected a torch\.Tensor, got list"):
        dm_attn_func(x, [1.0], x)


@pytest.mark.parametrize("device", ["cuda:1", "xpu:0", "mps:0"])
def test_other_devices(device):
    """Tensors of a device that this machine lacks: Torch's fake tensors carry its name."""
    with FakeTensorMode():
        x = torch.empty(1, 5, 2, 64, dtype=torch.bfloat16, device=device)
        with pytest.raises(RuntimeError, match=f"device {device} is not supported: .* runs on cpu tensors"):
            dm_attn_func(x, x, x)


def test_offsets_on_another_device():
    x, offsets = bf16(10, 2, 64), torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens_k is on meta: expected a cpu tensor"):
        dm_attn_varlen_func(x, x, x, offsets, offsets.to("meta"), 10, 10)


def test_the_operator_itself_is_safe():
    """Calls past the functions, as a graph makes them: the same checks, since the library trusts its pointers."""
    ops = torch.ops.delta_matching
    q, k, v = inputs(q_len=5, grad=False)
    options = (None, True, "matched", "hopper", None)
    o, _, *saved = ops.forward(q, k, v, None, None, 0, 0, *options)
    needed = (True, True, True)
    good = (q, k, v, o, *saved, None, None, *options, *needed)
    with pytest.raises(ValueError, match="d_o: expected o's shape"):
        ops.backward(o[:, 1:], *good)
    with pytest.raises(TypeError, match=r"d_o: expected torch\.bfloat16"):
        ops.backward(o.float(), *good)
    with pytest.raises(ValueError, match="o: expected q's shape"):
        ops.backward(o[:, 1:], q, k, v, o[:, 1:], *saved, None, None, *options, *needed)
    with pytest.raises(ValueError, match="reference: expected"):
        ops.backward(o, q, k, v, o, saved[0][:, :, 1:], *saved[1:], None, None, *options, *needed)
    with pytest.raises(ValueError, match="o_low: expected"):
        ops.backward(o, q, k, v, o, *saved, None, None, None, True, "onepass", "hopper", None, *needed)
    with pytest.raises(ValueError, match="both or neither"):
        ops.forward(q[0], k[0], v[0], torch.tensor([0, 5], dtype=torch.int32), None, 5, 5, *options)


def test_nothing_is_left_behind_by_a_failure():
    for _ in range(3):
        with pytest.raises(RuntimeError, match="head_dim"):
            call(q=(1, 5, 2, 80), k=(1, 5, 2, 80), v=(1, 5, 2, 80))
        assert call().shape == (2, 5, 4, 64)


def _python(code: str, *flags: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env, timeout=300, check=False
    )


REFUSALS = """
import json
import torch
from delta_matching import dm_attn_func, dm_attn_varlen_func, probe, set_workspace_cap
from delta_matching.parallel import dm_attn_ulysses
x = torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16)
row = x[0]
offsets = lambda *values: torch.tensor(values, dtype=torch.int32)
leaf = lambda: x.clone().requires_grad_()
options = (True, "matched", "hopper", None)
calls = {
    "mode": lambda: dm_attn_func(x, x, x, mode="exact"),
    "dtype": lambda: dm_attn_func(x.float(), x, x),
    "shape": lambda: dm_attn_func(x, x, x[:, 1:]),
    "heads": lambda: dm_attn_func(x[:, :, :1], x, x),
    "scale": lambda: dm_attn_func(x, x, x, softmax_scale=-1.0),
    "unknown": lambda: dm_attn_func(x, x, x, dropout_p=0.5),
    "fall": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5, 3), offsets(0, 5, 5), 5, 5),
    "past": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 6), offsets(0, 5), 6, 6),
    "max": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5), offsets(0, 5), 4, 5),
    "max of k": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5), offsets(0, 5), 5, 4),
    "start": lambda: dm_attn_varlen_func(row, row, row, offsets(1, 5), offsets(0, 5), 5, 5),
    "batch": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5), offsets(0, 2, 5), 5, 5),
    "int64": lambda: dm_attn_varlen_func(row, row, row, offsets(0, 5).long(), offsets(0, 5), 5, 5),
    "head_dim": lambda: dm_attn_func(x[..., :60], x[..., :60], x[..., :60]),
    "device": lambda: dm_attn_func(x, x.to("meta"), x),
    "causal": lambda: dm_attn_func(x, x, x, causal=1),
    "numerics": lambda: dm_attn_func(x, x, x, numerics="fp8"),
    "centre": lambda: dm_attn_func(x, x, x, centre="v"),
    "list": lambda: dm_attn_func(x, [1.0], x),
    "lse": lambda: dm_attn_func(leaf(), x, x, return_lse=True)[1].sum().backward(),
    "second derivative": lambda: torch.autograd.functional.hvp(lambda y: dm_attn_func(y, x, x).float().sum(), x, x),
    "forward mode": lambda: torch.func.jvp(lambda y: dm_attn_func(y, x, x), (x,), (x,)),
    "torch.func": lambda: torch.func.grad(lambda y: dm_attn_func(y, x, x).float().sum())(x),
    "saved": lambda: torch.ops.delta_matching.backward(x, x, x, x, x, x, x, x, *(None,) * 3, *options, *(True,) * 3),
    "workspace": lambda: set_workspace_cap(0),
    "group": lambda: dm_attn_ulysses(x, x, x),
    "probe": lambda: probe(x, x, x, x[:, 1:]),
}
messages = {}
for name, call in calls.items():
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        messages[name] = f"{type(error).__name__}: {error}"
    else:
        messages[name] = "not refused"
print(json.dumps([__debug__, messages]))
"""


@pytest.mark.parametrize("flags", [("-O",), ("-OO",)])
def test_checks_do_not_vanish_when_optimised(flags):
    here: dict[str, object] = {}
    exec(REFUSALS, here)
    expected = here["messages"]
    assert len(expected) == 27 and not any(text == "not refused" for text in expected.values()), expected
    done = _python(REFUSALS, *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, expected]


def test_no_check_is_an_assert():
    """What -O removes: asserts, and code under __debug__."""
    folder = pathlib.Path(delta_matching.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            removed = isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "__debug__")
            assert not removed, f"{path.name}:{node.lineno}"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import delta_matching as dm
print(dm.version(), dm.numerics_version(), dm.device_available("cpu"), dm.__version__ == dm.version())
import numpy as np
x = np.random.default_rng(0).normal(size=(20, 2, 64))
print(sorted(dm.probe(x, x, x, x)["modes"]))
try:
    from delta_matching import dm_attn_func
except ImportError as error:
    print(error)
"""


def test_without_torch():
    done = _python(WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    expected = f"{delta_matching.version()} {delta_matching.numerics_version()} True True"
    assert first == expected
    assert second == "['consistent', 'matched', 'onepass', 'stale']"
    assert "needs PyTorch" in third


def test_neither_torch_nor_numpy_is_imported_for_the_version():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import delta_matching as d; print(d.version())"
    )
    done = _python(code)
    assert done.returncode == 0 and done.stdout.strip() == delta_matching.version(), done.stderr


def test_library_that_is_missing(tmp_path):
    code = "import delta_matching; delta_matching.version()"
    done = _python(code, DELTA_MATCHING_LIBRARY=str(tmp_path / "none.so"))
    assert "RuntimeError: DELTA_MATCHING_LIBRARY names" in done.stderr and "not a file" in done.stderr
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    done = _python(code, DELTA_MATCHING_LIBRARY=str(broken))
    assert f"RuntimeError: delta_matching cannot use the shared library {broken}" in done.stderr
    other = "libm.so.6"  # a library, but not ours
    path = next((p for p in (f"/lib/x86_64-linux-gnu/{other}", f"/lib64/{other}") if os.path.exists(p)), None)
    if path:
        done = _python(code, DELTA_MATCHING_LIBRARY=path)
        assert "RuntimeError: delta_matching cannot use the shared library" in done.stderr


@pytest.mark.skipif(
    os.environ.get("DELTA_MATCHING_TEST_INSTALLED") == "1", reason="an installed package has its library"
)
def test_source_tree_without_a_library():
    done = _python("import delta_matching; delta_matching.version()", DELTA_MATCHING_LIBRARY=None)
    assert "RuntimeError: delta_matching has no shared library" in done.stderr and "pip install" in done.stderr


def test_unknown_names_of_the_package():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        delta_matching.nothing  # noqa: B018
    assert delta_matching.__version__ == delta_matching.version()
    with pytest.raises(ValueError, match="device: expected one of cpu, cuda, got 'tpu'"):
        delta_matching.device_available("tpu")
    assert delta_matching.device_available("cpu")
