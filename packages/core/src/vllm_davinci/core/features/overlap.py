"""The option `overlap`: the options that its presets imply on this engine.

Later code reads the single options. It reads `overlap` itself where presets differ and no option
says so: `published` all-reduces shared and routed experts separately, `lean` together.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_davinci.core import components
from vllm_davinci.core.config.architectures import is_sparse, keeps_states
from vllm_davinci.core.config.options import OVERLAP_PRESETS, DavinciConfig
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.config.side_streams import ATTENTION, EXPERTS
from vllm_davinci.core.config.step_costs import (
    SHARDED_FROM,
    SURELY_FASTER_SHARDED,
    chosen_by_costs,
    replays_decodes,
)
from vllm_davinci.core.features.dual_batch import ENABLED as DUAL_BATCH
from vllm_davinci.core.features.sequence_parallel import ENABLED as SEQUENCE_PARALLEL
from vllm_davinci.core.features.side_streams import has_shared_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Features that only `auto` turns on.
_SWITCHES = (DUAL_BATCH, "weight_prefetch_config.enabled")


def chosen_by_preset(
    vllm_config: "VllmConfig",
    config: DavinciConfig,
    against_sequence_parallel: str | None,
    costs: Path | None = None,
) -> list[Setting]:
    """The options that `config.overlap` sets: those that apply to the model.

    `auto` sets the options that are not given. Without `auto`, step times decide only how features
    that are enabled run: how steps are cut, and from which size they are sequence parallel.
    against_sequence_parallel: why the engine cannot run sequence parallel, or None
    costs:                     step-time file of this engine, or None
    """
    fastest = [] if costs is None else chosen_by_costs(costs)
    if config.overlap == "auto":
        named = {each.key for each in fastest}
        rules = _automatic(vllm_config, against_sequence_parallel)
        chosen = [*(each for each in rules if each.key not in named), *fastest]
        return [choice for choice in chosen if not _is_given(config, choice)]
    presets = {} if config.overlap is None else OVERLAP_PRESETS[config.overlap]
    asked = [
        Setting(key, value, Source.ADDITIONAL_CONFIG, f"overlap = {config.overlap!r}")
        for key, value in presets.items()
        if not value or _applies(key, vllm_config, against_sequence_parallel)
    ]
    splits = with_settings(config, asked).dbo.enabled
    refined = [
        choice
        for choice in fastest
        if choice.key not in {*_SWITCHES, *presets}
        and (splits or not choice.key.startswith("dbo."))
        and not _is_given(config, choice)
    ]
    return [*asked, *refined]


def with_settings(config: DavinciConfig, settings: Sequence[Setting]) -> DavinciConfig:
    """The configuration with these settings applied."""
    for setting in settings:
        section, name = setting.key.split(".")
        changed = getattr(config, section).model_copy(update={name: setting.value})
        config = config.model_copy(update={section: changed})
    return config


def _is_given(config: DavinciConfig, choice: Setting) -> bool:
    section, name = choice.key.split(".")
    return name in getattr(config, section).model_fields_set


def _applies(key: str, vllm_config: "VllmConfig", against_sequence_parallel: str | None) -> bool:
    """True if the option affects this engine."""
    if key == SEQUENCE_PARALLEL:
        return against_sequence_parallel is None
    model = vllm_config.model_config
    if model is None:
        return False
    if key == ATTENTION:
        return bool(model.use_mla)
    return has_shared_experts(model) if key == EXPERTS else True


def _automatic(
    vllm_config: "VllmConfig", against_sequence_parallel: str | None
) -> Iterator[Setting]:
    if components.stream_scheduler() is None:
        package = components.STREAMS.package
        yield _auto(DUAL_BATCH, False, f"{package} is not installed")
        return
    parallel = vllm_config.parallel_config
    against = _reason_against_ubatches(vllm_config)
    yield _auto(
        DUAL_BATCH,
        against is None,
        against or "ranks communicate in each layer; small steps and decodes stay whole",
    )
    if _applies(ATTENTION, vllm_config, against_sequence_parallel):
        if is_sparse(vllm_config.model_config):
            yield _auto(ATTENTION, False, "attention is sparse")
        elif replays_decodes(vllm_config):
            yield _auto(
                ATTENTION, True, "decodes replay graphs, where side streams cost the host nothing"
            )
        else:
            yield _auto(
                ATTENTION, False, "without graph mode a decode takes as long as the host's launches"
            )
    if _applies(EXPERTS, vllm_config, against_sequence_parallel):
        if parallel.data_parallel_size > 1:
            yield _auto(EXPERTS, True, "tokens travel between DP ranks in every step")
        else:
            yield _auto(EXPERTS, False, "no transfer of tokens to hide behind shared experts")
    yield _auto(
        SEQUENCE_PARALLEL,
        against_sequence_parallel is None,
        against_sequence_parallel or "each rank then normalizes only its shard of the tokens",
    )
    if against_sequence_parallel is None:
        yield _auto(
            SHARDED_FROM,
            SURELY_FASTER_SHARDED,
            "smaller steps may become slower, depending on assumed figures",
        )


def _reason_against_ubatches(vllm_config: "VllmConfig") -> str | None:
    """The reason why steps of this engine are not split, or None."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.tensor_parallel_size * parallel.data_parallel_size == 1:
        return "one rank computes each layer alone"
    if is_sparse(model):
        return "attention is sparse"
    if keeps_states(model):
        return "layers have recurrent states"
    if parallel.decode_context_parallel_size > 1:
        return "ranks divide a context"
    return None


def _auto(key: str, value: bool | int, reason: str) -> Setting:
    return Setting(key, value, Source.MODEL, f"overlap = 'auto': {reason}")
