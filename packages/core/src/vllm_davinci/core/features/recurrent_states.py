"""Hybrid models (recurrent state): incompatible features, and what is turned off for them."""

from vllm_davinci.core.config.architectures import keeps_states, takes_images
from vllm_davinci.core.errors import RELEASE
from vllm_davinci.core.features.feature import Engine, Feature, refused

# Methods that draft after the host knows how many tokens were accepted.
DRAFTERS = ("ngram", "custom_class", "mtp")
# Drafters that run a model on the device. Under asynchronous scheduling the host does not yet know
# how many tokens were accepted, and tokens were observed to differ.
_SYNCHRONOUS = ("mtp",)


def _method(engine: Engine) -> str | None:
    """The speculation method of an engine with recurrent state, or None."""
    asked = engine.vllm.speculative_config
    return None if asked is None or not keeps_states(engine.model) else asked.method


def settle(engine: Engine) -> None:
    """Turns off vLLM defaults that would change tokens.

    These are prefix caching, and asynchronous scheduling with some drafters.
    """
    cache, scheduler = engine.vllm.cache_config, engine.vllm.scheduler_config
    # Without prefix states vLLM stores one state per request, in one block of max_model_len tokens.
    cache.mamba_cache_mode, cache.mamba_block_size = "none", engine.model.max_model_len
    reason = f"not available in {RELEASE}: cached states of prefixes"
    engine.set(cache, "enable_prefix_caching", False, reason)
    if _method(engine) in _SYNCHRONOUS:
        reason = "the host must know the accepted drafts before it updates states"
        engine.set(scheduler, "async_scheduling", False, reason)


FEATURES = (
    Feature(
        "",
        "recurrent states",
        lambda e: keeps_states(e.model),
        excludes=dict.fromkeys(
            (
                "--enable-lora",
                "--kv-transfer-config",
                "--kv-offloading-size",
                "--runner pooling",
            ),
            "",
        ),
        settle=settle,
    ),
    refused(
        "--speculative-config with recurrent states",
        "methods that draft before the host knows the accepted tokens",
        lambda e: _method(e) not in (None, *DRAFTERS),
        as_given=lambda e: f"--speculative-config of method {_method(e)!r}",
        because="layers have recurrent state",
        instead=f"Use one of {', '.join(DRAFTERS)}.",
    ),
    refused(
        "--speculative-config with recurrent states and images",
        "drafts of a model",
        lambda e: _method(e) in _SYNCHRONOUS and takes_images(e.model),
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
