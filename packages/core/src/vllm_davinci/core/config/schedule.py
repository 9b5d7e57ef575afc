"""One word for the whole schedule: what `overlap` stands for on this engine.

Later code reads the single options only, and `overlap` itself where published and lean differ in
more than these: whether shared and routed experts are summed over ranks apart or together.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_davinci.core import components
from vllm_davinci.core.config.options import SCHEDULES, DavinciConfig
from vllm_davinci.core.config.sequence_parallel import ENABLED as SEQUENCE_PARALLEL
from vllm_davinci.core.config.side_streams import ATTENTION, EXPERTS, has_shared_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DUAL_BATCH = "dbo.enabled"


class Choice(NamedTuple):
    """The value of one option, its key dotted; with a reason where `auto` chose."""

    key: str
    value: bool
    reason: str = ""

    def told(self) -> str:
        """For the log."""
        return f"overlap = 'auto' sets {self.key} = {str(self.value).lower()}: {self.reason}."


def chosen_by_schedule(
    vllm_config: "VllmConfig", config: DavinciConfig, against_sequence_parallel: str | None
) -> list[Choice]:
    """The single options that `config.overlap` sets: those that the model has a use for.

    `auto` sets those that are not given. against_sequence_parallel: why it cannot be, or None
    """
    if config.overlap is None:
        return []
    if config.overlap == "auto":
        chosen = _automatic(vllm_config, against_sequence_parallel)
        return [choice for choice in chosen if not _is_given(config, choice)]
    return [
        Choice(key, value)
        for key, value in SCHEDULES[config.overlap].items()
        if not value or _applies(key, vllm_config, against_sequence_parallel)
    ]


def with_choices(config: DavinciConfig, choices: Sequence[Choice]) -> DavinciConfig:
    """The configuration with these values."""
    for choice in choices:
        section, name = choice.key.split(".")
        changed = getattr(config, section).model_copy(update={name: choice.value})
        config = config.model_copy(update={section: changed})
    return config


def _is_given(config: DavinciConfig, choice: Choice) -> bool:
    section, name = choice.key.split(".")
    return name in getattr(config, section).model_fields_set


def _applies(key: str, vllm_config: "VllmConfig", against_sequence_parallel: str | None) -> bool:
    """Whether the engine has what the option is about."""
    if key == SEQUENCE_PARALLEL:
        return against_sequence_parallel is None
    model = vllm_config.model_config
    if model is None:
        return False
    if key == ATTENTION:
        return bool(model.use_mla)
    return has_shared_experts(model) if key == EXPERTS else True


def _replays_decodes(vllm_config: "VllmConfig") -> bool:
    from vllm.config import CUDAGraphMode  # vLLM imports this module first

    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode != CUDAGraphMode.NONE


def _automatic(
    vllm_config: "VllmConfig", against_sequence_parallel: str | None
) -> Iterator[Choice]:
    if components.stream_scheduler() is None:
        package = components.STREAMS.package
        yield Choice(DUAL_BATCH, False, f"{package} is not installed")
        return
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if vllm_config.speculative_config is not None:
        yield Choice(DUAL_BATCH, False, "a draft model reads the hidden states of whole steps")
    elif ranks == 1:
        yield Choice(DUAL_BATCH, False, "one rank computes each layer alone")
    else:
        yield Choice(
            DUAL_BATCH, True, "ranks communicate in each layer; small steps and decodes stay whole"
        )
    if _applies(ATTENTION, vllm_config, against_sequence_parallel):
        if _replays_decodes(vllm_config):
            yield Choice(
                ATTENTION, True, "decodes replay graphs, where side streams cost the host nothing"
            )
        else:
            yield Choice(
                ATTENTION, False, "without graph mode the host's launches take a decode's time"
            )
    if _applies(EXPERTS, vllm_config, against_sequence_parallel):
        if parallel.data_parallel_size > 1:
            yield Choice(EXPERTS, True, "tokens travel between DP ranks in every step")
        else:
            yield Choice(EXPERTS, False, "no token travels that shared experts could hide")
    yield Choice(
        SEQUENCE_PARALLEL,
        against_sequence_parallel is None,
        against_sequence_parallel or "each rank norms its shard of the tokens",
    )
