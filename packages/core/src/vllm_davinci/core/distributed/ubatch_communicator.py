"""Collectives that take turns with the ubatches' computation: when they start, who waits."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase,
)

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.distributed.host_address import may_span_hosts

C = TypeVar("C")
T = TypeVar("T")


class UbatchCommunicator(DeviceCommunicatorBase):
    """A group of NPUs, every collective of which passes through `_collective`.

    It runs on HCCL's own stream, which waits for the current one. The current stream waits for it
    in turn: at once, or, in a ubatch, when the other ubatches have launched their computation
    beside it.
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
        # HCCL gathers and scatters unequal parts within one server only, and torch_npu makes a
        # broadcast per rank of it on A2. Source: HCCL's documentation of HcclAllGatherV.
        self.pads_unequal_parts = config is not None and may_span_hosts(config.parallel_config)
        if self.use_all2all:
            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def _collective(self, name: str, begin: Callable[[], Any], waits: bool = True) -> None:
        """Runs one collective.

        name:  which collective, for those who count them
        begin: enqueues it with async_op=True and returns its handle; it holds the tensors that the
               collective reads and writes, which were allocated before
        waits: False: a ubatch goes on beside it, and the caller waits for the handle
        """
        if self._stream_scheduler is None:
            begin().wait()
        else:
            self._stream_scheduler.communicate(begin, on="library", waits=waits)

    def launch_own(
        self, launch: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """Launches an operator that communicates and allocates its results itself.

        launch: enqueues it; its arguments are held by the caller until this returns
        Returns the results, for use on the current stream.
        """
        if self._stream_scheduler is None or self._stream_scheduler.current_ubatch() is None:
            return launch()
        results: tuple[torch.Tensor, ...] = self._stream_scheduler.communicate(launch)
        for result in results:  # of the communication stream's pool
            result.record_stream(torch.accelerator.current_stream())
        return results

    def sized_exchange(self, count: Callable[[], C], move: Callable[[C], T]) -> T:
        """`move(count())`: the collectives of `move` have sizes that those of `count` bring.

        In a ubatch the host waits in `move` while the device does the others' work, not for
        it; both run on the communication stream. What they read is held until this returns.
        """
        if self._stream_scheduler is None:
            return move(count())
        moved: T = self._stream_scheduler.communicate(count, then=move)
        return moved
