"""A layer over several ranks: every scheme gives each replica the sums of its own tokens."""

import json
from collections.abc import Callable
from typing import Any

import pytest

# Tokens of each replica, step by step. Steps of up to eight are decodes. Uneven; one replica idle,
# with the single row of a dummy step; fewer tokens than a replica has ranks.
TWO_REPLICAS = [[5, 13], [7, 1], [1, 1], [8, 8]]
ONE_REPLICA = [[13], [3], [1]]


Launched = Callable[[int, int, list[dict[str, Any]]], list[list[dict[str, int]]]]


@pytest.fixture
def launched(run_ranks: Callable[..., list[str]]) -> Launched:
    """What rank 0 launched between ranks, per variant and step. Every rank compares its outputs."""

    def run(tensor: int, data: int, variants: list[dict[str, Any]]) -> list[list[dict[str, int]]]:
        setting = json.dumps({"tensor": tensor, "data": data, "variants": variants})
        printed = run_ranks("moe_rank.py", tensor * data, setting)
        for output in printed:
            assert "equal" in output.splitlines(), output[-4000:]
        prefix = "launched "
        lines = [line for line in printed[0].splitlines() if line.startswith(prefix)]
        return [json.loads(line.removeprefix(prefix)) for line in lines]

    return run


def test_on_one_replica_routed_and_shared_sums_are_reduced_once(launched: Launched):
    once = {"tp all_reduce": 1}
    exchanged = {"ep all_to_all": 3, **once}
    among_pairs = {"experts all_to_all": 3, **once}
    assert launched(
        4,
        1,
        [
            {"steps": ONE_REPLICA},
            {"steps": ONE_REPLICA, "options": {"expert_tensor_parallel_size": 1}},
            {"steps": ONE_REPLICA, "options": {"expert_tensor_parallel_size": 2}},
            {
                "steps": ONE_REPLICA,
                "options": {"expert_tensor_parallel_size": 1, "moe_communication": "all_to_all"},
            },
            {
                "steps": ONE_REPLICA,
                "options": {"expert_tensor_parallel_size": 2, "moe_communication": "all_to_all"},
            },
        ],
    ) == [[once] * 3] * 3 + [[exchanged] * 3, [among_pairs] * 3]


def test_two_replicas_of_one_rank_exchange_tokens(launched: Launched):
    multicast = {"dp broadcast": 4, "dp all_reduce": 1}
    gather = {"dp all_gatherv": 2, "dp reduce_scatterv": 1}
    even_gather = {"dp all_gather": 2, "dp reduce_scatter": 1}
    gathers = [gather, gather, even_gather, even_gather]
    to_experts = {"ep all_to_all": 3}
    assert launched(
        1,
        2,
        [
            {"steps": TWO_REPLICAS},
            {"steps": TWO_REPLICAS, "skewed": True},
            {"steps": TWO_REPLICAS, "options": {"moe_communication": "all_gather"}},
            {"steps": TWO_REPLICAS, "options": {"moe_communication": "multicast"}},
            {"steps": TWO_REPLICAS, "options": {"expert_tensor_parallel_size": 2}},
        ],
    ) == [
        [to_experts] * 4,
        [to_experts] * 4,
        gathers,
        [multicast] * 4,
        [multicast, *gathers[1:]],
    ]


def test_two_replicas_of_two_ranks_exchange_tokens(launched: Launched):
    reduced = {"tp all_reduce": 1}
    whole = {"expert_tensor_parallel_size": 1}
    results = launched(
        2,
        2,
        [
            {"steps": TWO_REPLICAS},
            {"steps": TWO_REPLICAS, "options": whole},
            {"steps": TWO_REPLICAS, "options": {"expert_tensor_parallel_size": 4}},
            {"steps": TWO_REPLICAS, "options": {**whole, "moe_communication": "all_gather"}},
            {"steps": TWO_REPLICAS, "options": whole, "sequence_parallel": True},
            {
                "steps": TWO_REPLICAS,
                "options": {**whole, "moe_communication": "all_gather"},
                "sequence_parallel": True,
            },
        ],
    )
    assert results[0] == [{"experts all_to_all": 3, **reduced}] * 4
    assert results[1] == [{"ep all_to_all": 3, **reduced}] * 4
    assert results[2][0] == {"dp broadcast": 4, "dp all_reduce": 1, **reduced}
    assert results[2][1] == {"dp all_gatherv": 2, "dp reduce_scatterv": 1, **reduced}
    assert results[3][0] == {"dp all_gatherv": 2, "dp reduce_scatterv": 1, **reduced}
    # Each rank has tokens of its own, whose whole sums it gets: nothing is left to reduce.
    assert results[4] == [{"ep all_to_all": 3}] * 4
    assert results[5][0] == {"ep all_gatherv": 2, "ep reduce_scatterv": 1}
