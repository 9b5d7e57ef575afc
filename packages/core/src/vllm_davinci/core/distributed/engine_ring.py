"""A ring of the engines of a dense model, in which each hears when the next one is gone.

Data-parallel engines of a dense model share nothing, and vLLM gives each a world of its own. Their
front end divides requests among them, on whatever hosts they are, and waits for the answers of one
whose host has failed. A gloo group that nothing else uses joins them, as
`vllm_davinci.core.distributed.fault_channel` joins the ranks of a world.
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
    """How many engines one front end has on several hosts, where they share nothing; else 1.

    By then vLLM has made such an engine's data-parallel size 1. That which it was started with is
    left in the bound of elastic expert parallelism, which a dense model does not have. Engines of
    one host have vLLM's default address, and their front end watches their processes.
    """
    is_of_ring = (
        parallel.data_parallel_size == 1
        and not parallel.local_engines_only
        and parallel.data_parallel_master_ip != ParallelConfig.data_parallel_master_ip
    )
    return int(parallel.elastic_ep_max_dp_size or 1) if is_of_ring else 1


class EngineRing:
    """One engine's place in it. The ring is joined in a thread, for which no start waits.

    Its engines meet at the port after --data-parallel-rpc-port.

    on_end: called in that thread when the next engine's process has ended, or its host is silent
    """

    def __init__(self, parallel: ParallelConfig, on_end: Callable[[Fault], None]) -> None:
        self._engine, self._size = parallel.data_parallel_index, size_of_ring(parallel)
        self._address = parallel.data_parallel_master_ip
        # vLLM tells other hosts no port of its choice where engines are not coordinated.
        self._port = parallel.data_parallel_rpc_port + 1
        self._on_end = on_end
        self._group: torch.distributed.ProcessGroup | None = None
        self._is_closed = False
        threading.Thread(target=self._join, name="other engines", daemon=True).start()

    def close(self) -> None:
        """This engine ends in order, and says so to the one that hears of its end."""
        self._is_closed = True
        if self._group is not None:
            before = (self._engine - 1) % self._size
            with suppress(RuntimeError):  # that one has ended
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
        except RuntimeError as error:  # torch's, of a store or a connection
            logger.warning(
                "The data-parallel engines have not met at %s:%d (--data-parallel-address, and the "
                "port after --data-parallel-rpc-port): nobody will notice when a host fails. %s",
                self._address,
                self._port,
                str(error).splitlines()[0],
            )
            return
        notice_silence(others)
        if len({engine.host for engine in engines}) > 1:  # else vLLM watches all of them
            self._group = group
            logger.info("%d data-parallel engines watch each other.", self._size)
            self._watch(engines[(self._engine + 1) % self._size])

    def _watch(self, following: Fault) -> None:
        assert self._group is not None
        try:
            goodbye = torch.zeros(1, dtype=torch.uint8)
            self._group.recv([goodbye], following.rank, _GOODBYE).wait(LISTENS_FOR)
        except (RuntimeError, ValueError) as error:  # gloo's
            if not self._is_closed:
                cause = SILENT if is_silence(error) else ""
                self._on_end(replace(following, cause=cause))
