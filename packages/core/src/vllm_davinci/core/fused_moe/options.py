"""Options of routed experts, checked before any process starts."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_davinci.core.config.effective import Setting
from vllm_davinci.core.config.environment_variables import EXCHANGE_REQUESTS
from vllm_davinci.core.config.origins import NO_REQUESTS, Origin, Requests, Source
from vllm_davinci.core.device.soc import Soc
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.communication import CommunicationRule, RoutedSizes
from vllm_davinci.core.fused_moe.expert_layout import check_expert_count
from vllm_davinci.core.fused_moe.expert_map_file import read_expert_map

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_davinci.core.config.options import DavinciConfig

KEY = "moe_communication"


def gather_exchange_requests(
    vllm_config: "VllmConfig", environ: Mapping[str, str] = os.environ
) -> Requests:
    """Moves variables of earlier Ascend plugins into `additional_config`.

    Idempotent. An option wins over a variable. Raises ConfigurationError for a variable that does
    not parse, and for two that contradict each other.
    """
    additional = vllm_config.additional_config or {}
    if not isinstance(additional, Mapping):
        return NO_REQUESTS  # the typed model names what is wrong
    asked = _requested(environ)
    if len(asked) > 1:
        raise ConfigurationError(
            f"{' and '.join(asked.values())} ask for different ways between the ranks of experts. "
            f"Unset them, and set additional_config key {KEY!r} to one of {', '.join(asked)}."
        )
    for method, name in asked.items():
        if KEY not in additional:
            vllm_config.additional_config = {**additional, KEY: method}
            note = f"{name}=1 is served as {KEY} = {method!r}; prefer that option."
            return Requests([note], {KEY: Origin(Source.VARIABLE, f"{name}=1")})
        if additional[KEY] != method:
            note = f"{name}=1 has no effect: additional_config sets {KEY} = {additional[KEY]!r}."
            return Requests([note], {})
    return NO_REQUESTS


def _requested(environ: Mapping[str, str]) -> dict[str, str]:
    """Communication method -> name of the variable that asks for it."""
    return {
        method: variable.name
        for method, variable in EXCHANGE_REQUESTS.items()
        if _is_set(environ.get(variable.name, ""), variable.name)
    }


def _is_set(value: str, name: str) -> bool:
    if value not in ("", "0", "1"):
        raise ConfigurationError(
            f"{name}={value!r} is not valid: expected 0 or 1. Prefer additional_config key {KEY!r}."
        )
    return value == "1"


def check_experts(vllm_config: "VllmConfig", config: "DavinciConfig", soc: Soc) -> list[str]:
    """Raises ConfigurationError for a model whose experts the ranks cannot hold as asked.

    Returns notes about options that have no effect on this model.
    """
    model = vllm_config.model_config
    if model.is_moe:
        sizes = RoutedSizes.of_model(model)
        rule = CommunicationRule.of_engine(vllm_config, config, soc, model.dtype, sizes)
        check_expert_count(model.get_num_experts(), rule.layout)
        try:
            rule.check()
        except ConfigurationError as error:
            name = _requested(os.environ).get(config.moe_communication)
            if name is None:
                raise
            raise ConfigurationError(f"{error} {name}=1 asks for it: unset it.") from None
        if config.expert_map_path is None:
            return []
        read_expert_map(config.expert_map_path)
        if rule.layout.ep_size > 1:
            return []
        note = "has no effect: every rank has a part of all experts. Add --enable-expert-parallel"
        return [f"additional_config key 'expert_map_path' {note}"]
    return [
        f"additional_config key {key!r} has no effect: {model.model} has no routed experts"
        for key in ("expert_tensor_parallel_size", "expert_map_path", KEY)
        if getattr(config, key) not in (0, None, "auto")
    ]


def communication_settings(
    vllm_config: "VllmConfig", config: "DavinciConfig", soc: Soc
) -> list[Setting]:
    """How tokens of decodes and of prefills reach their experts, and why; [] without experts."""
    model = vllm_config.model_config
    if model is None or not model.is_moe:
        return []
    rule = CommunicationRule.of_engine(
        vllm_config, config, soc, model.dtype, RoutedSizes.of_model(model)
    )
    steps = {
        "decodes": rule.choose(1),
        "prefills": rule.choose(vllm_config.scheduler_config.max_num_batched_tokens),
    }
    source = Source.MODEL if rule.forced is None else Source.ADDITIONAL_CONFIG
    return [
        Setting(f"experts' tokens of {step}", choice.method.value, source, choice.reason)
        for step, choice in steps.items()
    ]
