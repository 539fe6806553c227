"""A second implementation of docs/numerics.md, in NumPy, written from that page before the C++ sources were read.

It is slow and plain: one head at a time, every rounding spelled out. Where it and the library disagree, the page, the
library or this package is wrong (tests/python/test_oracle.py).
"""
