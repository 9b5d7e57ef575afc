"""The section ascend_scheduler_config: the scheduler, and vLLM's options that it overrides."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECTION = "ascend_scheduler_config"
FLAG = f"{SECTION}.enabled"
SCHEDULERS = {
    False: "vllm_davinci.core.scheduler.prefill_first.PrefillFirstScheduler",
    True: "vllm_davinci.core.scheduler.prefill_first.AsyncPrefillFirstScheduler",
}
# Fraction of KV cache blocks kept free when prompts are admitted: the default of the established
# plugin's scheduler. vLLM's is 0.
WATERMARK = 0.01
# Fields of vLLM's SchedulerConfig without an option, because the model or the scheduler decides.
NOT_FOR_USERS = (
    "scheduler_cls",
    "runner_type",
    "max_num_encoder_input_tokens",
    "encoder_cache_size",
)


def is_prefill_first(vllm_config: "VllmConfig") -> bool:
    """True if prompts are scheduled first and whole; otherwise vLLM's own scheduler runs."""
    asked = get_config(vllm_config).ascend_scheduler_config
    return asked.enabled and (asked.model_extra or {}).get("enable_chunked_prefill") is not True


def override_scheduler_fields(vllm_config: "VllmConfig") -> None:
    """Copies ascend_scheduler_config into vLLM's SchedulerConfig.

    Called before vLLM derives anything from them. Raises ConfigurationError for an invalid
    value.
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
        given.pop("enable_chunked_prefill", None)  # the scheduler schedules whole prompts
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


def settle(engine: Engine) -> None:
    """Sets the scheduler class in vLLM's configuration."""
    scheduler = engine.vllm.scheduler_config
    name = SCHEDULERS[bool(scheduler.async_scheduling)]
    if scheduler.scheduler_cls != name:
        scheduler.scheduler_cls = name
        reason = f"{FLAG}: prompts first and whole"
        engine.changes.append(Setting("scheduler_cls", name, Source.ADDITIONAL_CONFIG, reason))


def _refused(flag: str, title: str, field: str, served: tuple[object, ...]) -> Feature:
    """A field of vLLM's SchedulerConfig with an unsupported value."""

    def value(engine: Engine) -> object:
        return getattr(engine.vllm.scheduler_config, field)

    return Feature(
        f"{flag} with {FLAG}",
        title,
        lambda engine: is_prefill_first(engine.vllm) and value(engine) not in served,
        is_served=False,
        because=f"{FLAG} schedules whole prompts in the order of arrival",
        as_given=lambda engine: f"{flag} {value(engine)}",
        instead="Remove one of the two.",
    )


FEATURES = (
    Feature(
        FLAG,
        "the prefill-first scheduler",
        lambda e: is_prefill_first(e.vllm),
        excludes={
            "a model of images, videos or sound": "prompts stay whole",
            "--runner pooling": "a pooling model does not decode",
        },
        settle=settle,
    ),
    _refused("--scheduling-policy", "another policy", "policy", ("fcfs",)),
    _refused(
        "--long-prefill-token-threshold",
        "prompts that are prefilled in chunks",
        "long_prefill_token_threshold",
        (0,),
    ),
    _refused("--scheduler-cls", "another scheduler", "scheduler_cls", (None, *SCHEDULERS.values())),
)
