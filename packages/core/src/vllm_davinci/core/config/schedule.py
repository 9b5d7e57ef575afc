"""One word for the whole schedule: what `overlap` stands for on this engine.

Later code reads the single options only, and `overlap` itself where published and lean differ in
more than these: whether shared and routed experts are summed over ranks apart or together.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_davinci.core import components
from vllm_davinci.core.config.options import SCHEDULES, get_config
from vllm_davinci.core.config.sequence_parallel import reason_against_sequence_parallel
from vllm_davinci.core.config.side_streams import has_shared_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DUAL_BATCH = "dbo.enabled"
ATTENTION = "torchair_graph_config.enable_multistream_mla"
EXPERTS = "torchair_graph_config.enable_multistream_moe"
SEQUENCE_PARALLEL = "sequence_parallel.enabled"


class _Choice(NamedTuple):
    key: str
    value: bool
    reason: str


def apply_schedule(vllm_config: "VllmConfig") -> list[str]:
    """Writes what `overlap` stands for into the single options. Returns what to tell the user.

    Call it after `gather_requests`. Idempotent. Raises what get_config raises: ConfigurationError
    for a single option that contradicts the schedule.
    """
    schedule = get_config(vllm_config).overlap
    if schedule is None:
        return []
    additional = dict(vllm_config.additional_config)
    if schedule == "auto":
        given = [choice for choice in _automatic(vllm_config) if not _is_set(additional, choice)]
    else:
        given = [
            _Choice(key, value, "")
            for key, value in SCHEDULES[schedule].items()
            if not value or _applies(key, vllm_config)
        ]
    for choice in given:
        section, name = choice.key.split(".")
        additional[section] = {**additional.get(section, {}), name: choice.value}
    vllm_config.additional_config = additional
    if schedule != "auto":
        return []
    return [
        f"overlap = 'auto' sets {choice.key} = {str(choice.value).lower()}: {choice.reason}."
        for choice in given
    ]


def _is_set(additional: Mapping[str, Any], choice: _Choice) -> bool:
    section, name = choice.key.split(".")
    return name in additional.get(section, {})


def _applies(key: str, vllm_config: "VllmConfig") -> bool:
    """Whether the model has what the option is about."""
    if key == SEQUENCE_PARALLEL:
        return reason_against_sequence_parallel(vllm_config) is None
    model = vllm_config.model_config
    if model is None:
        return False
    if key == ATTENTION:
        return bool(model.use_mla)
    return has_shared_experts(model) if key == EXPERTS else True


def _automatic(vllm_config: "VllmConfig") -> Iterator[_Choice]:
    if components.stream_scheduler() is None:
        package = components.STREAMS.package
        yield _Choice(DUAL_BATCH, False, f"{package} is not installed")
        return
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if vllm_config.speculative_config is not None:
        yield _Choice(DUAL_BATCH, False, "a draft model reads the hidden states of whole steps")
    elif ranks == 1:
        yield _Choice(DUAL_BATCH, False, "one rank computes each layer alone")
    else:
        yield _Choice(
            DUAL_BATCH, True, "ranks communicate in each layer; small steps and decodes stay whole"
        )
    if _applies(ATTENTION, vllm_config):
        yield _Choice(
            ATTENTION, False, "without graph mode the host's launches take a decode's time"
        )
    if _applies(EXPERTS, vllm_config):
        if parallel.data_parallel_size > 1:
            yield _Choice(EXPERTS, True, "tokens travel between DP ranks in every step")
        else:
            yield _Choice(EXPERTS, False, "no token travels that shared experts could hide")
    against = reason_against_sequence_parallel(vllm_config)
    reason = "each rank norms its shard of the tokens" if against is None else against
    yield _Choice(SEQUENCE_PARALLEL, against is None, reason)
