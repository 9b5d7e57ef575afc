"""Models whose layers keep states: those that are served, and what is not beside them."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Architectures all of whose states `core.linear_attention` computes.
SERVED = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "GraniteMoeHybridForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Zamba2ForCausalLM",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronHForCausalLM",
)
# Methods whose drafts come when the host knows what was kept.
DRAFTERS = ("ngram", "custom_class", "mtp")
# Of those, what runs a model on the device. Under asynchronous scheduling, where the host does not
# know yet what was kept, tokens have been seen to differ.
_SYNCHRONOUS = ("mtp",)


def keeps_states(model: "ModelConfig | None") -> bool:
    """Whether some layers keep a state per request in place of keys and values per token."""
    return model is not None and bool(model.is_hybrid or model.has_inner_state)


def settle_states(vllm_config: "VllmConfig") -> list[Setting]:
    """Refuses what is not served beside states, and turns off what is not right. Idempotent.

    That is prefix caching, and asynchronous scheduling beside some drafters: vLLM turns both on by
    itself, so that nobody need have asked. Returns the settings.
    Raises ConfigurationError for what somebody has asked for.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    if not keeps_states(model):
        return []
    refused = {
        "speculative decoding (--speculative-config) of methods other than "
        f"{' and '.join(DRAFTERS)}": speculation is not None and speculation.method not in DRAFTERS,
        "drafts of a model beside images (--speculative-config)": (
            speculation is not None
            and speculation.method in _SYNCHRONOUS
            and model.is_multimodal_model
        ),
        "LoRA adapters (--enable-lora)": vllm_config.lora_config is not None,
        "dual-batch overlap (dbo.enabled)": get_config(vllm_config).dbo.enabled,
        "a KV cache that goes on elsewhere (--kv-transfer-config, --kv-offloading-size)": (
            vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None
        ),
        "sleep mode (--enable-sleep-mode)": model.enable_sleep_mode,
        f"quantized checkpoints ({model.quantization})": model.quantization is not None,
        "pooling (--runner pooling)": model.runner_type == "pooling",
        "replayed states (--use-replayssm)": cache.use_replayssm,
        "stochastic rounding of states (--enable-mamba-cache-stochastic-rounding)": (
            vllm_config.mamba_config.enable_stochastic_rounding
        ),
        "data parallelism (--data-parallel-size)": parallel.data_parallel_size > 1,
        "expert balancing (--enable-eplb)": parallel.enable_eplb,
    }
    if asked := [feature for feature, is_asked in refused.items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE} for {', '.join(model.architectures)}, whose layers keep "
            f"states: {', '.join(asked)}. Start without it."
        )
    # Without states of prefixes vLLM keeps one of each request, and calls that a block of as many
    # tokens as a request may have.
    cache.mamba_cache_mode, cache.mamba_block_size = "none", model.max_model_len
    changes = []
    if cache.enable_prefix_caching:
        cache.enable_prefix_caching = False
        reason = f"instead of true: not available in {RELEASE}: states of prefixes"
        changes.append(Setting("enable_prefix_caching", False, Source.RELEASE, reason))
    is_synchronous = speculation is not None and speculation.method in _SYNCHRONOUS
    if is_synchronous and vllm_config.scheduler_config.async_scheduling:
        vllm_config.scheduler_config.async_scheduling = False
        reason = "instead of true: states follow the drafts that the host knows to be kept"
        changes.append(Setting("async_scheduling", False, Source.RELEASE, reason))
    return changes
