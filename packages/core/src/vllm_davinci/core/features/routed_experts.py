"""Options of routed experts, checked before any process starts."""

from typing import TYPE_CHECKING

from vllm import platforms

from vllm_davinci.core.config.options import DYNAMIC
from vllm_davinci.core.config.parsing import get_settings
from vllm_davinci.core.config.setting import Setting, Source, last_by_key
from vllm_davinci.core.device.soc import Soc, soc_of
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature, is_always
from vllm_davinci.core.fused_moe.communication import CommunicationRule, RoutedSizes
from vllm_davinci.core.fused_moe.expert_layout import check_expert_count, expert_layout
from vllm_davinci.core.fused_moe.expert_map_file import check_expert_map, redundant_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_davinci.core.config.options import DavinciConfig

KEY = "moe_communication"


def settle(engine: Engine) -> None:
    """Warns about options without effect on this model.

    Raises ConfigurationError for a model whose experts cannot be divided as requested.
    """
    model, config = engine.model, engine.config
    if model is None:
        return
    if model.hf_config.model_type == "dbrx":  # vLLM does not find its number of experts
        model.model_arch_config.num_experts = model.hf_config.ffn_config.moe_num_experts
    if not model.is_moe:
        engine.warnings.extend(
            f"additional_config key {key!r} has no effect: {model.model} has no routed experts"
            for key in ("expert_tensor_parallel_size", "expert_map_path", KEY)
            if getattr(config, key) not in (0, None, "auto")
        )
        return
    num_experts = model.get_num_experts()
    rule, num_redundant = _rule(
        engine.vllm, config, soc_of(platforms.current_platform.get_device_name())
    )
    check_expert_count(num_experts, rule.layout, num_redundant)
    try:
        rule.check()
    except ConfigurationError as error:
        asked = last_by_key(get_settings(engine.vllm)).get(KEY)
        if asked is None or asked.source != Source.VARIABLE:
            raise
        raise ConfigurationError(f"{error} {asked.reason} requests it: unset it.") from None
    if config.expert_map_path is None:
        return
    if rule.layout.ep_size > 1:
        check_expert_map(config.expert_map_path, num_experts, rule.layout.ep_size)
        return
    note = "has no effect: every rank holds a part of all experts. Add --enable-expert-parallel"
    engine.warnings.append(f"additional_config key 'expert_map_path' {note}")


def _rule(
    vllm_config: "VllmConfig", config: "DavinciConfig", soc: Soc
) -> tuple[CommunicationRule, int]:
    """The rule that chooses the dispatch method, and the number of redundant slots."""
    model = vllm_config.model_config
    layout = expert_layout(vllm_config.parallel_config, config)
    num_redundant = redundant_experts(config, model.get_num_experts(), layout.ep_size)
    sizes = RoutedSizes.of_model(model, num_redundant)
    rule = CommunicationRule.of_engine(vllm_config, config, soc, model.dtype, sizes)
    return rule, num_redundant


def communication_settings(
    vllm_config: "VllmConfig", config: "DavinciConfig", soc: Soc
) -> list[Setting]:
    """Dispatch methods of decodes and of prefills; [] without experts."""
    model = vllm_config.model_config
    if model is None or not model.is_moe:
        return []
    rule, _ = _rule(vllm_config, config, soc)
    steps = {
        "decodes": rule.choose(1),
        "prefills": rule.choose(vllm_config.scheduler_config.max_num_batched_tokens),
    }
    source = Source.MODEL if rule.forced is None else Source.ADDITIONAL_CONFIG
    return [
        Setting(f"experts' tokens of {step}", choice.method.value, source, choice.reason)
        for step, choice in steps.items()
    ]


FEATURES = (Feature("", "routed experts", is_always, settle=settle, after=(DYNAMIC,)),)
