"""Ulysses sequence parallelism over two processes: the bits of one process, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from attention64 import MODES, bf16, same_bits
from delta_matching import dm_attn_func
from delta_matching._exchange import parts_of, shares
from delta_matching.parallel import dm_attn_ulysses, dm_attn_ulysses_varlen, gather_lengths
from ranks import Ranks, words
from ulysses_cases import attend, divided, draw, packed, sliced, slices, whole


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 66, 4, 4), (1, 66, 8, 2), (1, 66, 4, 1), (2, 34, 2, 1), (1, 66, 6, 3), (3, 34, 3, 3)],
    ids=["MHA", "GQA 4:1", "MQA: one rank idles", "MQA, batch 2", "GQA, uneven units", "odd units"],
)
def test_the_bits_of_one_process(two, sizes, mode):
    half = sizes[1] // 2
    assert two.run(attend, sizes, mode, True, (half, half), True) == [[], []]


@pytest.mark.parametrize("lengths", [(40, 26), (66, 0), (1, 65)], ids=str)
def test_uneven_lengths(two, lengths):
    assert two.run(attend, (2, 66, 4, 2), "matched", False, lengths, False) == [[], []]


def attend_paper(sizes):
    x = draw(*sizes, head_dim=24)
    lengths = (sizes[1] // 2,) * 2
    mine = sliced(x, lengths, 1, dm_attn_ulysses, numerics="paper", softmax_scale=0.3, centre="none", causal=True)
    one = slices(whole(x, numerics="paper", softmax_scale=0.3, centre="none", causal=True), lengths, 1)
    return [same_bits(a, b) for a, b in zip(mine, one, strict=True)]


def test_every_option_goes_along(two):
    assert two.run(attend_paper, (1, 34, 4, 2)) == [[True] * 4] * 2


@pytest.mark.parametrize("mode", MODES)
def test_split_groups(two, mode):
    for same, worst in two.run(divided, (1, 66, 4, 1), mode):
        assert same[:2] == [True, True]  # o and dq
        assert not same[2] and not same[3] and 0 < worst < 1, (same, worst)


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("sizes", [(1, 66, 8, 4), (2, 66, 5, 5)], ids=["4 units", "10 units"])
def test_three_ranks(three, sizes):
    assert three.run(attend, sizes, "onepass", True, (22, 22, 22), True) == [[], [], []]
    assert three.run(attend, sizes, "matched", True, (1, 0, 65), False) == [[], [], []]


def test_split_groups_over_three_ranks(three):
    for same, worst in three.run(divided, (1, 66, 3, 1), "matched"):
        assert same[:2] == [True, True] and 0 < worst < 1, (same, worst)


def compiled(fullgraph):
    """Whether a compiled layer has the bits of an eager one."""
    torch._dynamo.reset()
    x = slices(draw(1, 34, 4, 2), (17, 17), 1)[:3]

    def layer(q, k, v):
        return dm_attn_ulysses(q * 2, k, v, causal=True).float().sin()

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=fullgraph)):
        leaves = [t.detach().clone().requires_grad_() for t in x]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
    return [same_bits(a, b) for a, b in zip(*results, strict=True)]


def test_compiled_callers(two):
    """The graph is cut around the exchange; where it must not be, that is an error and not a wait."""
    assert two.run(compiled, False) == [[True] * 4] * 2
    with pytest.raises(AssertionError, match="its all-to-all is not traced"):
        two.run(compiled, True)


def subsets(needed):
    x = draw(1, 34, 4, 2)
    full = slices(whole(x, causal=True), (17, 17), 1)[1:]
    *leaves, d_o = slices(x, (17, 17), 1)
    leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip(leaves, needed, strict=True)]
    dm_attn_ulysses(*leaves, causal=True).backward(d_o)
    return [
        same_bits(leaf.grad, expected) if need else leaf.grad is None
        for leaf, need, expected in zip(leaves, needed, full, strict=True)
    ]


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, True, True)])
def test_only_what_needs_a_gradient(two, needed):
    assert two.run(subsets, needed) == [[True] * 3] * 2


def without_gradients():
    x = slices(draw(1, 34, 4, 2), (17, 17), 1)[:3]
    with torch.no_grad():
        o = dm_attn_ulysses(*(t.detach().requires_grad_() for t in x), causal=True)
    return o.requires_grad, same_bits(o, dm_attn_ulysses(*x, causal=True))


def test_no_graph_without_need(two):
    assert two.run(without_gradients) == [(False, True)] * 2


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences(two, mode):
    assert two.run(packed, (1, 60, 4, 2), mode, (30, 30)) == [[True] * 4] * 2


@pytest.mark.parametrize("kv_heads", [1, 3], ids=["one rank idles", "uneven"])
def test_packed_sequences_with_padding(two, kv_heads):
    assert two.run(packed, (1, 64, 6, kv_heads), "matched", (41, 23), 4) == [[True] * 4] * 2


def in_autocast():
    x = slices(draw(1, 34, 4, 2), (17, 17), 1)[:3]
    with torch.autocast("cpu", dtype=torch.float16):
        o = dm_attn_ulysses(*(t.float() for t in x), causal=True)
    return same_bits(o, dm_attn_ulysses(*x, causal=True))


def test_autocast(two):
    assert two.run(in_autocast) == [True, True]


def empty():
    x = [torch.zeros(0, 5, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dm_attn_ulysses(*x).sum().backward()
    nothing = [torch.zeros(2, 0, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dm_attn_ulysses(*nothing).sum().backward()
    return [t.grad.shape for t in (*x, *nothing)]


def test_nothing_to_do(two):
    shapes = [torch.Size([0, 5, 4, 64])] * 3 + [torch.Size([2, 0, 4, 64])] * 3
    assert two.run(empty) == [shapes] * 2


def in_a_group_of_one():
    groups = [dist.new_group([rank]) for rank in range(2)]
    x = draw(1, 34, 4, 2)
    *leaves, _ = x
    alone = dm_attn_ulysses(*leaves, causal=True, group=groups[dist.get_rank()])
    return same_bits(alone, dm_attn_func(*leaves, causal=True)), gather_lengths(5 + dist.get_rank())


def test_other_groups(two):
    assert two.run(in_a_group_of_one) == [(True, [5, 6])] * 2


def refusals():
    """The message of each call; all are refused on both ranks, so that neither waits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    rank = dist.get_rank()
    q, k, v = (bf16(1, 17 + rank, heads, 64) for heads in (4, 2, 2))
    mesh = init_device_mesh("cpu", (2,))
    distributed = distribute_tensor(torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16), mesh, [Replicate()])
    offsets = torch.tensor([0, 40], dtype=torch.int32)
    calls = [
        lambda: dm_attn_ulysses(q, k, v),
        lambda: dm_attn_ulysses(q, k, v, lengths=(17,)),
        lambda: dm_attn_ulysses(q, k, v, lengths=(19, 19)),
        lambda: dm_attn_ulysses(q, k[:, 1:], v[:, 1:]),
        lambda: dm_attn_ulysses(q.float(), k, v),
        lambda: dm_attn_ulysses(q, k, v, mode="exact"),
        lambda: dm_attn_ulysses(q, k, v, return_lse=True),
        lambda: dm_attn_ulysses(q, k, v, dropout_p=0.1),
        lambda: dm_attn_ulysses(q, k, v, group="world"),
        lambda: dm_attn_ulysses(distributed, distributed, distributed),
        lambda: dm_attn_ulysses(*(torch.zeros(1, 4, 1, 80, dtype=torch.bfloat16) for _ in range(3))),
        lambda: dm_attn_ulysses_varlen(q[0], k[0], v[0], offsets, 40, lengths=(17, 18)),
        lambda: dm_attn_ulysses_varlen(q[0], k[0], v[0], offsets // 2, 19, lengths=(17, 18)),
    ]
    return words(calls)


def test_refused(two):
    expected = [
        "ValueError: lengths: expected every rank's number of rows where they differ, got None; the ranks hold [17, 18",
        "ValueError: lengths: expected 2 numbers of rows, one for each rank, got [17]",
        "ValueError: lengths: expected the {} rows that rank {} holds at index {}, got [19, 19]",
        "ValueError: k: expected as many rows as q",
        "TypeError: q: expected torch.bfloat16, got torch.float32",
        "ValueError: mode: expected one of",
        "TypeError: dm_attn_ulysses: unknown argument 'return_lse'",
        "TypeError: dm_attn_ulysses: argument 'dropout_p' is refused",
        "TypeError: group: expected a torch.distributed.ProcessGroup",
        "TypeError: q: expected this rank's rows as a plain tensor, got a DTensor",
        "RuntimeError: head_dim",
        "ValueError: cu_seqlens: expected a last offset of at most the 35 rows given, got 40",
        "ValueError: max_seqlen: expected at least the longest sequence, 20, got 19",
    ]
    for rank, messages in enumerate(two.run(refusals)):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start.format(17 + rank, rank, rank)), message


def test_without_a_process_group():
    x = bf16(1, 5, 2, 64)
    with pytest.raises(RuntimeError, match=r"group: no process group, call torch\.distributed\.init_process_group"):
        dm_attn_ulysses(x, x, x)


def test_shares():
    """Units over ranks, and into how many parts a unit's query heads go."""
    assert shares(7, 3) == (3, 2, 2) and shares(1, 2) == (1, 0) and sum(shares(0, 4)) == 0
    assert parts_of(8, 4, 8) == 1  # a KV head for each rank
    assert parts_of(8, 4, 16) == 2
    assert parts_of(1, 4, 8) == 4  # no more parts than query heads
    assert parts_of(3, 4, 2) == 2  # 6 parts of 2 heads, 3 each, in place of 8 heads on one and 4 on the other
    assert parts_of(4, 3, 2) == 1
