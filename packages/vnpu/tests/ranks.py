"""Runs one program in several processes that form a group of ranks on virtual devices."""

import multiprocessing
import os
import pathlib
import socket
import tempfile
import textwrap
import time
from dataclasses import dataclass

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

# Ranks are forked from a process that has imported torch but not touched the device: importing
# takes seconds. Settings are read at the first use of the device, so each rank can have its own.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "torch.distributed"])


@dataclass
class Rank:
    """How one rank ended."""

    code: int  # exit status, negative for a signal
    text: str  # what it printed, standard output and errors together


def _be_rank(program: str, variables: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    exec(compile(program, "<rank>", "exec"), {"__name__": "__rank__"})


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run_ranks(source: str, count: int, **variables: str) -> list[Rank]:
    """Runs `source` as ranks 0 to count - 1, one device each, and waits for all, at most 150 s.

    The source finds torch, dist (an initialised process group), os, time, rank and world.
    Raises TimeoutError with what the ranks printed if one does not end in time.
    """
    program = _PRELUDE + textwrap.dedent(source)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common |= {"WORLD_SIZE": str(count), **variables}
    with tempfile.TemporaryDirectory() as directory:
        outputs = [pathlib.Path(directory) / f"rank{rank}" for rank in range(count)]
        ranks = [
            _processes.Process(target=_be_rank, args=(program, common | {"RANK": str(r)}, str(out)))
            for r, out in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + _LIMIT_S
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [r for r, process in enumerate(ranks) if process.is_alive()]
        for r in late:
            ranks[r].kill()
            ranks[r].join()
        ended = [
            Rank(process.exitcode or 0, out.read_text() if out.exists() else "")
            for process, out in zip(ranks, outputs, strict=True)
        ]
    if late:
        raise TimeoutError(f"ranks {late} still ran after {_LIMIT_S} s: {ended}")
    return ended


def check_ranks(source: str, count: int, **variables: str) -> list[str]:
    """Like run_ranks; every rank must succeed. Returns what each printed."""
    ended = run_ranks(source, count, **variables)
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} ended with {each.code}:\n{each.text[-3000:]}"
    return [each.text for each in ended]
