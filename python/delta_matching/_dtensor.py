"""DTensor inputs: sharded over the batch or over whole groups of heads, each rank attends what it holds.

A rule rather than a sharding strategy of the operators: a strategy would let DTensor gather a sequence without a word.
Here nothing is moved, forward or backward: o and the gradients are placed as the inputs are, and another placement is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import _checks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, without the import that only programs with DTensors need."""
    return type(tensor) is not Tensor and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


class _Dims(NamedTuple):
    """Dimensions of q, k and v in a layout; a pack has no batch."""

    batch: int | None
    rows: int
    heads: int
    instead: str

    def of_lse(self, dim: int) -> int:
        """The dimension of lse, ``[batch, heads, rows]`` or ``[heads, rows]``, for one of q's."""
        return dim if dim == self.batch else self.heads - 1


_FIXED = _Dims(0, 1, 2, "dm_attn_ulysses")
_PACKED = _Dims(None, 0, 1, "dm_attn_ulysses_varlen")


def _check_placements(dims: _Dims, q: DTensor, k: DTensor, v: DTensor) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for name, x in (("k", k), ("v", v)):
        if x.device_mesh != q.device_mesh or tuple(x.placements) != tuple(q.placements):
            raise RuntimeError(
                f"{name}: expected q's mesh and placements {tuple(q.placements)}, got {tuple(x.placements)}"
            )
    shards = 1
    for index, placement in enumerate(q.placements):
        if type(placement) is Shard and placement.dim % q.dim() == dims.rows:
            raise RuntimeError(
                f"q: the sequence is sharded, placements {tuple(q.placements)}: shard heads or batch, or use "
                f"delta_matching.parallel.{dims.instead} on the local tensors"
            )
        over_heads = type(placement) is Shard and placement.dim % q.dim() == dims.heads
        over_batch = type(placement) is Shard and placement.dim % q.dim() == dims.batch
        if not (over_heads or over_batch or type(placement) is Replicate):
            allowed = "Replicate or a Shard of heads" + ("" if dims.batch is None else " or batch")
            raise RuntimeError(f"q: expected placements {allowed}, got {tuple(q.placements)}")
        shards *= q.device_mesh.size(index) if over_heads else 1
    kv_heads = k.shape[dims.heads]
    if kv_heads % shards != 0:
        # A shard would pair query heads with a KV head that is not theirs.
        raise RuntimeError(f"k and v have {kv_heads} heads over {shards} shards: expected a multiple of the shards")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Sequence[Tensor],
    call: Callable[..., Any],
) -> Any:
    """What ``call(q, k, v, *offsets)`` returns, o or o and lse, on each rank's own part.

    Errors: TypeError where DTensors and plain tensors mix; RuntimeError for a placement that is not a shard of the
    batch or of whole groups of heads, by its name.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not (isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v: expected DTensors all three or none, got {kinds}")
    dims = _PACKED if offsets else _FIXED
    _checks.check_inputs(q, k, v, *offsets)  # of the whole: parts may agree where the whole does not
    _check_placements(dims, q, k, v)
    for x in offsets:
        if isinstance(x, DTensor) and any(type(placement) is not Replicate for placement in x.placements):
            raise RuntimeError(f"cu_seqlens: expected a plain tensor or Replicate, got {tuple(x.placements)}")
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (q, k, v, *offsets)]
    result, mesh = call(*local), q.device_mesh

    def back(x: Tensor, shape: Sequence[int], placements: Sequence[Any]) -> Tensor:
        # Sizes are given, since shards of the batch may be uneven; contiguous, as each part is.
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    if isinstance(result, Tensor):
        return back(result, q.shape, q.placements)
    o, lse = result
    lse_shape = (*q.shape[: dims.rows], q.shape[dims.heads], q.shape[dims.rows])
    moved = [Shard(dims.of_lse(p.dim % q.dim())) if isinstance(p, Shard) else p for p in q.placements]
    return back(o, q.shape, q.placements), back(lse, lse_shape, moved)
