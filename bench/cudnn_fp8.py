"""cuDNN's FP8 attention for bench/attention.py, through cudnn-frontend's graphs: one scale a tensor, FP8 outputs.

Its calls leave out what a model would have to do around them: quantising q, k, v and dO, which is timed apart, and
choosing the scales of what it writes, which here come from nowhere (1). So these are times, not results to compare.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import cudnn
import torch
from attention import Contender, Inputs, Shape
from torch import Tensor

E4M3_MAX = 448.0


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes of a tensor and what multiplies them to dequantise, one number."""
    scale = x.abs().amax().float() / E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.view(1, 1, 1, 1)


class _Graph:
    """A graph of one operation, built, with the tensors it knows by name."""

    def __init__(self, handle: Any) -> None:
        fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        self.handle = handle
        self.graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
        self.named: dict[str, Any] = {}

    def tensor(self, name: str, like: Tensor) -> Any:
        """``like``: [batch, heads, rows, channels], any strides."""
        kind = cudnn.data_type.FP8_E4M3 if like.dtype == torch.float8_e4m3fn else cudnn.data_type.FLOAT
        self.named[name] = self.graph.tensor(
            name=name, dim=list(like.shape), stride=list(like.stride()), data_type=kind
        )
        return self.named[name]

    def output(self, name: str, made: Any, like: Tensor) -> None:
        kind = cudnn.data_type.FP8_E4M3 if like.dtype == torch.float8_e4m3fn else cudnn.data_type.FLOAT
        made.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride())).set_data_type(kind)
        self.named[name] = made

    def finish(self) -> None:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = torch.empty(max(self.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")

    def run(self, values: dict[str, Tensor]) -> None:
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        pack = {tensor: values[name] for name, tensor in self.named.items()}
        self.graph.execute(pack, self.workspace, handle=self.handle)


_FORWARD_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_BACKWARD_SCALES = (
    *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
    *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
)


class CudnnFp8(Contender):
    name = "cudnn_fp8"

    def __init__(self) -> None:
        number = cudnn.backend_version()
        self.version = f"{number // 10000}.{number // 100 % 100}.{number % 100}, frontend {cudnn.__version__}"
        self.handle = cudnn.create_handle()
        self.quantise_ms: dict[Shape, float] = {}

    @staticmethod
    def _heads_first(x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def _time_quantising(self, x: Inputs) -> float:
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for tensor in (x.q, x.k, x.v, x.d_o):
                quantise(tensor)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def setup(self, shape: Shape, x: Inputs) -> dict[str, Tensor]:
        if shape not in self.quantise_ms:
            self.quantise_ms[shape] = self._time_quantising(x)
        one = torch.ones(1, 1, 1, 1, device="cuda")
        values = dict.fromkeys((*_FORWARD_SCALES, *_BACKWARD_SCALES), one)
        for name, tensor, scale in (
            ("q", x.q, "descale_q"),
            ("k", x.k, "descale_k"),
            ("v", x.v, "descale_v"),
            ("dO", x.d_o, "descale_dO"),
        ):
            codes, values[scale] = quantise(tensor)
            values[name] = self._heads_first(codes)
        values |= {"scale_s": one * E4M3_MAX, "descale_s": one / E4M3_MAX}
        for name, like in (("o", "q"), ("dQ", "q"), ("dK", "k"), ("dV", "v")):
            values[name] = torch.empty_like(values[like])
        values["stats"] = torch.empty(shape.batch, shape.q_heads, shape.length, 1, device="cuda")
        for name in ("amax_s", "amax_o", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"):
            values[name] = torch.zeros(1, 1, 1, 1, device="cuda")
        self._graphs(shape, values)  # built here, not under a timer
        return values

    def _graphs(self, shape: Shape, values: dict[str, Tensor]) -> tuple[_Graph, _Graph]:
        return _built(self.handle, shape, *(values[name].stride() for name in ("q", "k")))

    def forward(self, shape: Shape, x: dict[str, Tensor]) -> Any:
        self._graphs(shape, x)[0].run(x)
        return x

    def backward(self, shape: Shape, x: dict[str, Tensor], left: Any) -> Any:
        self._graphs(shape, x)[1].run(x)
        return x


@functools.cache
def _built(handle: Any, shape: Shape, q_stride: tuple[int, ...], k_stride: tuple[int, ...]) -> tuple[_Graph, _Graph]:
    """Forward and backward of a shape; sizes and strides are all that is looked at."""

    def like(heads: int, stride: tuple[int, ...]) -> Tensor:
        size = (shape.batch, heads, shape.length, shape.head_dim)
        return torch.empty_strided(size, stride, dtype=torch.float8_e4m3fn, device="meta")

    q, k = like(shape.q_heads, q_stride), like(shape.kv_heads, k_stride)
    stats = torch.empty(shape.batch, shape.q_heads, shape.length, 1, device="meta")
    number = torch.empty(1, 1, 1, 1, device="meta")
    options = dict(attn_scale=shape.head_dim**-0.5, use_causal_mask=shape.causal)

    forward = _Graph(handle)
    inputs = {name: forward.tensor(name, size) for name, size in (("q", q), ("k", k), ("v", k))}
    inputs |= {name: forward.tensor(name, number) for name in _FORWARD_SCALES}
    made = forward.graph.sdpa_fp8(**inputs, is_inference=False, **options)
    for name, tensor, size in zip(("o", "stats", "amax_s", "amax_o"), made, (q, stats, number, number), strict=True):
        forward.output(name, tensor, size)
    forward.finish()

    backward = _Graph(handle)
    sizes = (("q", q), ("k", k), ("v", k), ("o", q), ("dO", q), ("stats", stats))
    inputs = {name: backward.tensor(name, size) for name, size in sizes}
    inputs |= {name: backward.tensor(name, number) for name in _BACKWARD_SCALES}
    made = backward.graph.sdpa_fp8_backward(**inputs, **options)
    names = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
    for name, tensor, size in zip(names, made, (q, k, k, *[number] * 4), strict=True):
        backward.output(name, tensor, size)
    backward.finish()
    return forward, backward
