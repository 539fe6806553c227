"""FP8 attention for training that keeps the gradient's invariant: every row of dS sums to zero.

``dm_attn_func`` and ``dm_attn_varlen_func`` are attention on Torch tensors; ``probe`` measures what FP8 does to a
layer, on Torch tensors or NumPy arrays, or to a model while it trains; ``version`` and ``numerics_version`` describe
the shared library; ``set_workspace_cap`` limits what the backward holds on a GPU, ``set_save_codes`` says what the
forward leaves for it there. Without Torch the attention functions say that it is missing, and the others work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._library import device_available, numerics_version, version
from ._probe import probe
from ._saved_codes import save_codes, set_save_codes
from ._workspace import set_workspace_cap, workspace_cap

__all__ = [
    "device_available",
    "dm_attn_func",
    "dm_attn_varlen_func",
    "numerics_version",
    "probe",
    "save_codes",
    "set_save_codes",
    "set_workspace_cap",
    "version",
    "workspace_cap",
]

_NEED_TORCH = ("dm_attn_func", "dm_attn_varlen_func")

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    # A Torch that is there but broken must say so itself.
    if _error.name != "torch":
        raise
    _has_torch = False
else:
    _has_torch = True

if TYPE_CHECKING or _has_torch:
    from .functional import dm_attn_func, dm_attn_varlen_func


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        raise ImportError(f"delta_matching.{name} needs PyTorch 2.9 or newer: pip install torch")
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'delta_matching' has no attribute {name!r}")
