"""Shards of rows on real ranks: gathered they are the rows, and sums arrive where they belong."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANK_PROGRAM = Path(__file__).with_name("token_shards_rank.py")
LIMIT_S = 180


@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_cover_the_rows_once(world_size: int):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_PROGRAM), str(rank), str(world_size), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, output in enumerate(outputs):
        assert f"rank {number} agrees" in output, output[-3000:]
