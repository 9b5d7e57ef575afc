"""vLLM's weight transfer through memory that a trainer's process and workers share.

Each worker reads the memory of the trainer's rank on its own device: no data leaves the chip. Both
ends are vLLM's CUDA IPC engines, which implement rounds and loading layer by layer.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch_npu
from torch.multiprocessing.reductions import reduce_tensor
from torch_npu.multiprocessing.reductions import rebuild_npu_tensor
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.platforms import current_platform

from vllm_davinci.core.config.registered_names import IPC_ENGINE
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

# Index of the device in torch's description of a shared tensor.
_DEVICE_ARGUMENT = 6


class NPUIPCWeightTransferEngine(IPCWeightTransferEngine):
    """The worker's end of a transfer."""

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        """Loads the tensors of a trainer's buffer on this device.

        They have a checkpoint's names and shapes. Raises ValueError if the trainer has no rank on
        this device.
        """
        handles = update_info.ipc_handles
        device = current_platform.get_device_uuid(self.device.index)
        if not isinstance(handles, dict) or device not in handles:
            raise ValueError(
                f"The trainer shares memory of {', '.join(handles or ()) or 'no device'}, and this "
                f"worker is on {device}: start a rank of the trainer on each worker's device."
            )
        arguments = list(handles[device])
        arguments[_DEVICE_ARGUMENT] = self.device.index
        # Layers hold the tensors until they are complete. The trainer's torch counts the users of
        # its buffer, and places the next buffer in other memory until all have finished.
        buffer = rebuild_npu_tensor(*arguments)
        with disable_mtp_completeness_check():
            self.model.load_weights(views(buffer, announced(update_info)))
        torch.accelerator.synchronize()


@dataclass
class NPUIPCTrainerInitInfo(TrainerInitInfo):
    """Arguments of a trainer's rank; each rank's device is also a worker's.

    buffer_bytes: most bytes shared at a time, except for a larger tensor
    """

    backend: ClassVar[str] = IPC_ENGINE

    buffer_bytes: int = DEFAULT_BUFFER_BYTES


class NPUIPCTrainerWeightTransferEngine(IPCTrainerWeightTransferEngine):
    """The trainer's end of a transfer. Set its device, which is also a worker's, before."""

    init_info_cls: Any = NPUIPCTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        is_sender: bool = True,
        rank: int = 0,
        packed: bool = True,
        packed_buffer_size_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> None:
        # vLLM's own constructor asks CUDA for the device.
        self.client, self.source, self.is_sender = client, source, is_sender
        self.rank = rank
        self.packed, self.packed_buffer_size_bytes = packed, packed_buffer_size_bytes
        self.device = torch.device("npu", torch.accelerator.current_device_index())

    @classmethod
    def trainer_init(
        cls,
        init_info: NPUIPCTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Creates the end of each trainer rank; call `send_weights` after each training step."""
        engine = trainer_end(cls, init_info, client, source, owner=init_info.rank)
        if engine.is_sender:
            client.init_weight_transfer_engine({})
        return engine

    def _send(self, source: WeightSource) -> None:
        """Shares one buffer after another, each once all workers have read the one before."""
        device = current_platform.get_device_uuid(self.device.index)
        meta = source.metadata
        pairs = NCCLTrainerWeightTransferEngine._checked_iter(source, meta)
        for group in buffers(meta, self.packed_buffer_size_bytes):
            buffer = filled(empty_buffer(group, self.device), group, pairs)
            handles = self._of_all_ranks({device: reduce_tensor(buffer)[1]})
            if self.is_sender:
                update = IPCWeightTransferUpdateInfo(
                    names=[each.name for each in group],
                    dtype_names=[str(each.dtype).removeprefix("torch.") for each in group],
                    shapes=[list(each.shape) for each in group],
                    ipc_handles=handles,
                )
                self.client.update_weights(asdict(update))
            self._post_send_sync()
        assert next(pairs, None) is None  # makes the source check the number of tensors

    @staticmethod
    def _of_all_ranks(handles: dict[str, Any]) -> dict[str, Any]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return handles
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, handles)
        return {device: each for of_rank in gathered for device, each in of_rank.items()}

    @staticmethod
    def _post_send_sync() -> None:
        """Returns when all workers have read: the trainer may then change its weights."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        torch_npu.npu.ipc_collect()
