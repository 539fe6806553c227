"""The operators: shapes, strides, layouts, limits, and that the fake kernels say what the real ones do."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.testing._internal.optests import fake_check

from attention64 import MODES, TOLERANCE, attention64, bf16, error, inputs, same_bits
from delta_matching import dm_attn_func

ops = torch.ops.delta_matching


def forward_arguments(mode="matched", numerics="hopper", causal=True, varlen=False, grad=True, head_dim=64):
    if varlen:
        q, k, v = bf16(40, 4, head_dim, grad=grad), bf16(50, 2, head_dim, grad=grad), bf16(50, 2, head_dim, grad=grad)
        offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 13, 13, 37], [0, 20, 25, 50])]
        return (q, k, v, *offsets, 24, 25, None, causal, mode, numerics, None)
    q, k, v = inputs(q_len=33, k_len=47, head_dim=head_dim, grad=grad)
    return (q, k, v, None, None, 0, 0, 0.1, causal, mode, numerics, "k")


def backward_arguments(needed=(True, True, True), **kwargs):
    q, k, v, cu_q, cu_k, _, _, *options = forward_arguments(grad=False, **kwargs)
    o, _, *saved = ops.forward(q, k, v, cu_q, cu_k, 25, 25, *options)
    return (bf16(*o.shape), q, k, v, o, *saved, cu_q, cu_k, *options, *needed)


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("mode", MODES)
def test_opcheck_forward(mode, varlen):
    torch.library.opcheck(ops.forward.default, forward_arguments(mode, varlen=varlen))
    torch.library.opcheck(ops.forward.default, forward_arguments(mode, varlen=varlen, grad=False))


@pytest.mark.parametrize("varlen", [False, True], ids=["fixed", "varlen"])
@pytest.mark.parametrize("mode", ["matched", "onepass"])
@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, False)])
def test_opcheck_backward(mode, varlen, needed):
    torch.library.opcheck(ops.backward.default, backward_arguments(needed, mode=mode, varlen=varlen))


def test_opcheck_lse():
    o, lse = dm_attn_func(*inputs(grad=False), return_lse=True)
    torch.library.opcheck(ops.lse_out.default, (lse, o))
    torch.library.opcheck(ops.refuse_lse_gradient.default, (torch.zeros_like(lse),))


@pytest.mark.parametrize(
    "numerics,head_dim", [("hopper", 64), ("hopper", 128), ("hopper", 256), ("paper", 1), ("paper", 40)]
)
@pytest.mark.parametrize("mode", MODES)
def test_fake_kernel_agrees(mode, numerics, head_dim):
    fake_check(ops.forward.default, forward_arguments(mode, numerics, grad=False, head_dim=head_dim), {})
    fake_check(ops.backward.default, backward_arguments(mode=mode, numerics=numerics, head_dim=head_dim), {})


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_empty(shape, mode):
    batch, q_len, k_len = shape
    q, k, v = inputs(batch, q_len, k_len)
    o, lse = dm_attn_func(q, k, v, mode=mode, return_lse=True)
    assert o.shape == q.shape and lse.shape == (batch, 4, q_len)
    # A query without keys has nothing to attend to.
    assert not o.any() and (lse == -torch.inf).all()
    o.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and not x.grad.any()


def test_shapes_and_strides():
    q, k, v = inputs(q_len=33, k_len=47)
    for mode in MODES:
        o, lse = dm_attn_func(q, k, v, mode=mode, return_lse=True)
        assert o.shape == q.shape and o.dtype == torch.bfloat16 and o.is_contiguous()
        assert lse.shape == (2, 4, 33) and lse.dtype == torch.float32 and lse.is_contiguous()


@pytest.mark.parametrize("grad", [False, True])
def test_outputs_are_contiguous_whatever_the_inputs(grad):
    """Heads before the length, as many models keep them: dense, so that an output could take over the order."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad) for x in inputs(q_len=5))
    assert not q.is_contiguous()
    for mode in MODES:
        o, lse, *saved = ops.forward(q, k, v, None, None, 0, 0, None, True, mode, "hopper", None)
        assert all(x.is_contiguous() for x in (o, lse, *saved))
        assert dm_attn_func(q, k, v, causal=True, mode=mode).is_contiguous()
        if grad:
            assert all(x.is_contiguous() for x in torch.autograd.grad(o.sum(), (q, k, v)))


def test_o_low_is_kept_by_onepass_alone():
    for mode in MODES:
        o, *_, o_low = ops.forward(*forward_arguments(mode, grad=False))
        assert o_low.shape == (o.shape if mode == "onepass" else (0,))
        if mode == "onepass":
            # The remainder of rounding to BF16 is at most half a unit in the last place, 2^-9 of the value.
            assert o_low.any() and (o_low.abs() <= o.abs() * 2.0**-8).all()


def test_meta_device():
    q, k, v = (x.detach().to("meta") for x in inputs(q_len=33, k_len=47))
    o, lse = dm_attn_func(q, k, v, mode="onepass", return_lse=True)
    assert o.is_meta and o.shape == q.shape and o.dtype == torch.bfloat16
    assert lse.is_meta and lse.shape == (2, 4, 33) and lse.dtype == torch.float32


def _layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values with other strides."""
    b, n, h, d = x.shape
    padded = torch.full((b, n + 3, h + 1, d + 8), torch.nan, dtype=x.dtype)
    padded[:, 1 : n + 1, :h, :d] = x
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "last dimension strided": x.transpose(1, 3).contiguous().transpose(1, 3),
        "every second element": torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2],
        "part of a larger tensor": padded[:, 1 : n + 1, :h, :d],
    }


@pytest.mark.parametrize("operand", ["q", "k", "v", "d_o"])
def test_any_strides(operand):
    q, k, v = inputs(q_len=33, k_len=47, grad=False)
    tensors = {"q": q, "k": k, "v": v, "d_o": bf16(*q.shape)}

    def run(**tensors):
        leaves = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
        o = dm_attn_func(*leaves, causal=True, mode="onepass")
        return (o, *torch.autograd.grad(o, leaves, tensors["d_o"]))

    expected = run(**tensors)
    for name, strided in _layouts(tensors[operand]).items():
        assert not strided.is_contiguous()
        result = run(**{**tensors, operand: strided})
        assert all(same_bits(a, b) for a, b in zip(result, expected, strict=True)), name


def test_packed_projection():
    """q, k and v as slices of one projection, as most models make them."""
    packed = bf16(2, 33, 8, 64, grad=True)
    separate = [x.detach().clone().requires_grad_() for x in packed.split([4, 2, 2], dim=2)]
    dm_attn_func(*packed.split([4, 2, 2], dim=2), causal=True).square().sum().backward()
    dm_attn_func(*separate, causal=True).square().sum().backward()
    assert same_bits(packed.grad, torch.cat([x.grad for x in separate], dim=2))


def test_expanded_keys():
    """Stride 0 over the heads: one KV head shown twice."""
    q, k, v = inputs(q_len=33, kv_heads=1, grad=False)
    o = dm_attn_func(q, k.expand(-1, -1, 2, -1), v.expand(-1, -1, 2, -1), causal=True)
    assert same_bits(o, dm_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("mode", MODES)
def test_threads_never_change_a_bit(mode):
    q, k, v = inputs(q_len=200)
    d_o, before = bf16(*q.shape), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            o = dm_attn_func(q, k, v, causal=True, mode=mode)
            results.append((o, *torch.autograd.grad(o, (q, k, v), d_o)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_batch_elements_do_not_mix():
    q, k, v = inputs(batch=3, q_len=33, grad=False)
    whole = dm_attn_func(q, k, v, causal=True)
    for b in range(3):
        assert same_bits(whole[b : b + 1], dm_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True))


def test_nan_stays_in_its_batch_element_and_head():
    q, k, v = inputs(q_len=33, grad=False)
    clean = dm_attn_func(q, k, v)
    q[0, 5, 1, 3] = torch.nan
    o = dm_attn_func(q, k, v)
    assert o[0, :, 1].isnan().any()
    assert same_bits(o[1], clean[1]) and same_bits(o[0, :, [0, 2, 3]], clean[0, :, [0, 2, 3]])


@pytest.mark.parametrize("numerics,head_dim", [("hopper", 64), ("paper", 17)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_forward_against_float64(numerics, head_dim, causal):
    q, k, v = inputs(q_len=150, k_len=170, head_dim=head_dim, grad=False)
    o, lse = dm_attn_func(q, k, v, causal=causal, numerics=numerics, return_lse=True)
    o64, lse64 = attention64(q, k, v, causal)
    # Far below the FP8 floor would mean that the library did not use FP8 at all.
    assert 1e-2 < error(o, o64) < TOLERANCE["o"]
    # Two roundings in S of unit variance.
    assert error(lse, lse64) < TOLERANCE["o"] / lse64.abs().mean()


@pytest.mark.parametrize("mode", MODES)
def test_values_of_one(mode):
    """The weights of a row sum to one."""
    q, k, v = inputs(q_len=100, grad=False)
    o = dm_attn_func(q, k, torch.ones_like(v), causal=True, mode=mode)
    assert (o == 1).all()


def test_causal_is_bottom_right_aligned():
    q, k, v = inputs(q_len=3, k_len=5, grad=False)
    o = dm_attn_func(q, k, v, causal=True)
    v2 = v.clone()
    v2[:, 4] *= -1  # only the last query sees the last key; the sign leaves the block's scale alone
    changed = (dm_attn_func(q, k, v2, causal=True) != o).flatten(2).any(-1)
    assert changed.tolist() == [[False, False, True]] * 2


def test_more_queries_than_keys():
    q, k, v = inputs(q_len=7, k_len=5)
    o, lse = dm_attn_func(q, k, v, causal=True, return_lse=True)
    assert not o[:, :2].any() and (lse[:, :, :2] == -torch.inf).all()
    assert o[:, 2:].any() and lse[:, :, 2:].isfinite().all()
    o.float().square().sum().backward()
    assert not q.grad[:, :2].any() and k.grad.isfinite().all() and k.grad.any()


def test_one_key():
    q, k, v = inputs(q_len=4, k_len=1)
    o = dm_attn_func(q, k, v)
    assert error(o, v.repeat_interleave(2, 2).expand_as(o)) < 2.0**-4
    o.sum().backward()
    # With one key there is nothing to choose: S has no gradient but round-off, and V has that of O, summed over queries
    # and group.
    assert not q.grad.any() and k.grad.abs().max() < 1e-5
    assert error(v.grad, torch.full_like(v, 8)) < 2.0**-4


def test_softmax_scale():
    q, k, v = inputs(q_len=33, grad=False)
    assert same_bits(dm_attn_func(q, k, v, softmax_scale=0.125), dm_attn_func(q, k, v))
    scaled, _ = attention64(q, k, v, False, 0.5)
    assert error(dm_attn_func(q, k, v, softmax_scale=0.5), scaled) < 2 * TOLERANCE["o"]


def test_centre_and_numerics_reach_the_library():
    q, k, v = inputs(q_len=100, grad=False)
    k = k + 4  # a common part that softmax does not see
    results = {
        name: dm_attn_func(q, k, v, **options)
        for name, options in {
            "default": {},
            "none": {"centre": "none"},
            "k": {"centre": "k"},
            "qk": {"centre": "qk"},
            "paper": {"numerics": "paper"},
            "paper k": {"numerics": "paper", "centre": "k"},
        }.items()
    }
    assert same_bits(results["default"], results["qk"]) and same_bits(results["paper"], results["paper k"])
    distinct = [results[name] for name in ("none", "k", "qk", "paper")]
    assert all(not same_bits(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    exact, _ = attention64(q, k, v, False)
    assert error(results["none"], exact) > 1.5 * error(results["k"], exact)


OPTIONS = [dict(softmax_scale=0.2), dict(causal=True), dict(centre="none"), dict(numerics="paper")]


@pytest.mark.parametrize("options", [*({"mode": mode} for mode in MODES), *OPTIONS], ids=str)
def test_every_option_reaches_the_backward(options):
    """The gradients are those of the operator under the same options, and under no other."""
    q, k, v = inputs(q_len=100)
    d_o = bf16(*q.shape)
    grads = torch.autograd.grad(dm_attn_func(q, k, v, **options), (q, k, v), d_o)
    default = dict(softmax_scale=None, causal=False, mode="matched", numerics="hopper", centre=None)
    chosen = {**default, **options}
    q, k, v = (x.detach() for x in (q, k, v))
    o, _, *saved = ops.forward(q, k, v, None, None, 0, 0, *chosen.values())

    def backward(*values):
        return ops.backward(d_o, q, k, v, o, *saved, None, None, *values, True, True, True)

    assert all(same_bits(a, b) for a, b in zip(grads, backward(*chosen.values()), strict=True))
    if chosen != default:
        assert not all(same_bits(a, b) for a, b in zip(grads, backward(*default.values()), strict=True))


def test_o_low_reaches_the_backward():
    q, k, v = inputs(q_len=100)
    d_o = bf16(*q.shape)
    options = (None, True, "onepass", "hopper", None)
    o, _, reference, sums, o_low = ops.forward(q.detach(), k.detach(), v.detach(), None, None, 0, 0, *options)
    grads = torch.autograd.grad(dm_attn_func(q, k, v, causal=True, mode="onepass"), (q, k, v), d_o)
    for low, same in ((o_low, True), (torch.zeros_like(o_low), False)):
        result = ops.backward(d_o, q, k, v, o, reference, sums, low, None, None, *options, True, True, True)
        assert same_bits(grads[0], result[0]) == same


def test_the_gil_is_released():
    q, k, v = inputs(batch=1, q_len=1500, grad=False)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(1e-3)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        time.sleep(0.01)
        before, start = counted[0], time.perf_counter()
        dm_attn_func(q, k, v)
        passed, elapsed = counted[0] - before, time.perf_counter() - start
    finally:
        stop.set()
        thread.join()
    # Held, the counter could move only in the instants around the call.
    assert passed > 5, f"{passed} ticks in {elapsed:.3f} s"


def test_calls_from_several_threads():
    q, k, v = inputs(q_len=100, grad=False)
    expected = {mode: dm_attn_func(q, k, v, causal=True, mode=mode) for mode in MODES}
    faults: list[str] = []

    def work(mode):
        for _ in range(5):
            if not same_bits(dm_attn_func(q, k, v, causal=True, mode=mode), expected[mode]):
                faults.append(mode)
            try:
                dm_attn_func(q, k, v, mode=f"{mode}?")
            except ValueError as refused:
                if f"{mode}?" not in str(refused):
                    faults.append(str(refused))

    threads = [threading.Thread(target=work, args=(mode,)) for mode in MODES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
