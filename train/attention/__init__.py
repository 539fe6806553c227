"""The attention of a model, by name: core.py chooses and has PyTorch's; simulated.py is FP8 in Torch operations, on
the E4M3 codes of codes.py. The library itself is the package delta_matching.
"""

from .core import attend, exact, reference, rounded

__all__ = ["attend", "exact", "reference", "rounded"]
