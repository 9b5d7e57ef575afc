"""Our engine of weight transfer under its name, in vLLM's lists of workers' and trainers' ends."""

from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from vllm_davinci.core.config.weight_updates import HCCL_ENGINE

_MODULE = "vllm_davinci.core.weight_transfer.hccl_engine"


def register() -> None:
    """Idempotent; the engine's module is imported where it is used."""
    if HCCL_ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            HCCL_ENGINE, _MODULE, "HCCLWeightTransferEngine"
        )
        WeightTransferTrainerFactory.register_engine(
            HCCL_ENGINE, _MODULE, "HCCLTrainerWeightTransferEngine"
        )
