"""Each rank's experts, and sizes that cannot be divided."""

import pytest
from vllm.config import ParallelConfig

from vllm_davinci.core.config.parsing import parse_config
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_layout import (
    ExpertLayout,
    check_expert_count,
    check_intermediate_size,
    expert_layout,
)


def test_one_rank_per_expert_puts_all_ranks_into_one_expert_group():
    layout = ExpertLayout(16, 1)
    assert layout.ep_size == 16
    assert layout.etp_groups() == [[rank] for rank in range(16)]
    assert layout.ep_groups() == [list(range(16))]


def test_all_ranks_per_expert_leave_no_expert_communication():
    layout = ExpertLayout(16, 16)
    assert layout.ep_size == 1
    assert layout.etp_groups() == [list(range(16))]
    assert layout.ep_groups() == [[rank] for rank in range(16)]


def test_four_of_sixteen_ranks_per_expert():
    layout = ExpertLayout(16, 4)
    assert layout.ep_size == 4
    assert layout.etp_groups() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.ep_groups() == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_two_of_eight_ranks_per_expert():
    layout = ExpertLayout(8, 2)
    assert layout.ep_size == 4
    assert layout.etp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.ep_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("layout", [ExpertLayout(16, 4), ExpertLayout(8, 2), ExpertLayout(3, 1)])
def test_a_ranks_numbers_are_its_places_in_the_lists(layout: ExpertLayout):
    for rank in range(layout.world_size):
        etp_group = layout.etp_groups()[layout.ep_rank(rank)]
        ep_group = layout.ep_groups()[layout.etp_rank(rank)]
        assert etp_group[layout.etp_rank(rank)] == rank
        assert ep_group[layout.ep_rank(rank)] == rank


@pytest.mark.parametrize(
    ("tensor", "data", "whole_experts", "asked", "etp_size"),
    [
        (4, 1, False, 0, 4),
        (2, 2, False, 0, 2),
        (2, 2, True, 0, 1),
        (2, 2, True, 1, 1),
        (2, 2, False, 4, 4),
        (4, 1, False, 1, 1),
        (1, 1, True, 0, 1),
    ],
)
def test_options_decide_how_many_ranks_share_an_expert(
    tensor: int, data: int, whole_experts: bool, asked: int, etp_size: int
):
    parallel = ParallelConfig(
        tensor_parallel_size=tensor,
        data_parallel_size=data,
        enable_expert_parallel=whole_experts,
        distributed_executor_backend="mp",
    )
    config = parse_config({"expert_tensor_parallel_size": asked})
    assert expert_layout(parallel, config) == ExpertLayout(tensor * data, etp_size)


def test_a_size_that_does_not_divide_the_ranks_is_an_error_that_counts_them():
    parallel = ParallelConfig(tensor_parallel_size=4, distributed_executor_backend="mp")
    config = parse_config({"expert_tensor_parallel_size": 3})
    with pytest.raises(ConfigurationError, match=r"is 3 and does not divide the 4 ranks .*divisor"):
        expert_layout(parallel, config)


def test_whole_experts_and_divided_experts_contradict_each_other():
    parallel = ParallelConfig(
        tensor_parallel_size=4, enable_expert_parallel=True, distributed_executor_backend="mp"
    )
    config = parse_config({"expert_tensor_parallel_size": 2})
    with pytest.raises(ConfigurationError, match=r"--enable-expert-parallel .* Remove one of them"):
        expert_layout(parallel, config)


def test_experts_that_cannot_be_divided_evenly_are_an_error():
    check_expert_count(60, ExpertLayout(8, 2))
    with pytest.raises(ConfigurationError, match="60 experts do not divide among 8 ranks"):
        check_expert_count(60, ExpertLayout(8, 1))


def test_indivisible_experts_are_refused_with_the_possible_sizes():
    check_intermediate_size("mlp.experts", 768, ExpertLayout(16, 8))
    with pytest.raises(
        ConfigurationError,
        match=r"mlp\.experts: .* size 36 .* 8 ranks. Of 16 ranks, 1, 2, 4 can share an expert",
    ):
        check_intermediate_size("mlp.experts", 36, ExpertLayout(16, 8))
