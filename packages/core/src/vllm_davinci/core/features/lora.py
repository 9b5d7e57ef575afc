"""LoRA adapters: the vLLM options of LoRA that this release supports."""

from collections.abc import Callable

from vllm_davinci.core.features.feature import Engine, Feature, refused

# The layer's name in vLLM's models.
ROUTED_EXPERTS = "experts"


def is_asked(engine: Engine) -> bool:
    """True if the engine accepts adapters."""
    return engine.vllm.lora_config is not None


def _refused(
    flag: str,
    title: str,
    is_given: Callable[[Engine], bool],
    as_given: Callable[[Engine], str] | None = None,
) -> Feature:
    """A value of vLLM's LoRAConfig that no runner serves."""
    return refused(
        flag,
        title,
        lambda engine: engine.model is not None and is_asked(engine) and is_given(engine),
        as_given=as_given,
    )


FEATURES = (
    Feature("--enable-lora", "LoRA adapters", is_asked, excludes={"--runner pooling": ""}),
    _refused(
        "--fully-sharded-loras",
        "adapters that are divided over ranks",
        lambda e: e.vllm.lora_config.fully_sharded_loras,
    ),
    _refused(
        "--lora-dtype",
        "adapters of another dtype than the model's",
        lambda e: e.vllm.lora_config.lora_dtype != e.model.dtype,
        lambda e: f"--lora-dtype {str(e.vllm.lora_config.lora_dtype).removeprefix('torch.')}",
    ),
    _refused(
        "--enable-tower-connector-lora",
        "adapters of image and audio towers",
        lambda e: e.vllm.lora_config.enable_tower_connector_lora,
    ),
    _refused(
        "--lora-target-modules experts with --data-parallel-size",
        "adapters of routed experts whose tokens come from several data-parallel ranks",
        lambda e: (
            ROUTED_EXPERTS in (e.vllm.lora_config.target_modules or ())
            and e.parallel.data_parallel_size > 1
        ),
    ),
    _refused(
        "--enable-moe-shared-loras",
        "adapters whose experts share a factor",
        lambda e: e.vllm.lora_config.enable_moe_shared_loras,
    ),
    _refused(
        "--enable-mixed-moe-lora-format",
        "adapters of all experts in one tensor",
        lambda e: e.vllm.lora_config.enable_mixed_moe_lora_format,
    ),
)
