"""Training steps of a Transformers model, end to end: tokens per second on delta_matching beside SDPA.

One Llama-shaped model of 0.28 billion weights in BF16, built from its config; a step is forward, backward and a fused
AdamW step on 32,768 random tokens, cut into sequences of each context length. All contenders run in this one process
on the same weights, rounds interleaved: a round times one step of each, and the median over rounds counts. SDPA is held
to cuDNN where that takes the call, else to the next backend that does; the table says which. Writes
``transformers_step.json`` (schema dmattn.transformers_step/1) and ``transformers_step.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from delta_matching import version
from delta_matching.integrations.transformers import register

MODES = ("onepass", "matched", "consistent", "stale")

NO_ATTENTION = "none"  # what a step takes without attention; the rest of the others' time is their attention

EXAMPLES = """examples:
  export DELTA_MATCHING_LIBRARY=build/cuda/src/libdelta_matching.so
  python bench/transformers_step.py                                 # onepass and matched at 2k, 8k and 32k
  python bench/transformers_step.py --modes onepass matched consistent stale --rounds 5
  python bench/transformers_step.py --contexts 8192 --head-dim 64 --out results
  python bench/transformers_step.py --device cpu                    # tiny, on the twin: only tries this script
"""


class Contender(NamedTuple):
    """An attention implementation, and the context that its steps run in."""

    label: str
    attention: str  # Transformers' attn_implementation
    inside: Callable[[], contextlib.AbstractContextManager[Any]]


class Measured(NamedTuple):
    milliseconds: list[float]
    peak_bytes: list[int]


# --- What runs -------------------------------------------------------------------------------------------------------


def build(chosen: argparse.Namespace) -> PreTrainedModel:
    """The model, BF16, on the device, in training mode."""
    heads = chosen.hidden // chosen.head_dim
    config = LlamaConfig(
        vocab_size=chosen.vocabulary,
        hidden_size=chosen.hidden,
        intermediate_size=4 * chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // chosen.group),
        head_dim=chosen.head_dim,
        max_position_embeddings=max(chosen.contexts),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(chosen.device, torch.bfloat16).train()


def step(model: PreTrainedModel, optimiser: torch.optim.Optimizer, ids: Tensor) -> None:
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def _held_to(backends: list[SDPBackend]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: sdpa_kernel(backends)


def _register_repeated() -> str:
    """SDPA with K and V repeated for each query head: for a backend that does not group queries itself."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        o = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa_repeated", attend)
    AttentionMaskInterface.register("sdpa_repeated", lambda **_: None)
    return "sdpa_repeated"


def sdpa(model: PreTrainedModel, on_gpu: bool) -> Contender:
    """SDPA on the first backend that takes the model's heads: cuDNN, FlashAttention, or PyTorch's own choice."""
    if not on_gpu:
        return Contender("sdpa", "sdpa", contextlib.nullcontext)
    ids = torch.zeros(1, 256, dtype=torch.int64, device="cuda")
    for label, attention, backend in (
        ("cudnn", "sdpa", SDPBackend.CUDNN_ATTENTION),
        ("cudnn, K and V repeated", _register_repeated(), SDPBackend.CUDNN_ATTENTION),
        ("flash", "sdpa", SDPBackend.FLASH_ATTENTION),
    ):
        model.set_attn_implementation(attention)
        inside = _held_to([backend])
        try:
            with inside():
                model(ids, labels=ids, use_cache=False).loss.backward()
        except RuntimeError as error:
            print(f"sdpa: {label} does not take this model ({str(error).splitlines()[0]})", flush=True)
            continue
        finally:
            model.zero_grad()
        return Contender(f"sdpa {label}", attention, inside)
    return Contender("sdpa default", "sdpa", contextlib.nullcontext)


def _register_none() -> str:
    """No attention: a sum of q, k and v takes its place, so that all around it runs forward and backward."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> Any:
        grouped = query.unflatten(1, (key.shape[1], -1))
        return (grouped + (key + value)[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("no_attention", attend)
    AttentionMaskInterface.register("no_attention", lambda **_: None)
    return "no_attention"


def contenders(model: PreTrainedModel, modes: list[str], on_gpu: bool) -> list[Contender]:
    ours = [Contender(f"delta_matching {mode}", register(mode), contextlib.nullcontext) for mode in modes]
    return [sdpa(model, on_gpu), *ours, Contender(NO_ATTENTION, _register_none(), contextlib.nullcontext)]


# --- Timing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _timed(on_gpu: bool, into: Measured) -> Iterator[None]:
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    yield
    if on_gpu:
        torch.cuda.synchronize()
        into.peak_bytes.append(torch.cuda.max_memory_allocated())
    into.milliseconds.append(1e3 * (time.perf_counter() - begun))


def bench(
    model: PreTrainedModel, everyone: list[Contender], context: int, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs of one context length: a list of the document's entries."""
    on_gpu = chosen.device == "cuda"
    batch = max(1, chosen.tokens // context)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)
    ids = torch.randint(model.config.vocab_size, (batch, context), device=chosen.device)
    measured = [Measured([], []) for _ in everyone]
    for index in range(chosen.warm_up + chosen.rounds):
        for contender, results in zip(everyone, measured, strict=True):
            model.set_attn_implementation(contender.attention)
            with contender.inside(), _timed(on_gpu, results if index >= chosen.warm_up else Measured([], [])):
                step(model, optimiser, ids)
    return [
        {
            "attention": contender.label,
            "context": context,
            "batch": batch,
            "step_ms": statistics.median(results.milliseconds),
            "step_ms_all": results.milliseconds,
            "tokens_per_second": batch * context / statistics.median(results.milliseconds) * 1e3,
            "peak_bytes": max(results.peak_bytes) if on_gpu else None,
        }
        for contender, results in zip(everyone, measured, strict=True)
    ]


# --- Reports ---------------------------------------------------------------------------------------------------------


def markdown(document: dict[str, Any]) -> str:
    lines = [
        f"{document['gpu']}, torch {document['torch']}, Transformers {document['transformers']}, "
        f"{document['model']['parameters'] / 1e9:.2f} billion weights, head_dim {document['model']['head_dim']}, "
        f"median of {document['rounds']} interleaved steps. `×` is the speed relative to SDPA; attention's share is "
        "what a step takes beyond one without attention.",
        "",
        "| context | batch | attention | step ms | tokens/s | × | attention's share | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    without = {run["context"]: run["step_ms"] for run in document["runs"] if run["attention"] == NO_ATTENTION}
    base = {run["context"]: run["step_ms"] for run in document["runs"] if run["attention"].startswith("sdpa")}
    for run in document["runs"]:
        peak = "–" if run["peak_bytes"] is None else f"{run['peak_bytes'] / 2**30:.1f}"
        lines.append(
            f"| {run['context']} | {run['batch']} | {run['attention']} | {run['step_ms']:.1f} | "
            f"{run['tokens_per_second']:,.0f} | {base[run['context']] / run['step_ms']:.2f} | "
            f"{1 - without[run['context']] / run['step_ms']:.0%} | {peak} |"
        )
    return "\n".join(lines) + "\n"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder for the results")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=["onepass", "matched"], help="of delta_matching")
    parser.add_argument("--contexts", type=int, nargs="+", help="sequence lengths (2048 8192 32768)")
    parser.add_argument("--tokens", type=int, help="tokens a step (32768)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each contender and length")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--hidden", type=int, help="hidden size (1024)")
    parser.add_argument("--layers", type=int, help="layers (16)")
    parser.add_argument("--head-dim", type=int, choices=[64, 128, 256], help="head dimension (128)")
    parser.add_argument("--group", type=int, default=2, help="query heads for each KV head")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries this script")
    chosen = parser.parse_args()
    full = dict(contexts=[2048, 8192, 32768], tokens=32768, hidden=1024, layers=16, head_dim=128, vocabulary=32000)
    tiny = dict(contexts=[32, 64], tokens=128, hidden=128, layers=1, head_dim=64, vocabulary=128)
    chosen.vocabulary = None
    for name, value in (full if chosen.device == "cuda" else tiny).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    return chosen


def main() -> None:
    chosen = options()
    on_gpu = chosen.device == "cuda"
    model = build(chosen)
    everyone = contenders(model, chosen.modes, on_gpu)
    document: dict[str, Any] = {
        "schema": "dmattn.transformers_step/1",
        "gpu": torch.cuda.get_device_name(0) if on_gpu else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "version": version(),
        "rounds": chosen.rounds,
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "hidden_size": chosen.hidden,
            "layers": chosen.layers,
            "q_heads": model.config.num_attention_heads,
            "kv_heads": model.config.num_key_value_heads,
            "head_dim": chosen.head_dim,
        },
        "runs": [],
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    for context in chosen.contexts:
        begun = time.perf_counter()
        document["runs"] += bench(model, everyone, context, chosen)
        print(f"context {context}: {time.perf_counter() - begun:.0f} s", flush=True)
        # After every length: what was measured stays if the time runs out.
        (chosen.out / "transformers_step.json").write_text(json.dumps(document, indent=1))
        (chosen.out / "transformers_step.md").write_text(markdown(document))
    print(markdown(document), flush=True)


if __name__ == "__main__":
    main()
