"""vLLM's weight transfer over HCCL: a trainer broadcasts its weights, workers load them in place.

Both ends are vLLM's NCCL engines with another group: they implement rounds, checks of sent tensors,
and loading layer by layer.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from vllm_davinci.core.config.registered_names import HCCL_ENGINE
from vllm_davinci.core.weight_transfer.group import SENDER, TransferGroup
from vllm_davinci.core.weight_transfer.packing import (
    DEFAULT_BUFFER_BYTES,
    announced,
    buffers,
    empty_buffer,
    filled,
    views,
)
from vllm_davinci.core.weight_transfer.registration import register
from vllm_davinci.core.weight_transfer.trainer import trainer_end

# A trainer's program imports this module without loading vLLM's plugins.
register()


@dataclass(kw_only=True)
class HCCLWeightTransferInitInfo(WeightTransferInitInfo):
    """Arguments with which a worker joins.

    rank_offset:  the first worker's rank in the group
    world_size:   the trainer's sender and all workers
    buffer_bytes: maximum of one broadcast, except for a larger tensor
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    buffer_bytes: int = DEFAULT_BUFFER_BYTES


class HCCLWeightTransferEngine(NCCLWeightTransferEngine):
    """The worker's end of a transfer."""

    init_info_cls: Any = HCCLWeightTransferInitInfo
    model_update_group: Any

    def init_transfer_engine(self, init_info: HCCLWeightTransferInitInfo) -> None:
        """Joins the trainer's group; leaves an earlier trainer's group."""
        self.shutdown()
        self.packed_buffer_size_bytes = init_info.buffer_bytes
        self._last_update_info.clear()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.model_update_group = TransferGroup(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + worker,
            init_info.world_size,
        )

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receives tensors with a checkpoint's names and shapes, and loads them buffer by buffer.

        update_info: without names if they equal the previous update's
        """
        if self.model_update_group is None:
            raise RuntimeError(
                "No trainer has joined: call init_weight_transfer_engine before update_weights."
            )
        if update_info.names:
            self._last_update_info[self.model] = update_info
        update_info = self._last_update_info.get(self.model, update_info)
        for group in buffers(announced(update_info), self.packed_buffer_size_bytes):
            buffer = empty_buffer(group, self.device)
            self.model_update_group.broadcast(buffer)
            with disable_mtp_completeness_check():
                self.model.load_weights(views(buffer, group))

    def shutdown(self) -> None:
        if self.model_update_group is not None:
            self.model_update_group.close()
            self.model_update_group = None


@dataclass
class HCCLTrainerInitInfo(TrainerInitInfo):
    """Arguments of a trainer's rank; only rank 0 joins the group.

    master_address, master_port: where rank 0 listens; workers must reach it
    world_size:                  1 and all workers of the engine
    buffer_bytes:                maximum of one broadcast, except for a larger tensor
    """

    backend: ClassVar[str] = HCCL_ENGINE

    master_address: str
    master_port: int
    world_size: int
    buffer_bytes: int = DEFAULT_BUFFER_BYTES


class HCCLTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):
    """The trainer's end of a transfer. Set its device, which no worker may use, before."""

    init_info_cls: Any = HCCLTrainerInitInfo
    model_update_group: Any

    @classmethod
    def trainer_init(
        cls,
        init_info: HCCLTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Joins the workers, on rank 0. Every rank of the trainer calls it."""
        engine = trainer_end(cls, init_info, client, source, owner=SENDER)
        if not engine.is_sender:
            return engine
        address, port, size = (
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
        )
        workers = HCCLWeightTransferInitInfo(
            master_address=address,
            master_port=port,
            rank_offset=SENDER + 1,
            world_size=size,
            buffer_bytes=init_info.buffer_bytes,
        )
        with ThreadPoolExecutor(1) as executor:  # workers answer only after the trainer has joined
            joined = executor.submit(client.init_weight_transfer_engine, asdict(workers))
            engine.model_update_group = TransferGroup(address, port, SENDER, size)
            joined.result()
        return engine

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        """Makes the source's tensors, on all ranks together, and sends them from rank 0."""
        if not self.is_sender:
            for _ in source.iter_full():
                pass
            return
        pairs = self._checked_iter(source, meta)
        device = torch.device("npu", torch.accelerator.current_device_index())
        for group in buffers(meta, self.packed_buffer_size_bytes):
            self.model_update_group.broadcast(filled(empty_buffer(group, device), group, pairs))
        assert next(pairs, None) is None  # makes the source check the number of tensors

    def _post_send_sync(self) -> None:
        """Returns when everything is sent: the trainer may then change its weights."""
        torch.accelerator.synchronize()

    def shutdown(self) -> None:
        if self.model_update_group is not None:
            self.model_update_group.close()
            self.model_update_group = None
