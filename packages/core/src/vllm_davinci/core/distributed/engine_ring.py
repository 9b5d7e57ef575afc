"""A ring of data-parallel engines of a dense model; each notices the end of the next one.

Data-parallel engines of a dense model share nothing, and vLLM gives each its own world. Their front
end distributes requests over hosts, and would wait forever for an engine whose host has failed. A
dedicated gloo group connects them, as `vllm_davinci.core.distributed.fault_channel` connects the
ranks of a world.
"""

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import vllm.envs as envs
from vllm.config import ParallelConfig
from vllm.distributed.utils import stateless_init_torch_distributed_process_group

from vllm_davinci.core.distributed.fault_channel import LISTENS_FOR, SILENT, Fault
from vllm_davinci.core.distributed.silent_hosts import is_silence, notice_silence, open_sockets
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

_GOODBYE = 1
_GOODBYE_LIMIT = timedelta(seconds=1)


def size_of_ring(parallel: ParallelConfig) -> int:
    """Number of independent engines that one front end has on several hosts; otherwise 1.

    vLLM has already set the data-parallel size of such an engine to 1; the original size is still
    in the upper bound of elastic expert parallelism, which dense models do not use. Engines on one
    host have vLLM's default address and need no ring: their front end watches their processes.
    """
    is_of_ring = (
        parallel.data_parallel_size == 1
        and not parallel.local_engines_only
        and parallel.data_parallel_master_ip != ParallelConfig.data_parallel_master_ip
    )
    return int(parallel.elastic_ep_max_dp_size or 1) if is_of_ring else 1


class EngineRing:
    """One engine's end of the ring. A thread joins the ring, so start-up does not wait for it.

    The engines meet at the port after --data-parallel-rpc-port.

    on_end: called in that thread if the next engine's process has ended or its host is silent
    """

    def __init__(self, parallel: ParallelConfig, on_end: Callable[[Fault], None]) -> None:
        self._engine, self._size = parallel.data_parallel_index, size_of_ring(parallel)
        self._address = parallel.data_parallel_master_ip
        # Without coordination, vLLM tells other hosts no port that it chose, so the port is fixed.
        self._port = parallel.data_parallel_rpc_port + 1
        self._on_end = on_end
        self._group: torch.distributed.ProcessGroup | None = None
        self._is_closed = False
        threading.Thread(target=self._join, name="other engines", daemon=True).start()

    def close(self) -> None:
        """Tells the previous engine that this one ends normally."""
        self._is_closed = True
        if self._group is not None:
            before = (self._engine - 1) % self._size
            with suppress(RuntimeError):  # the previous engine has ended
                goodbye = self._group.send([torch.zeros(1, dtype=torch.uint8)], before, _GOODBYE)
                goodbye.wait(_GOODBYE_LIMIT)

    def _join(self) -> None:
        others = open_sockets()
        try:
            group, store = stateless_init_torch_distributed_process_group(
                self._address,
                self._port,
                self._engine,
                self._size,
                backend="gloo",
                timeout=timedelta(seconds=envs.VLLM_ENGINE_READY_TIMEOUT_S),
                return_store=True,
            )
            store.set(f"engine {self._engine}", json.dumps([socket.gethostname(), os.getpid()]))
            engines = [
                Fault(engine, *json.loads(store.get(f"engine {engine}")))
                for engine in range(self._size)
            ]
        except RuntimeError as error:  # raised by torch, for a store or a connection
            logger.warning(
                "The data-parallel engines have not met at %s:%d (--data-parallel-address, and "
                "the port after --data-parallel-rpc-port): a failed host will go unnoticed. %s",
                self._address,
                self._port,
                str(error).splitlines()[0],
            )
            return
        notice_silence(others)
        if len({engine.host for engine in engines}) > 1:  # otherwise vLLM watches all of them
            self._group = group
            logger.info("%d data-parallel engines watch each other.", self._size)
            self._watch(engines[(self._engine + 1) % self._size])

    def _watch(self, following: Fault) -> None:
        assert self._group is not None
        try:
            goodbye = torch.zeros(1, dtype=torch.uint8)
            self._group.recv([goodbye], following.rank, _GOODBYE).wait(LISTENS_FOR)
        except (RuntimeError, ValueError) as error:  # raised by gloo
            if not self._is_closed:
                cause = SILENT if is_silence(error) else ""
                self._on_end(replace(following, cause=cause))
