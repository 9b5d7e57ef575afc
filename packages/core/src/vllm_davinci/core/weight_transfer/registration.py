"""Registers our weight transfer engines in vLLM's lists for both ends."""

from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from vllm_davinci.core.config.registered_names import HCCL_ENGINE, IPC_ENGINE

_FOLDER = "vllm_davinci.core.weight_transfer"
# Name -> module, and its classes for the worker's end and the trainer's end.
_ENGINES = {
    HCCL_ENGINE: ("hccl_engine", "HCCLWeightTransferEngine", "HCCLTrainerWeightTransferEngine"),
    IPC_ENGINE: ("ipc_engine", "NPUIPCWeightTransferEngine", "NPUIPCTrainerWeightTransferEngine"),
}


def register() -> None:
    """Registers the engines. Idempotent; an engine's module is imported on first use."""
    for name, (module, worker, trainer) in _ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, f"{_FOLDER}.{module}", worker)
            WeightTransferTrainerFactory.register_engine(name, f"{_FOLDER}.{module}", trainer)
