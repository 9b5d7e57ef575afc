"""Collectives between real processes on several devices, against sums and concatenations."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANK_PROGRAM = Path(__file__).with_name("communicator_rank.py")
LIMIT_S = 180


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_collective_equals_its_definition(world_size: int):
    if torch.npu.device_count() < world_size:
        pytest.skip(f"this machine has {torch.npu.device_count()} NPUs")
    port = free_port()
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
        assert f"rank {number} of {world_size}: equal" in output, output[-3000:]
