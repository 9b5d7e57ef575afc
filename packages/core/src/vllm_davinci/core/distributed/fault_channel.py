"""A channel, independent of the device, on which a rank tells all others of its world that it
failed.

It is a dedicated gloo group. One thread waits for messages, so steps take no longer. A second
thread waits on the connection to the next rank, on which nothing is sent: it fails if that rank's
process ends or its host falls silent, and this rank tells the others.
"""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

from vllm_davinci.core.distributed.silent_hosts import (
    SILENT_S,
    is_silence,
    notice_silence,
    open_sockets,
)
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# Size of a fault in JSON. Texts are cut to these lengths, in characters of up to 6 bytes.
MESSAGE_BYTES = 16384
CAUSE_CHARACTERS = 1200
PLACE_LINES = 24
# The thread below listens until the process or the group ends, but gloo requires a timeout.
LISTENS_FOR = timedelta(days=365)
SILENT = (
    f"is on a host that has been silent for {SILENT_S} s: the host, or the network to it, "
    "has failed"
)


@dataclass(frozen=True)
class Fault:
    """A failure: how one rank's part of a step ended.

    rank, host, pid: of the failed rank in the communicating world
    engine:          its data-parallel engine; ranks of one engine receive the same calls
    call:            number of the worker's call, from 1
    name:            method of that call; "" if the process has ended or is in the state that
                     `cause` names
    place:           source lines of the traceback, innermost last
    collectives:     process group -> collectives that the rank has launched on it
    cause:           operator and text of the error
    """

    rank: int
    host: str
    pid: int
    engine: int = 0
    call: int = 0
    name: str = ""
    place: list[str] = field(default_factory=list)
    cause: str = ""
    collectives: dict[str, int] = field(default_factory=dict)

    def is_like(self, other: "Fault") -> bool:
        """True if both ranks failed at the same point with matching collectives.

        Error texts may differ: a memory error names the rank's own device and bytes.
        """
        common = self.collectives.keys() & other.collectives.keys()
        return self.place == other.place and all(
            self.collectives[name] == other.collectives[name] for name in common
        )

    @property
    def who(self) -> str:
        """The rank, its process and its host."""
        return f"rank {self.rank} (pid {self.pid} on host {self.host})"

    def __str__(self) -> str:
        if not self.name and self.cause:
            return f"The process of {self.who} {self.cause}"
        if not self.name:
            return (
                f"The process of {self.who} has ended; its own output, or the kernel's log, says "
                "why"
            )
        return (
            f"{self.who} failed in {self.name}, call {self.call} of its worker, at "
            f"{self.place[-1]}: {self.cause}"
        )


class FaultChannel:
    """One rank's end of the channel. Every rank makes it once, at the same point of its start.

    on_fault: called in the listening thread with a fault and the rank that sent it, which may
              differ from the failed one
    on_end:   called in another thread if the process of the next rank has ended or its host is
              silent
    """

    def __init__(
        self, on_fault: Callable[[Fault, int], None], on_end: Callable[[Fault], None]
    ) -> None:
        self._on_fault, self._on_end = on_fault, on_end
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device = torch.accelerator.current_device_index()  # torch's index is per thread
        others = open_sockets()
        self._group = dist.new_group(backend="gloo", group_desc="faults")
        self._ranks = [
            Fault(rank, *process)
            for rank, process in enumerate(self._gather((socket.gethostname(), os.getpid())))
        ]
        notice_silence(others)
        self._sent: list[Any] = []  # messages that gloo still reads
        self.is_closed = False
        for listen in (self._listen, self._watch_next):
            threading.Thread(target=listen, name="faults of ranks", daemon=True).start()

    def _gather(self, own: tuple[str, int]) -> list[Any]:
        """Every rank's host and process number."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered

    @property
    def own(self) -> Fault:
        """A fault of this rank without details."""
        return self._ranks[self.rank]

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def stopped(self) -> list[Fault]:
        """The other ranks on this host whose processes are stopped, for example by SIGSTOP."""
        here = [r for r in self._ranks if r.host == self.own.host and r != self.own]
        return [each for each in here if status_of(each.pid)[0] in ("T", "t")]

    def stopped_siblings(self) -> list[Fault]:
        """Stopped ranks of the same engine: those with the same parent process.

        Seen from another container, a pid may belong to an unrelated process.
        """
        return [each for each in self.stopped() if status_of(each.pid)[1] == str(os.getppid())]

    def end_stopped_siblings(self) -> None:
        """Kills stopped ranks of the same engine, which cannot notice that it ends.

        Otherwise vLLM waits until its own timeout for their reply, and 20 s more for their end.
        """
        for each in self.stopped_siblings():
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)

    def tell(self, fault: Fault) -> None:
        """Sends a fault to every other rank. Does not wait for them."""
        text = json.dumps(asdict(fault)).encode()
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for rank in self.others:
            try:
                self._sent.append((message, dist.isend(message, rank, group=self._group)))
            except RuntimeError as error:  # that rank has ended
                logger.debug("Rank %d cannot be notified of the error: %s", rank, error)

    def launched_collectives(self) -> dict[str, int]:
        """Number of collectives that this rank has launched, by process group name."""
        return {
            name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            for group, name in dist.distributed_c10d._world.pg_names.items()
            if group is not self._group
        }

    def leave_device_groups(self) -> None:
        """Aborts every communicator, so that other devices may notice that this rank is gone.

        Runs in its own thread: on a chip it may wait for the other ranks.
        """
        threading.Thread(target=_abort_communicators, name="leave groups", daemon=True).start()

    def stop_device(self) -> None:
        """Aborts what this rank's device waits for, so that the host can report why.

        Otherwise the device holds a graph's replay until its timeout.
        """
        threading.Thread(target=_stop_device, args=(self._device,), daemon=True).start()

    def close(self) -> None:
        """From now on ignores messages and ended connections."""
        self.is_closed = True

    def _listen(self) -> None:
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        while isinstance(teller := self._receive(message), int):
            self._on_fault(Fault(**json.loads(bytes(message.tolist()).rstrip(b"\0"))), teller)

    def _watch_next(self) -> None:
        rank = (self.rank + 1) % self.world_size
        end = self._receive(torch.zeros(1, dtype=torch.uint8), rank, tag=1)
        if self.is_closed:
            return
        is_silent = isinstance(end, Exception) and is_silence(end)
        self._on_end(replace(self._ranks[rank], cause=SILENT if is_silent else ""))

    def _receive(
        self, message: torch.Tensor, rank: int | None = None, tag: int = 0
    ) -> int | Exception:
        """Waits for a message, from any rank if `rank` is None. Returns its sender, or an error."""
        try:
            work = dist.irecv(message, rank, group=self._group, tag=tag)
            assert work is not None
            work.wait(LISTENS_FOR)
            return work._source_rank()
        except (RuntimeError, ValueError) as error:  # gloo's, for a destroyed group
            logger.debug("The fault channel has ended: %s", error)
            return error


def _abort_communicators() -> None:
    npu = torch.device("npu")
    for group in list(dist.distributed_c10d._world.pg_map):
        if npu in group._device_types:
            backend: Any = group._get_backend(npu)
            backend.abort_hccl_comm("this rank has failed")


def _stop_device(device: int) -> None:
    try:
        torch_npu.npu.stop_device(device)
    except RuntimeError as error:  # the process ends anyway, and has reported the reason
        logger.debug("The device cannot be stopped: %s", error)


def status_of(pid: int) -> list[str]:
    """State, parent pid and more of a process (proc_pid_stat(5)); empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["", ""]
