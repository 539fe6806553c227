"""A causal self-attention layer on delta_matching, trained for a few steps on a toy task. Runs on a CPU in seconds.

    python examples/torch_layer.py [--mode matched|onepass|consistent|stale] [--steps 30]

The task: each token is one of 32 symbols, and the target is the symbol before it. Only attention can see that, so the
loss falls from ln 32 = 3.5 only if the gradients of q and k are right.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from delta_matching import dm_attn_func


class Attention(nn.Module):
    """Grouped-query attention: q_heads query heads share kv_heads key and value heads. BF16 inside, FP32 outside."""

    def __init__(self, width: int, q_heads: int, kv_heads: int, head_dim: int, mode: str) -> None:
        super().__init__()
        self.heads, self.head_dim, self.mode = (q_heads, kv_heads, kv_heads), head_dim, mode
        self.qkv = nn.Linear(width, sum(self.heads) * head_dim, bias=False)
        self.out = nn.Linear(q_heads * head_dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, length, heads, head_dim], and three views of it: their strides need no copy.
        packed = self.qkv(x).to(torch.bfloat16).unflatten(-1, (sum(self.heads), self.head_dim))
        q, k, v = packed.split(self.heads, dim=2)
        o = dm_attn_func(q, k, v, causal=True, mode=self.mode)
        return self.out(o.flatten(2).to(x.dtype))


class Model(nn.Module):
    """Symbols and positions in, one layer of attention, symbols out."""

    def __init__(self, symbols: int, length: int, width: int, mode: str) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.attention = Attention(width, q_heads=2, kv_heads=1, head_dim=64, mode=mode)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(x + self.attention(x))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one FP8 attention layer on a toy task.")
    parser.add_argument("--mode", default="matched", choices=["matched", "onepass", "consistent", "stale"])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    torch.manual_seed(0)
    symbols, length = 32, 32
    model = Model(symbols, length, width=128, mode=options.mode)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(0.0)
    for step in range(options.steps):
        tokens = torch.randint(symbols, (16, length))
        logits = model(tokens)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    print(f"step {options.steps:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
