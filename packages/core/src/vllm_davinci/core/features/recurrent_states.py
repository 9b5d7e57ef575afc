"""Recurrent states (hybrid models, Mamba): what they exclude, and what is turned off with them."""

from vllm_davinci.core.config.architectures import keeps_states
from vllm_davinci.core.errors import RELEASE
from vllm_davinci.core.features.feature import V1, Engine, Feature, refused

# Methods whose drafts come when the host knows what was accepted.
DRAFTERS = ("ngram", "custom_class", "mtp")
# Of those, what runs a model on the device. Under asynchronous scheduling, where the host does not
# know yet what was accepted, tokens have been seen to differ.
_SYNCHRONOUS = ("mtp",)


def _method(engine: Engine) -> str | None:
    """The method of speculation of an engine with states."""
    asked = engine.vllm.speculative_config
    return None if asked is None or not keeps_states(engine.model) else asked.method


def settle(engine: Engine) -> None:
    """Turns off what vLLM has turned on by itself and what would give other tokens.

    That is prefix caching, and asynchronous scheduling beside some drafters.
    """
    cache, scheduler = engine.vllm.cache_config, engine.vllm.scheduler_config
    # Without states of prefixes vLLM keeps one of each request, and calls that a block of as many
    # tokens as a request may have.
    cache.mamba_cache_mode, cache.mamba_block_size = "none", engine.model.max_model_len
    reason = f"not available in {RELEASE}: states of prefixes"
    engine.set(cache, "enable_prefix_caching", False, reason)
    if _method(engine) in _SYNCHRONOUS:
        reason = "states follow the drafts that the host knows to be accepted"
        engine.set(scheduler, "async_scheduling", False, reason)


FEATURES = (
    Feature(
        "",
        "recurrent states",
        lambda e: keeps_states(e.model),
        V1,
        excludes=dict.fromkeys(
            (
                "--enable-lora",
                "dbo.enabled",
                "--kv-transfer-config",
                "--kv-offloading-size",
                "--enable-sleep-mode",
                "--quantization",
                "--runner pooling",
                "--data-parallel-size",
                "eplb_config.dynamic_eplb",
            ),
            "",
        ),
        settle=settle,
    ),
    refused(
        "--speculative-config with recurrent states",
        "drafts that come before the host knows what was accepted",
        lambda e: _method(e) not in (None, *DRAFTERS),
        as_given=lambda e: f"--speculative-config of method {_method(e)!r}",
        because="layers keep recurrent states",
        instead=f"Use one of {', '.join(DRAFTERS)}.",
    ),
    refused(
        "--speculative-config with recurrent states and images",
        "drafts of a model",
        lambda e: _method(e) in _SYNCHRONOUS and e.model.is_multimodal_model,
        as_given=lambda e: f"--speculative-config of method {_method(e)!r}",
        because="the model has recurrent states and takes images",
    ),
    refused(
        "--use-replayssm",
        "replayed states",
        lambda e: keeps_states(e.model) and e.vllm.cache_config.use_replayssm,
    ),
    refused(
        "--enable-mamba-cache-stochastic-rounding",
        "stochastic rounding of states",
        lambda e: keeps_states(e.model) and e.vllm.mamba_config.enable_stochastic_rounding,
    ),
)
