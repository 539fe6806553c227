"""Gradients of the attention weights, exact and in each mode, over many mini-batches of fixed weights.

Exact is ``mode = "reference"``: the same model in FP32 (TF32 off), q, k and v rounded to BF16 where they enter the
attention, and softmax attention in FP32. The modes run in the same FP32 model and take the same BF16 q, k and v: the
difference is FP8 attention with its BF16 outputs, in the layer itself and in those above and below it, and not the
precision of the rest.

The column sums of the key gradient, sum over tokens j of dK_j for each KV head and channel (dK where k enters the
attention, after norm and rotation), are measured beside the weights under the name ``k_columns``: not as a difference,
since shifting all keys alike changes no softmax and they are zero in exact arithmetic, and relative to the sum of |dK|.

In stale, consistent and matched the forward is the same, and most of an error comes from there. The difference of two
modes' gradients shows what the backward's rule adds, and is measured as a stream of its own, "stale - matched".

Memory: 4 bytes x copies(B) x elements measured, for exact, each mode and each difference; with B = 256 and 1e8 weights
8 GB each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from ..config import REFERENCE, AttentionConfig
from ..model import Decoder, cross_entropy
from .statistics import BlockSums, Moments, check_batches, copies
from .table import COLUMNS, Key

Batch = Callable[[int], tuple[Tensor, Tensor]]


@dataclass
class Measured:
    """Moments by mode or difference of two (REFERENCE: of the exact gradient itself) and key; ``magnitudes``: by layer,
    the mean over batches of the exact sum over tokens of |dK|, FP64 [kv_heads * head_dim]."""

    moments: dict[str, dict[Key, Moments]]
    elements: dict[Key, int]
    magnitudes: dict[str, Tensor]
    loss: dict[str, float] = field(default_factory=dict)  # mean over batches, by mode


class KeyColumns:
    """Sums over tokens of the gradient of k, and of its size, in every layer's last backward pass."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.sizes: dict[str, Tensor] = {}

    def _take(self, name: str, gradient: Tensor) -> None:
        wide = gradient.double()
        self.sums[name] = wide.sum((0, 1)).flatten().float()
        self.sizes[name] = wide.abs().sum((0, 1)).flatten()

    @contextlib.contextmanager
    def watching(self, model: Decoder, layers: Sequence[str]) -> Iterator[None]:
        modules = [(name, module) for name, module in model.attention_layers() if name in layers]
        for name, module in modules:
            module.core = self._watched(name, module.core)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for _, module in modules:
                del module.core  # the class's own again

    def _watched(self, name: str, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k.register_hook(lambda gradient: self._take(name, gradient))
            return inner(q, k, v)

        return core


def chosen_weights(model: Decoder, layers: Sequence[int] | None) -> dict[Key, Tensor]:
    """The attention weights by key; they alone get gradients from here on."""
    by_number = {int(name.split(".")[1]): (name, module) for name, module in model.attention_layers()}
    for number in layers or ():
        if number not in by_number:
            raise ValueError(f"--layers: {number} has no attention; there are: {', '.join(map(str, by_number))}")
    model.requires_grad_(False)
    weights: dict[Key, Tensor] = {}
    for number, (name, module) in by_number.items():
        if layers is None or number in layers:
            for parameter, weight in module.named_parameters():
                weights[name, parameter.removesuffix(".weight")] = weight.requires_grad_(True)
    if not weights:
        raise ValueError("bias: the model has no attention layer")
    return weights


def gradients(
    model: Decoder, weights: dict[Key, Tensor], columns: KeyColumns, inputs: Tensor, targets: Tensor
) -> tuple[dict[Key, Tensor], Tensor]:
    """By key the gradient of the mean loss, FP32, the key columns among them; and the loss."""
    loss = cross_entropy(model(inputs), targets)
    found = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    found.update({(name, COLUMNS): sums for name, sums in columns.sums.items()})
    return found, loss.detach()


def check_finite(found: dict[Key, Tensor], mode: str, at: int) -> None:
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in found.values()])
    if not bool(norms.isfinite().all()):
        bad = norms.isfinite().logical_not().nonzero()[0].item()
        layer, parameter = list(found)[int(bad)]
        raise RuntimeError(f"bias: the gradient of {layer}.{parameter} is not finite in mode {mode}, mini-batch {at}")


def check_memory(elements: int, streams: int, batches: int, device: torch.device) -> int:
    """Bytes that the statistics take. Errors: RuntimeError where the GPU has not so many."""
    needed = 4 * copies(batches) * elements * streams
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise RuntimeError(
                f"bias: {streams} x {elements} numbers x {copies(batches)} copies take {needed / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free: choose fewer --modes or --layers"
            )
    return needed


def in_order(attentions: dict[str, AttentionConfig], against: str | None) -> dict[str, AttentionConfig]:
    """Exact first, then what the others are compared with."""
    first = {} if against is None else {against: attentions[against]}
    return {REFERENCE: AttentionConfig(REFERENCE), **first, **attentions}


def measure(
    model: Decoder,
    batch: Batch,
    attentions: dict[str, AttentionConfig],
    batches: int,
    *,
    against: str | None = None,
    layers: Sequence[int] | None = None,
    quiet: bool = True,
) -> Measured:
    """Gradients of ``batches`` mini-batches, exact and in each mode.

    Args:
        model: in FP32, on its device. Afterwards its attention is exact and only attention weights have gradients.
        batch: number n as (inputs, targets), int64 [batch, context], drawn independently of the others.
        attentions: by the name that the mode goes by.
        batches: a power of two, 4 or more.
        against: one of the modes; the difference of each other one to it is measured too. None: no differences.
        layers: numbers of the layers to measure; None: all that attend.

    Errors: ValueError for the arguments; RuntimeError for a gradient that is not finite and for too little memory.
    """
    check_batches(batches)
    weights = chosen_weights(model, layers)
    device = next(iter(weights.values())).device
    names = list(dict.fromkeys(layer for layer, _ in weights))
    sizes = {key: weight.numel() for key, weight in weights.items()}
    modules = dict(model.attention_layers())
    sizes.update({(name, COLUMNS): modules[name].kv_heads * modules[name].dim for name in names})
    ways = in_order(attentions, against)
    streams = [*ways, *(f"{mode} - {against}" for mode in attentions if against not in (None, mode))]
    check_memory(sum(sizes.values()), len(streams), batches, device)
    sums = {stream: {key: BlockSums(size, batches, device) for key, size in sizes.items()} for stream in streams}
    magnitudes = {name: torch.zeros(sizes[name, COLUMNS], dtype=torch.float64, device=device) for name in names}
    losses = {mode: torch.zeros((), dtype=torch.float64, device=device) for mode in ways}
    columns = KeyColumns()
    model.eval()
    with columns.watching(model, names), tqdm(total=batches * len(ways), unit="pass", disable=quiet or None) as bar:
        for at in range(batches):
            inputs, targets = (x.to(device) for x in batch(at))
            exact: dict[Key, Tensor] = {}
            base: dict[Key, Tensor] = {}
            for mode, attention in ways.items():
                model.set_attention(attention)
                found, loss = gradients(model, weights, columns, inputs, targets)
                check_finite(found, mode, at)
                losses[mode] += loss
                if mode == REFERENCE:
                    exact = found
                    for name in names:
                        magnitudes[name] += columns.sizes[name]
                for key, gradient in found.items():
                    whole = mode == REFERENCE or key[1] == COLUMNS
                    sums[mode][key].add(gradient if whole else gradient - exact[key])
                    if base:
                        sums[f"{mode} - {against}"][key].add(gradient - base[key])
                if mode == against:
                    base = found
                bar.update()
    model.set_attention(AttentionConfig())
    moments = {mode: {key: counter.moments() for key, counter in own.items()} for mode, own in sums.items()}
    means = {name: total.cpu() / batches for name, total in magnitudes.items()}
    return Measured(moments, sizes, means, {mode: float(total) / batches for mode, total in losses.items()})
