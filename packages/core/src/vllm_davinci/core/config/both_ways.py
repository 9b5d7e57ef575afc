"""Models in whose prompts tokens see later ones: what of a prompt has to stay in one step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Kinds of models whose images see each other both ways, image by image, and nothing else does.
IMAGES_BOTH_WAYS = ("gemma3",)
# Those in which all of a prompt that has an image does, text too. Without an image it is causal.
PROMPTS_BOTH_WAYS = ("paligemma",)


def has_prompts_both_ways(model: "ModelConfig | None") -> bool:
    return (
        model is not None
        and model.is_mm_prefix_lm
        and model.hf_config.model_type in PROMPTS_BOTH_WAYS
    )


def keep_together(vllm_config: "VllmConfig", change: Callable[[Any, str, Any, str], None]) -> None:
    """Turns off what would divide tokens that see each other. change: sets and notes a value

    Raises ConfigurationError where a step is too small for the longest prompt that has to be whole.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if model is None or not model.is_mm_prefix_lm:
        return
    why = "the tokens of an image see each other both ways, so that it is computed in one step"
    if has_prompts_both_ways(model):
        why = "the tokens of a prompt with an image see each other both ways, so that it is whole"
        change(scheduler, "enable_chunked_prefill", False, why)
        if scheduler.max_num_batched_tokens < model.max_model_len:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {scheduler.max_num_batched_tokens}, and {why}: it "
                f"may have {model.max_model_len} tokens (--max-model-len). Raise the one or lower "
                "the other."
            )
    change(scheduler, "disable_chunked_mm_input", True, why)
    change(vllm_config.cache_config, "enable_prefix_caching", False, why)
    # Of vLLM's runner: images longer than the window are not left out.
    model.hf_text_config.mm_prefix_clamp_sliding_window = True
