"""How much of a QK-norm's gain lies in one channel.

The logits see q_c k_c of each channel times g_q,c g_k,c, so (g_q,c g_k,c)^2 weighs the channel. A run whose keys are
pushed along one channel for long shows it here first, in the weights.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

#: Norms that multiply by 1 + weight, by the name of their class.
_ONE_PLUS = (
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "MiniMaxM3VLRMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5MoeRMSNorm",
    "Qwen3_5RMSNorm",
    "Qwen4ExpTextRMSNorm",
    "Step3p7RMSNorm",
    "T5Gemma2RMSNorm",
    "T5GemmaRMSNorm",
    "VaultGemmaRMSNorm",
)


def _norms(model: nn.Module, layer: str) -> tuple[nn.Module, nn.Module] | None:
    """q_norm and k_norm of the module that made the call, or of the nearest one around it that has both."""
    path = layer.split("#", 1)[0].split(".")
    for end in range(len(path), -1, -1):
        try:
            module = model.get_submodule(".".join(path[:end]))
        except AttributeError:  # the root's calls carry its class's name, unnamed ones a number
            continue
        q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
        if isinstance(q_norm, nn.Module) and isinstance(k_norm, nn.Module):
            return q_norm, k_norm
    return None


def gains(model: nn.Module, layer: str, offset: float | None) -> tuple[Tensor, Tensor] | None:
    """The factors of a layer's q_norm and k_norm, FP64 on the CPU, one dimension each.

    Args:
        layer: name of the layer, as its calls carry it.
        offset: what is added to a weight to make the factor; None: 1 for the norms that are known to, else 0.

    Returns None where there are no such norms, or their weights cannot be read here (sharded, missing).
    """
    found = []
    for norm in _norms(model, layer) or ():
        weight = getattr(norm, "weight", None)
        # A sharded weight is a Tensor of another type.
        if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter) or weight.dim() != 1:
            return None
        added = (1.0 if type(norm).__name__ in _ONE_PLUS else 0.0) if offset is None else offset
        found.append(weight.detach().double().cpu() + added)
    return (found[0], found[1]) if found else None


def concentration(
    of_layer: tuple[Tensor, Tensor], head_dim: int, q_heads: int, kv_heads: int, head: int
) -> dict[str, Any] | None:
    """``{"channel", "share"}``: the channel with the largest (g_q g_k)^2 of query head ``head``, and its share of their
    sum. None for gains of other sizes, and where their sum is zero or not finite.

    Gains of ``head_dim`` serve every head; those of all heads one after the other are taken apart.
    """
    parts = []
    for gain, heads, at in ((of_layer[0], q_heads, head), (of_layer[1], kv_heads, head // (q_heads // kv_heads))):
        if gain.shape[0] not in (head_dim, heads * head_dim):
            return None
        parts.append(gain if gain.shape[0] == head_dim else gain[at * head_dim : (at + 1) * head_dim])
    weight = (parts[0] * parts[1]).square()
    total = float(weight.sum())
    if not 0 < total < math.inf:
        return None
    channel = int(weight.argmax())
    return {"channel": channel, "share": float(weight[channel]) / total}
