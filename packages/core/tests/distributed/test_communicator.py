"""Collectives between real processes on several devices, against sums and concatenations."""

from pathlib import Path

import pytest

from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("communicator_rank.py")


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_collective_equals_its_definition(world_size: int):
    for number, printed in enumerate(check_ranks(RANK_PROGRAM, world_size)):
        assert f"rank {number} of {world_size}: equal" in printed, printed[-3000:]
