"""Bidirectional attention in prompts (Gemma 3, PaliGemma): which tokens one step must prefill."""

from vllm_davinci.core.config.architectures import ARCHITECTURES, Bidirectional, bidirectional
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import V1, Engine, Feature, model_has, refused


def settle(engine: Engine) -> None:
    """Turns off what would divide tokens that see each other.

    Raises ConfigurationError where a step is too small for the longest prompt that has to be whole.
    """
    model, scheduler = engine.model, engine.vllm.scheduler_config
    why = "the tokens of an image see each other both ways, so that it is computed in one step"
    if bidirectional(model) is Bidirectional.PROMPTS:
        why = "the tokens of a prompt with an image see each other both ways, so that it is whole"
        engine.set(scheduler, "enable_chunked_prefill", False, why)
        if scheduler.max_num_batched_tokens < model.max_model_len:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {scheduler.max_num_batched_tokens}, and {why}: it "
                f"may have {model.max_model_len} tokens (--max-model-len). Raise the one or lower "
                "the other."
            )
    engine.set(scheduler, "disable_chunked_mm_input", True, why)
    engine.set(engine.vllm.cache_config, "enable_prefix_caching", False, why)
    # Of vLLM's runner: images longer than the window are not left out.
    model.hf_text_config.mm_prefix_clamp_sliding_window = True


_SERVED = [name for name, row in ARCHITECTURES.items() if row.bidirectional]

FEATURES = (
    Feature(
        "", "bidirectional attention to images", model_has("is_mm_prefix_lm"), V1, settle=settle
    ),
    refused(
        "",
        "tokens of prompts that see later ones, of an architecture that is not known",
        lambda e: model_has("is_mm_prefix_lm")(e) and bidirectional(e.model) is None,
        because=f"known are {', '.join(_SERVED)}",
        instead="Serve text alone with --limit-mm-per-prompt 0 of each kind.",
    ),
)
