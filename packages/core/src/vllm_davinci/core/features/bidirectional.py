"""Bidirectional attention in prompts (Gemma 3, PaliGemma, HRM-Text): what one step must prefill."""

from vllm_davinci.core.config.architectures import ARCHITECTURES, Bidirectional, bidirectional
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature, model_has, refused


def settle(engine: Engine) -> None:
    """Turns off features that would split tokens with bidirectional attention.

    Raises ConfigurationError if a step is too small for the longest prompt that must stay whole.
    """
    model, scheduler = engine.model, engine.vllm.scheduler_config
    why = "tokens of an image attend bidirectionally and must be prefilled in one step"
    if (tokens := bidirectional(model)) is not Bidirectional.IMAGES:
        kind = "a prompt with an image" if tokens is Bidirectional.PROMPTS else "a prompt"
        why = f"{kind} attends bidirectionally and must be prefilled in one step"
        engine.set(scheduler, "enable_chunked_prefill", False, why)
        if scheduler.max_num_batched_tokens < model.max_model_len:
            raise ConfigurationError(
                f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}) must be at least "
                f"--max-model-len ({model.max_model_len}): {why}. Raise the first or lower the "
                "second."
            )
    engine.set(engine.vllm.cache_config, "enable_prefix_caching", False, why)
    if tokens is Bidirectional.EVERY_PROMPT:
        return
    engine.set(scheduler, "disable_chunked_mm_input", True, why)
    # Otherwise vLLM's runner leaves out images longer than the window.
    model.hf_text_config.mm_prefix_clamp_sliding_window = True


_SERVED = [name for name, row in ARCHITECTURES.items() if row.bidirectional]

FEATURES = (
    Feature(
        "",
        "bidirectional attention in prompts",
        lambda e: model_has("is_mm_prefix_lm")(e) or bidirectional(e.model) is not None,
        settle=settle,
    ),
    refused(
        "",
        "bidirectional attention in prompts of an unknown architecture",
        lambda e: model_has("is_mm_prefix_lm")(e) and bidirectional(e.model) is None,
        because=f"known are {', '.join(_SERVED)}",
        instead="Serve text only, with --limit-mm-per-prompt 0 for each kind.",
    ),
)
