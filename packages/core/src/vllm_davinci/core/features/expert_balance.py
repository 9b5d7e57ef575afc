"""Expert balancing: our options replace vLLM's flag, which it refuses on this device."""

from typing import Final

from vllm_davinci.core.config.options import DYNAMIC
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature, refused
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.core.fused_moe.expert_map_file import redundant_experts

KEY = f"additional_config key {DYNAMIC!r}"
HCCL: Final = "torch_nccl"
GLOO: Final = "torch_gloo"


def settle(engine: Engine) -> None:
    """Configures vLLM's expert balancing (EPLB) from our options. Idempotent.

    vLLM makes its configuration before it asks the platform, and refuses its own flag there. Raises
    ConfigurationError for ranks between which no expert can move.
    """
    config, model = engine.config, engine.model
    asked, parallel = config.eplb_config, engine.vllm.parallel_config
    if model is None or not model.is_moe:
        raise ConfigurationError(
            f"{KEY} moves routed experts, and the model has none. Remove the key."
        )
    if not parallel.enable_expert_parallel:
        raise ConfigurationError(
            f"{KEY} moves whole experts: add --enable-expert-parallel, or remove the key."
        )
    if parallel.tensor_parallel_size * parallel.data_parallel_size == 1:
        raise ConfigurationError(
            f"{KEY} moves experts between ranks, and there is only one. Raise "
            "--tensor-parallel-size or --data-parallel-size, or remove the key."
        )
    if asked.use_async and asked.communicator == HCCL:
        raise ConfigurationError(
            f"'eplb_config.use_async' cannot be used with 'eplb_config.communicator' = {HCCL!r}: "
            "weights would be sent between a step's own collectives, in another order on every "
            f"rank. Use {GLOO!r}, or remove one of them."
        )
    layout = expert_layout(parallel, config)
    is_new = not parallel.enable_eplb
    own = GLOO if asked.use_async else HCCL
    communicator = own if asked.communicator == "auto" else asked.communicator
    parallel.enable_eplb = True
    vllms = parallel.eplb_config
    vllms.num_redundant_experts = redundant_experts(config, model.get_num_experts(), layout.ep_size)
    vllms.step_interval, vllms.window_size = asked.step_interval, asked.window_size
    vllms.log_balancedness = asked.log_balancedness
    vllms.log_balancedness_interval = asked.log_balancedness_interval
    # vLLM starts its thread for CUDA devices only: core.expert_balance starts the thread here.
    vllms.use_async = False
    vllms.communicator = communicator
    if is_new:
        engine.changes.append(
            Setting(
                "eplb_config.communicator", communicator, Source.RELEASE, "for weights of experts"
            )
        )


FEATURES = (
    Feature(
        DYNAMIC,
        "expert balancing",
        lambda e: e.config.eplb_config.dynamic_eplb,
        excludes=dict.fromkeys(
            (
                "--speculative-config",
                "--enable-lora",
                "--pipeline-parallel-size",
                "--enable-sleep-mode",
                "enable_weight_nz_layout",
            ),
            "",
        ),
        settle=settle,
    ),
    refused(
        "--enable-eplb",
        "vLLM's own flag of expert balancing",
        lambda e: e.parallel.enable_eplb and not e.config.eplb_config.dynamic_eplb,
        instead=f"Use {KEY}.",
    ),
)
