"""Settings of LoRA that this release cannot serve."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# As vLLM names the layer in its models.
ROUTED_EXPERTS = "experts"


def refused_with_adapters(vllm_config: "VllmConfig") -> dict[str, bool]:
    """Lists what cannot be had together with --enable-lora: name -> whether it is asked for."""
    lora, model = vllm_config.lora_config, vllm_config.model_config
    if lora is None or model is None:
        return {}
    dtype = str(lora.lora_dtype).removeprefix("torch.")
    return {
        "adapters divided over ranks (--fully-sharded-loras)": lora.fully_sharded_loras,
        f"adapters of another dtype than the model's (--lora-dtype {dtype})": (
            lora.lora_dtype != model.dtype
        ),
        "adapters of image and audio towers (--enable-tower-connector-lora)": (
            lora.enable_tower_connector_lora
        ),
        "adapters of pooling models (--enable-lora with --runner pooling)": (
            model.runner_type == "pooling"
        ),
        "adapters of routed experts whose tokens come from several data-parallel ranks "
        "(--lora-target-modules experts with --data-parallel-size)": (
            ROUTED_EXPERTS in (lora.target_modules or ())
            and vllm_config.parallel_config.data_parallel_size > 1
        ),
        "adapters whose experts share a factor (--enable-moe-shared-loras)": (
            lora.enable_moe_shared_loras
        ),
        "adapters of all experts in one tensor (--enable-mixed-moe-lora-format)": (
            lora.enable_mixed_moe_lora_format
        ),
    }
