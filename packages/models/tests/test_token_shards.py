"""Shards of rows on real ranks: gathering restores the rows, and sums reach their owners."""

from pathlib import Path

import pytest

from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("token_shards_rank.py")


@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_cover_the_rows_once(world_size: int):
    for number, output in enumerate(check_ranks(RANK_PROGRAM, world_size)):
        assert f"rank {number} agrees" in output, output[-3000:]
