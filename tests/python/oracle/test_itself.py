"""The oracle's arithmetic against rational numbers, Torch's casts and FP64."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

from oracle import arithmetic, tensor_core
from oracle.compare import same


def test_fma_rounds_once():
    draw = np.random.default_rng(0)
    a, b, c = (np.ldexp(draw.standard_normal(4000), draw.integers(-20, 20, 4000)).astype(np.float32) for _ in range(3))
    c[:2000] = -(a[:2000] * b[:2000])  # only what the product lost is left
    c[2000:3000] = np.ldexp(a[2000:3000], 30)  # a sum near a tie of FP32 once the product is below FP64's last place
    b[2000:3000] = np.ldexp(np.float32(1), draw.integers(5, 7, 1000))
    for x, y, z, result in zip(a, b, c, arithmetic.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        off = abs(Fraction(float(result)) - exact)
        for neighbour in (np.nextafter(result, np.float32(np.inf)), np.nextafter(result, np.float32(-np.inf))):
            other = abs(Fraction(float(neighbour)) - exact)
            assert off < other or (off == other and result.view(np.int32) % 2 == 0)


def test_casts_are_torchs():
    draw = np.random.default_rng(0)
    pattern = draw.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = np.ldexp(draw.integers(-(2**9), 2**9, 50_000), draw.integers(-14, 3, 50_000)).astype(np.float32)  # has ties
    x = np.concatenate([pattern, near])
    assert same(arithmetic.to_bf16(x), torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy())
    x = x[np.abs(x) <= 448]
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn)
    assert np.array_equal(arithmetic.e4m3_bits(arithmetic.e4m3(x)), expected.view(torch.uint8).numpy())
    assert same(arithmetic.e4m3(x), expected.float().numpy())
    assert arithmetic.e4m3(np.array([449, 1e30, np.inf, -np.inf])).tolist() == [448, 448, 448, -448]


def test_exp2():
    y = np.concatenate([np.linspace(-126, 127, 200_001), np.arange(-126, 128)]).astype(np.float32)
    off = arithmetic.exp2(y) / np.exp2(y.astype(np.float64)) - 1
    assert np.abs(off).max() <= 2.2 * 2.0**-23
    assert (off[-254:] == 0).all()
    assert arithmetic.exp2(np.array([-126.1, -np.inf, 200], np.float32)).tolist() == [0, 0, 2.0**127]


def test_tensor_core():
    """Against the rule in rational numbers, one output at a time."""
    draw = np.random.default_rng(0)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    codes = codes[~np.isnan(codes)]
    a, b = (draw.choice(codes, (12, 96)) * (draw.random((12, 96)) < 0.8) for _ in range(2))
    a[6:] *= 2.0**-6 * (np.abs(a[6:]) < 2)  # subnormal codes

    def floor_log2(x):
        return (x.numerator.bit_length() - 1) - (x.denominator.bit_length() - 1)  # denominators are powers of two

    def exponent(code):
        return max(floor_log2(abs(Fraction(float(code)))), -6)

    def truncated(x, unit):
        return int(x / unit) * unit  # int() drops the fraction

    for i in range(12):
        total = Fraction(0)
        for k in range(0, 96, 32):
            pairs = [(x, y) for x, y in zip(a[i, k : k + 32], b[i, k : k + 32], strict=True) if x * y != 0]
            exponents = [exponent(x) + exponent(y) for x, y in pairs]
            largest = max([*exponents, *([floor_log2(abs(total))] if total else [])])
            unit = Fraction(2) ** (largest - 13)
            terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in pairs]
            total = sum((truncated(x, unit) for x in [*terms, total]), Fraction(0))
            if total:
                total = truncated(total, Fraction(2) ** (floor_log2(abs(total)) - 13))
        assert tensor_core.product(a[i : i + 1], b[i : i + 1])[0, 0] == float(total)
