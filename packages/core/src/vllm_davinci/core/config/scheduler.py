"""The section ascend_scheduler_config: an engine's scheduler, and vLLM's options that change."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECTION = "ascend_scheduler_config"
SCHEDULERS = {
    False: "vllm_davinci.core.scheduler.prefill_first.PrefillFirstScheduler",
    True: "vllm_davinci.core.scheduler.prefill_first.AsyncPrefillFirstScheduler",
}
# Share of the KV cache's blocks that stays free when prompts are admitted: the default of the
# established plugin's scheduler. vLLM's is 0.
WATERMARK = 0.01
# Fields of vLLM's SchedulerConfig that no option sets, because the model or the scheduler decides.
NOT_FOR_USERS = (
    "scheduler_cls",
    "runner_type",
    "max_num_encoder_input_tokens",
    "encoder_cache_size",
)


def is_prefill_first(vllm_config: "VllmConfig") -> bool:
    """Whether prompts are scheduled first and whole; else vLLM's own scheduler runs."""
    asked = get_config(vllm_config).ascend_scheduler_config
    return asked.enabled and (asked.model_extra or {}).get("enable_chunked_prefill") is not True


def override_scheduler_fields(vllm_config: "VllmConfig") -> None:
    """Gives vLLM's SchedulerConfig the values of ascend_scheduler_config.

    Called before vLLM derives anything from them. Raises ConfigurationError for a value that a
    field does not take, and for features that a prefill-first scheduler does not have.
    """
    asked = get_config(vllm_config).ascend_scheduler_config
    if not asked.enabled:
        return
    scheduler = vllm_config.scheduler_config
    given = dict(asked.model_extra or {})
    if refused := [name for name in NOT_FOR_USERS if name in given]:
        raise ConfigurationError(
            f"additional_config sets {SECTION}.{refused[0]}, which follows from the model and from "
            f"{SECTION}.enabled. Remove the key."
        )
    if is_prefill_first(vllm_config):
        given.pop("enable_chunked_prefill", None)  # whole prompts: see the scheduler
        if scheduler.watermark == 0:
            given.setdefault("watermark", WATERMARK)
    if given.get("async_scheduling") is True and scheduler.async_scheduling is False:
        raise ConfigurationError(
            f"additional_config sets {SECTION}.async_scheduling, and this engine cannot schedule "
            "asynchronously, or --no-async-scheduling is given. Remove one of the two."
        )
    for name, value in given.items():
        try:
            type(scheduler).__pydantic_validator__.validate_assignment(scheduler, name, value)
        except ValidationError as error:
            raise ConfigurationError(
                f"additional_config key '{SECTION}.{name}' is {value!r} "
                f"({type(value).__name__}): {error.errors()[0]['msg']}."
            ) from None
    if vllm_config.model_config is not None:
        try:
            scheduler.verify_max_model_len(vllm_config.model_config.max_model_len)
        except ValueError as error:
            raise ConfigurationError(f"{SECTION} does not fit the model: {error}") from None
    if is_prefill_first(vllm_config):
        _refuse_what_is_not_prefill_first(vllm_config)


def _refuse_what_is_not_prefill_first(vllm_config: "VllmConfig") -> None:
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    reasons = {
        f"its policy is fcfs, and {scheduler.policy!r} is asked for": scheduler.policy != "fcfs",
        f"prompts stay whole, and long_prefill_token_threshold is "
        f"{scheduler.long_prefill_token_threshold}": scheduler.long_prefill_token_threshold > 0,
        f"--scheduler-cls is {scheduler.scheduler_cls}": scheduler.scheduler_cls
        not in (None, *SCHEDULERS.values()),
        "the model is multimodal": scheduler.is_multimodal_model
        or (model is not None and model.is_multimodal_model),
        "a pooling model decodes nothing": model is not None and model.runner_type == "pooling",
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigurationError(
            f"additional_config sets {SECTION}.enabled, and its scheduler cannot run: "
            f"{'; '.join(found)}. Remove one of the two."
        )


def settle_scheduler(vllm_config: "VllmConfig") -> list[Setting]:
    """Names the scheduler's class for vLLM. Returns the setting. Idempotent."""
    scheduler = vllm_config.scheduler_config
    name = SCHEDULERS[bool(scheduler.async_scheduling)]
    if not is_prefill_first(vllm_config) or scheduler.scheduler_cls == name:
        return []
    scheduler.scheduler_cls = name
    reason = f"{SECTION}.enabled: prompts first and whole"
    return [Setting("scheduler_cls", name, Source.ADDITIONAL_CONFIG, reason)]
