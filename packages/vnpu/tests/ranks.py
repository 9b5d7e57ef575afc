"""Runs one program in several processes that form a group of ranks on virtual devices."""

import socket
import textwrap

from forked import Ended, run_together

_LIMIT_S = 60.0

_PRELUDE = """
import os
import time
import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.npu.set_device(rank)
dist.init_process_group("hccl")
"""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def program_of(source: str) -> str:
    """The whole program that a rank runs."""
    return _PRELUDE + textwrap.dedent(source)


def run_ranks(source: str, count: int, **variables: str) -> list[Ended]:
    """Runs `source` as ranks 0 to count - 1, one device each, and waits for all, at most 60 s.

    The source finds torch, dist (an initialised process group), os, time, rank and world.
    Raises TimeoutError with what the ranks printed if one does not end in time.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common |= {"WORLD_SIZE": str(count), **variables}
    return run_together(
        [program_of(source)] * count, [common | {"RANK": str(r)} for r in range(count)], _LIMIT_S
    )


def check_ranks(source: str, count: int, **variables: str) -> list[str]:
    """Like run_ranks; every rank must succeed. Returns what each printed."""
    ended = run_ranks(source, count, **variables)
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} ended with {each.code}:\n{each.text[-3000:]}"
    return [each.text for each in ended]
