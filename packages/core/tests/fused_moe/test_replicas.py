"""Replicas of experts: which replica each row uses, and load counts per expert."""

from collections.abc import Sequence

import pytest
import torch

from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.load_record import LoadCounter
from vllm_davinci.core.fused_moe.replicas import ReplicaTable

NUM_EXPERTS, ROWS = 4, 12


def table(physical_to_logical: Sequence[int]) -> ReplicaTable:
    return ReplicaTable(physical_to_logical, NUM_EXPERTS, torch.device("npu"), ROWS)


def chosen(of: ReplicaTable, *experts: int) -> list[list[int]]:
    ids = torch.tensor([experts] * ROWS, dtype=torch.int32, device="npu")
    return of(ids).T.tolist()


@pytest.mark.parametrize(
    "placed", [[3, 1, 0, 2], [0, 1, 2, 3, 0, 1], [1, 1, 1, 0, 2, 3], [0, 0, 1, 2, 3, 0, 0, 0]]
)
def test_rows_take_the_replicas_of_their_expert_in_turn(placed: list[int]):
    of = table(placed)
    for expert in range(NUM_EXPERTS):
        replicas = [physical for physical, each in enumerate(placed) if each == expert]
        (found,) = chosen(of, expert)
        assert found == (replicas * ROWS)[:ROWS]


def test_a_new_placement_is_read_where_the_old_one_was():
    of = table([0, 1, 2, 3, 0, 1])
    address = of.numbers.data_ptr()
    of.place([3, 3, 2, 1, 0, 0])
    assert chosen(of, 3, 0) == [[0, 1] * (ROWS // 2), [4, 5] * (ROWS // 2)]
    assert of.numbers.data_ptr() == address


@pytest.mark.parametrize(
    ("tp_rank", "sequence_parallel", "weighed"),
    [(0, False, [1, 1, 1, 0]), (1, False, []), (1, True, [0, 0, 1, 1])],
)
def test_tokens_count_once_among_ranks_and_padding_never(tp_rank, sequence_parallel, weighed):
    weights = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1], dtype=torch.int32)[:, None].npu()
    load = torch.zeros(6, dtype=torch.int32, device="npu")
    counter = LoadCounter(load, weights, tp_rank, sequence_parallel)
    ids = torch.tensor([[5], [5], [2], [0]], dtype=torch.int32, device="npu")
    counter.add(ids, 0, LocalDispatcher(), num_tokens=4)
    expected = torch.zeros(6, dtype=torch.int32)
    for weight, (expert,) in zip(weighed, ids.tolist(), strict=False):
        expected[expert] += weight
    assert torch.equal(load.cpu(), expected)
