"""Options of vLLM and kinds of model that this release refuses, because it cannot serve them."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.both_ways import IMAGES_BOTH_WAYS, PROMPTS_BOTH_WAYS
from vllm_davinci.core.config.context_parallel import refused_with_context_parallel
from vllm_davinci.core.config.expert_balance import refused_with_balance
from vllm_davinci.core.config.foreign_definitions import is_foreign
from vllm_davinci.core.config.hybrids import SERVED as SERVED_HYBRIDS
from vllm_davinci.core.config.hybrids import keeps_states
from vllm_davinci.core.config.load_formats import REPLACED, WITHOUT_FILES, is_served
from vllm_davinci.core.config.lora import refused_with_adapters
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.sleep import refused_with_sleep
from vllm_davinci.core.config.weight_updates import refused_with_transfer
from vllm_davinci.core.errors import RELEASE, ConfigurationError, UnsupportedFeatureError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def refuse_unavailable(vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError for options that this release cannot serve on this engine."""
    parallel = vllm_config.parallel_config
    _refuse_other_head_sizes(get_config(vllm_config).lmhead_tp_size, parallel.tensor_parallel_size)
    offload = vllm_config.offload_config
    model = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    dtype, cache_dtype = _dtype_name(model), vllm_config.cache_config.cache_dtype
    refused = {
        **refused_with_balance(vllm_config),
        **refused_with_context_parallel(vllm_config),
        **refused_with_adapters(vllm_config),
        **refused_with_transfer(vllm_config),
        "weights in the host's memory (--cpu-offload-gb)": offload.uva.cpu_offload_gb > 0,
        "weights in the host's memory (--offload-group-size)": (
            offload.prefetch.offload_group_size > 0
        ),
        "the experts of each token (--enable-return-routed-experts)": (
            vllm_config.aux_output_config.enabled
        ),
        f"weights that are neither converted nor checked (--load-format {load_format}; "
        f"{', '.join((*REPLACED, WITHOUT_FILES))} are)": not is_served(load_format),
        "recovery from a fault (--enable-fault-tolerance): the other ranks would have to go on "
        "without the one that failed, which HCCL's collectives cannot; one rank's error ends the "
        "engine": parallel.enable_fault_tolerance,
        **refused_with_sleep(vllm_config),
        f'{" and ".join(_foreign_profilers(vllm_config))} (--profiler-config; "torch" is, with the '
        "activities CPU and PrivateUse1)": bool(_foreign_profilers(vllm_config)),
        f"a KV cache of {cache_dtype} with a model of {dtype} (--kv-cache-dtype {cache_dtype}; "
        "--kv-cache-dtype auto is)": cache_dtype not in ("auto", dtype),
        "kernels of a whole layer (--monokernel), which are AMD's": (
            vllm_config.kernel_config.monokernel
        ),
    }
    if asked := [feature for feature, is_asked in refused.items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE}: {', '.join(asked)}. Start without it."
        )


def _refuse_other_head_sizes(asked: int, tp_size: int) -> None:
    if asked not in (-1, tp_size):
        raise ConfigurationError(
            f"not available in {RELEASE}: additional_config key 'lmhead_tp_size' = {asked}; the LM "
            f"head is divided as the other layers are, among {tp_size} ranks "
            f"(--tensor-parallel-size). Use -1 or {tp_size}."
        )


def _foreign_profilers(vllm_config: "VllmConfig") -> list[str]:
    """Settings of the profiler that ask for another vendor's devices."""
    asked = vllm_config.profiler_config
    activities = asked.torch_profiler_activities or ()
    return [
        *(f"the profiler {name}" for name in (asked.profiler,) if name not in (None, "torch")),
        *(f"the activity {name}" for name in activities if name not in ("CPU", "PrivateUse1")),
    ]


def _dtype_name(model: "ModelConfig | None") -> str | None:
    return None if model is None else str(model.dtype).removeprefix("torch.")


def refuse_architectures(model: "ModelConfig") -> None:
    """Raises UnsupportedFeatureError for a kind of model that this release cannot run."""
    known = (*IMAGES_BOTH_WAYS, *PROMPTS_BOTH_WAYS)
    needs = {
        "a definition for NPUs (vLLM's is of kernels of CUDA and ROCm alone)": is_foreign(model),
        "experts that give a token back as it is (zero experts)": bool(
            getattr(model.hf_text_config, "zero_expert_num", 0)
        ),
        "recurrent states of a kind that is not computed, or that nobody has tried here": (
            keeps_states(model)
            and not is_foreign(model)
            and not set(model.architectures) <= set(SERVED_HYBRIDS)
        ),
        "cross-attention (encoder-decoder other than Whisper)": (
            model.is_encoder_decoder and model.hf_config.model_type != "whisper"
        ),
        f"tokens of prompts that see later ones (known of {', '.join(known)}; text alone is served "
        "with --limit-mm-per-prompt 0 of each kind)": (
            model.is_mm_prefix_lm and model.hf_config.model_type not in known
        ),
        # vLLM serves it, and prompts in chunks, cached beginnings and requests that are computed
        # again after they made room would give other tokens.
        "prompts of text that see themselves both ways": model.hf_config.model_type == "hrm_text",
    }
    if named := [need for need, is_needed in needs.items() if is_needed]:
        raise UnsupportedFeatureError(
            f"not available in {RELEASE}: {' and '.join(named)}, which "
            f"{', '.join(model.architectures)} of {model.model!r} needs. Choose a model of "
            "attention layers, such as Llama, Qwen3, Qwen3-MoE or DeepSeek-V3, or "
            f"{', '.join(SERVED_HYBRIDS)}."
        )


# See core.quantization.
QUANTIZATION_METHODS = ("ascend", "compressed-tensors", "fp8", "auto_awq", "auto_gptq")


def refuse_quantization(quant: str) -> None:
    """Raises UnsupportedFeatureError for a `--quantization` that this release does not have."""
    if quant not in QUANTIZATION_METHODS:
        raise UnsupportedFeatureError(
            f"not available in {RELEASE}: quantization {quant!r}; "
            f"{', '.join(QUANTIZATION_METHODS)} are. Use the model's unquantized checkpoint "
            "and leave --quantization out, or make an int8 checkpoint of it: vllm-davinci "
            "quantize SOURCE DESTINATION."
        )
