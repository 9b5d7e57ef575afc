"""Collectives between real processes on several devices, against sums and concatenations."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_collective_equals_its_definition(
    world_size: int, run_ranks: Callable[..., list[str]]
):
    for number, printed in enumerate(run_ranks("communicator_rank.py", world_size)):
        assert f"rank {number} of {world_size}: equal" in printed, printed[-3000:]
