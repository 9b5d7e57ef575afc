"""Options of routed experts, checked before any process starts."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.parsing import get_settings
from vllm_davinci.core.config.setting import Setting, Source, last_by_key
from vllm_davinci.core.device.soc import Soc
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.communication import CommunicationRule, RoutedSizes
from vllm_davinci.core.fused_moe.expert_layout import check_expert_count, expert_layout
from vllm_davinci.core.fused_moe.expert_map_file import check_expert_map, redundant_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_davinci.core.config.options import DavinciConfig

KEY = "moe_communication"


def check_experts(vllm_config: "VllmConfig", config: "DavinciConfig", soc: Soc) -> list[str]:
    """Raises ConfigurationError for a model whose experts the ranks cannot hold as asked.

    Returns notes about options that have no effect on this model.
    """
    model = vllm_config.model_config
    if model.is_moe:
        num_experts = model.get_num_experts()
        layout = expert_layout(vllm_config.parallel_config, config)
        num_redundant = redundant_experts(config, num_experts, layout.ep_size)
        sizes = RoutedSizes.of_model(model, num_redundant)
        rule = CommunicationRule.of_engine(vllm_config, config, soc, model.dtype, sizes)
        check_expert_count(num_experts, rule.layout, num_redundant)
        try:
            rule.check()
        except ConfigurationError as error:
            asked = last_by_key(get_settings(vllm_config)).get(KEY)
            if asked is None or asked.source != Source.VARIABLE:
                raise
            raise ConfigurationError(f"{error} {asked.reason} asks for it: unset it.") from None
        if config.expert_map_path is None:
            return []
        if layout.ep_size > 1:
            check_expert_map(config.expert_map_path, num_experts, layout.ep_size)
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
    """Returns how tokens of decodes and of prefills reach their experts; [] without experts."""
    model = vllm_config.model_config
    if model is None or not model.is_moe:
        return []
    layout = expert_layout(vllm_config.parallel_config, config)
    num_redundant = redundant_experts(config, model.get_num_experts(), layout.ep_size)
    sizes = RoutedSizes.of_model(model, num_redundant)
    rule = CommunicationRule.of_engine(vllm_config, config, soc, model.dtype, sizes)
    steps = {
        "decodes": rule.choose(1),
        "prefills": rule.choose(vllm_config.scheduler_config.max_num_batched_tokens),
    }
    source = Source.MODEL if rule.forced is None else Source.ADDITIONAL_CONFIG
    return [
        Setting(f"experts' tokens of {step}", choice.method.value, source, choice.reason)
        for step, choice in steps.items()
    ]
