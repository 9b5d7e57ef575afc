"""Methods and options of speculative decoding, and which of them this release serves."""

from typing import TYPE_CHECKING

from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

# Their drafters run a model, in the worker and on the device.
WITH_MODEL = ("mtp", "eagle", "eagle3", "draft_model")
SERVED = ("ngram", "custom_class", *WITH_MODEL)
# vLLM calls the further layers of many models "mtp"; these are served.
MTP_ARCHITECTURES = ("DeepSeekMTPModel",)


def check_speculation(vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError for a method or an option that this release does not serve."""
    asked = vllm_config.speculative_config
    if asked is None:
        return
    if asked.method not in SERVED:
        raise ConfigurationError(
            f"not available in {RELEASE}: speculative decoding of method {asked.method!r} "
            f"(--speculative-config). Use one of {', '.join(SERVED)}, or start without it."
        )
    refused = _refused(asked) | _refused_beside(asked, vllm_config)
    if reasons := [why for why, is_asked in refused.items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE}: {'; '.join(reasons)}. Change that in "
            "--speculative-config, or start without it."
        )
    if asked.method in WITH_MODEL:
        _require_fit(asked)


def _refused(asked: "SpeculativeConfig") -> dict[str, bool]:
    """By reason, whether it holds for the options of --speculative-config."""
    method, drafter = asked.method, asked.draft_model_config
    architectures = list(drafter.architectures) if method == "mtp" else []
    return {
        f'rejection_sample_method {asked.rejection_sample_method!r} ("standard" and '
        '"synthetic" are)': asked.rejection_sample_method not in ("standard", "synthetic"),
        f"method 'mtp' of {', '.join(architectures)} ({', '.join(MTP_ARCHITECTURES)} is)": (
            method == "mtp" and not set(architectures) <= set(MTP_ARCHITECTURES)
        ),
        "parallel_drafting": asked.parallel_drafting,
        "use_heterogeneous_vocab": asked.use_heterogeneous_vocab,
        "use_local_argmax_reduction": asked.use_local_argmax_reduction,
        "num_speculative_tokens_per_batch_size (a number of drafts for all batches is)": (
            asked.num_speculative_tokens_per_batch_size is not None
        ),
        "enable_adaptive_verification": asked.enable_adaptive_verification,
    }


def _refused_beside(asked: "SpeculativeConfig", vllm_config: "VllmConfig") -> dict[str, bool]:
    """By reason, whether it holds for what is asked beside --speculative-config."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    return {
        "speculative decoding with LoRA adapters (--enable-lora)": (
            vllm_config.lora_config is not None
        ),
        "speculative decoding with a KV cache that goes on elsewhere (--kv-transfer-config, "
        "--kv-offloading-size)": (
            vllm_config.kv_transfer_config is not None
            or vllm_config.cache_config.kv_offloading_size is not None
        ),
        f"method {asked.method!r}, whose drafter runs a model, with sleep mode "
        "(--enable-sleep-mode)": (
            asked.method in WITH_MODEL and model is not None and model.enable_sleep_mode
        ),
        "speculative decoding over pipeline stages (--pipeline-parallel-size "
        f"{parallel.pipeline_parallel_size})": parallel.pipeline_parallel_size > 1,
        f"method {asked.method!r}, whose drafter runs a model, with data parallelism "
        f"(--data-parallel-size {parallel.data_parallel_size})": (
            asked.method in WITH_MODEL and parallel.data_parallel_size > 1
        ),
    }


def _require_fit(asked: "SpeculativeConfig") -> None:
    """Raises ConfigurationError for a drafter that belongs to another model."""
    drafter, target = asked.draft_model_config, asked.target_model_config
    sizes = {"vocabulary": (drafter.get_vocab_size(), target.get_vocab_size())}
    if asked.method in ("eagle", "mtp"):
        sizes["hidden size"] = (drafter.get_hidden_size(), target.get_hidden_size())
    for what, (own, other) in sizes.items():
        if own != other:
            raise ConfigurationError(
                f"The drafter {drafter.model} has a {what} of {own}, and {target.model} has "
                f"{other}: it drafts for another model. Give one that was made for this model in "
                "--speculative-config."
            )
    tp_sizes = [
        each.tensor_parallel_size
        for each in (asked.draft_parallel_config, asked.target_parallel_config)
    ]
    if tp_sizes[0] != tp_sizes[1]:
        raise ConfigurationError(
            f"The drafter is divided among {tp_sizes[0]} ranks, and the model among {tp_sizes[1]}: "
            f"set draft_tensor_parallel_size to {tp_sizes[1]} in --speculative-config."
        )
