"""A channel between all ranks of a world, beside the device, on which one says that it failed.

It is a gloo group that nothing else uses. A thread waits in it for messages, so that a step costs
nothing here. A second one waits for the next rank, of which nothing comes but the end of the
connection: a process that ends, on whatever host, is noticed by one rank, which tells the others.
So is a host that is silent.
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

# Room for a fault in JSON, of which texts that are cut to these lengths take up to 6 bytes each.
MESSAGE_BYTES = 16384
CAUSE_CHARACTERS = 1200
PLACE_LINES = 24
# Nobody waits for the thread below: it listens until the process or the group ends. gloo wants a
# number.
LISTENS_FOR = timedelta(days=365)
SILENT = (
    f"is on a host from which nothing has come for {SILENT_S} s: the host, or the network to it, "
    "has failed"
)


@dataclass(frozen=True)
class Fault:
    """A failure: how one rank's part of a step ended.

    rank, host, pid: whose, of the world that communicates
    engine:          its data-parallel engine; ranks of one engine are given the same calls
    call:            number of the call of the worker, counted from 1
    name:            method of that call; "" where the process has ended, or is what `cause` says
    place:           lines of the sources that the error passed, the innermost one last
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
        """Whether both ranks failed at the same point, with nothing launched that lacks a partner.

        Messages may differ: an error of memory names each rank's own device and bytes.
        """
        common = self.collectives.keys() & other.collectives.keys()
        return self.place == other.place and all(
            self.collectives[name] == other.collectives[name] for name in common
        )

    @property
    def who(self) -> str:
        """The rank, its process and host."""
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
    """One rank's end. Every rank of the world makes it, once, at the same place of its start.

    on_fault: called in the listening thread with a fault and the rank that told it, whose own it
              need not be
    on_end:   called in another one when the process of the next rank has ended, or its host is
              silent
    """

    def __init__(
        self, on_fault: Callable[[Fault, int], None], on_end: Callable[[Fault], None]
    ) -> None:
        self._on_fault, self._on_end = on_fault, on_end
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._device = torch.accelerator.current_device_index()  # of this thread, not of others
        others = open_sockets()
        self._group = dist.new_group(backend="gloo", group_desc="faults")
        self._ranks = [
            Fault(rank, *process)
            for rank, process in enumerate(self._gather((socket.gethostname(), os.getpid())))
        ]
        notice_silence(others)
        self._sent: list[Any] = []  # gloo reads the messages until the others have them
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
        """One of this rank, of which nothing is known yet."""
        return self._ranks[self.rank]

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def stopped(self) -> list[Fault]:
        """Those of the other ranks on this host whose processes are stopped, by SIGSTOP say."""
        here = [r for r in self._ranks if r.host == self.own.host and r != self.own]
        return [each for each in here if status_of(each.pid)[0] in ("T", "t")]

    def stopped_siblings(self) -> list[Fault]:
        """Those of the same engine: the same process has started them.

        Seen from another container, a number may be that of another program's process.
        """
        return [each for each in self.stopped() if status_of(each.pid)[1] == str(os.getppid())]

    def end_stopped_siblings(self) -> None:
        """Kills ranks of the same engine that are stopped: they cannot hear that it ends.

        vLLM waits for them otherwise: for a reply until its own limit, for their end another 20 s.
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
            except RuntimeError as error:  # it has ended
                logger.debug("Rank %d cannot be told: %s", rank, error)

    def launched_collectives(self) -> dict[str, int]:
        """How many this rank has launched on each of its process groups, by the group's name."""
        return {
            name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            for group, name in dist.distributed_c10d._world.pg_names.items()
            if group is not self._group
        }

    def leave_device_groups(self) -> None:
        """Gives up every communicator, by which a device may notice that this rank will not come.

        In a thread of its own: on a chip this may wait for what the others do.
        """
        threading.Thread(target=_abort_communicators, name="leave groups", daemon=True).start()

    def stop_device(self) -> None:
        """Ends what the device of this rank waits for, so that the host can say why.

        Without it a replay of a graph is in the hands of the device until its limit.
        """
        threading.Thread(target=_stop_device, args=(self._device,), daemon=True).start()

    def close(self) -> None:
        """From here on what comes, and who leaves, is of no interest."""
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
        """Waits for a message, of any rank unless one is given. Its rank; at the end, why."""
        try:
            work = dist.irecv(message, rank, group=self._group, tag=tag)
            assert work is not None
            work.wait(LISTENS_FOR)
            return work._source_rank()
        except (RuntimeError, ValueError) as error:  # gloo's; of a group that was destroyed
            logger.debug("The channel of faults has ended: %s", error)
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
    except RuntimeError as error:  # the process ends all the same, and has said why
        logger.debug("The device cannot be stopped: %s", error)


def status_of(pid: int) -> list[str]:
    """State, parent's number and more of a process (proc_pid_stat(5)); empty where it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["", ""]
