"""Collectives that alternate with the ubatches' computation."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.distributed.host_address import may_span_hosts

C = TypeVar("C")
T = TypeVar("T")


class UbatchCommunicator(DeviceCommunicatorBase):
    """A group of NPUs whose collectives all pass through `_collective`.

    A collective runs on HCCL's own stream, which waits for the current one. The current stream then
    waits for it: at once, or, in a ubatch, after the other ubatches have launched their
    computation.
    """

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        global_ranks: list[int] | None = None,
        global_world_size: int | None = None,
        use_all2all: bool = False,
    ) -> None:
        super().__init__(
            cpu_group,
            device,
            device_group,
            unique_name,
            global_ranks,
            global_world_size,
            use_all2all,
        )
        config = get_current_vllm_config_or_none()
        uses_ubatches = config is not None and get_config(config).dbo.enabled
        self._stream_scheduler = components.stream_scheduler() if uses_ubatches else None
        # HCCL gathers and scatters unequal parts only within one server, and on A2 torch_npu
        # replaces it by one broadcast per rank. Source: HCCL's documentation of HcclAllGatherV.
        self.pads_unequal_parts = config is not None and may_span_hosts(config.parallel_config)
        if self.use_all2all:
            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def _collective(self, name: str, begin: Callable[[], Any], waits: bool = True) -> None:
        """Runs one collective.

        name:  name of the collective, for counting
        begin: enqueues it with async_op=True and returns its handle; holds the tensors that it
               reads and writes, which must be allocated before
        waits: False: the ubatch continues at once, and the caller waits for the handle
        """
        if self._stream_scheduler is None:
            begin().wait()
        else:
            self._stream_scheduler.communicate(begin, on="library", waits=waits)

    def launch_own(
        self, launch: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Launches an operator that communicates and allocates its results itself.

        launch: enqueues it; the caller holds its arguments until this returns
        Returns the results, for use on the current stream.
        """
        if self._stream_scheduler is None or self._stream_scheduler.current_ubatch() is None:
            return launch()
        results: tuple[torch.Tensor, ...] = self._stream_scheduler.communicate(launch)
        for result in results:  # allocated from the communication stream's pool
            result.record_stream(torch.accelerator.current_stream())
        return results

    def sized_exchange(self, count: Callable[[], C], move: Callable[[C], T]) -> T:
        """Runs `move(count())`: collectives in `count` produce the sizes of collectives in `move`.

        In a ubatch the host waits in `move` while the device does other ubatches' work; both
        functions run on the communication stream. The caller holds their inputs until this returns.
        """
        if self._stream_scheduler is None:
            return move(count())
        moved: T = self._stream_scheduler.communicate(count, then=move)
        return moved
