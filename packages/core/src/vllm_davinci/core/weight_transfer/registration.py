"""Our engines of weight transfer under their names, in vLLM's lists of both ends."""

from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from vllm_davinci.core.config.registered_names import HCCL_ENGINE, IPC_ENGINE

_FOLDER = "vllm_davinci.core.weight_transfer"
# Name -> module, and what the worker's end and the trainer's are called there.
_ENGINES = {
    HCCL_ENGINE: ("hccl_engine", "HCCLWeightTransferEngine", "HCCLTrainerWeightTransferEngine"),
    IPC_ENGINE: ("ipc_engine", "NPUIPCWeightTransferEngine", "NPUIPCTrainerWeightTransferEngine"),
}


def register() -> None:
    """Idempotent; an engine's module is imported where it is used."""
    for name, (module, worker, trainer) in _ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, f"{_FOLDER}.{module}", worker)
            WeightTransferTrainerFactory.register_engine(name, f"{_FOLDER}.{module}", trainer)
