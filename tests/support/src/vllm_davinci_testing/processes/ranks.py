"""Runs a program once per rank of a group, on virtual devices 0 and up."""

import contextlib
import secrets
import socket
import textwrap
from pathlib import Path

from vllm_davinci_testing.processes.forked import Ended, run_together

# Limit of several ranks that import and compute on a busy machine with two cores.
LIMIT_S = 240.0

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


def free_port() -> int:
    """Returns a TCP port of this host that is free and stays so for a while.

    It is below the ports that Linux assigns to connections (32768 and up), which could be taken
    before the caller listens.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def program_of(source: str) -> str:
    """Returns the complete program that a rank runs; tests need its line numbers."""
    return _PRELUDE + textwrap.dedent(source)


def run_ranks(program: str | Path, count: int, *arguments: str, **variables: str) -> list[Ended]:
    """Runs a program as ranks 0 to count - 1 and waits for all of them.

    program:   source text, which finds torch, dist (with the process group made), os, time, rank
               and world; or a file, which makes its groups itself
    arguments: in sys.argv of a file
    variables: environment variables in addition to RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
               MASTER_PORT, which have torchrun's meaning

    Raises TimeoutError with what the ranks printed if one does not end within LIMIT_S.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(count), **variables}
    return run_together(
        [program if isinstance(program, Path) else program_of(program)] * count,
        [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)],
        LIMIT_S,
        arguments,
    )


def check_ranks(program: str | Path, count: int, *arguments: str, **variables: str) -> list[str]:
    """Like run_ranks; every rank must succeed. Returns each rank's output."""
    ended = run_ranks(program, count, *arguments, **variables)
    for rank, each in enumerate(ended):
        assert each.status == 0, f"rank {rank} ended with {each.status}:\n{each.output[-4000:]}"
    return [each.output for each in ended]
