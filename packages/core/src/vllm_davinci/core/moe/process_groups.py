"""Process groups of the ranks that exchange tokens."""

from typing import TYPE_CHECKING

from vllm.distributed import get_ep_group
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_world_group,
    init_model_parallel_group,
)

from vllm_davinci.core.config import get_config
from vllm_davinci.core.moe.groups import ExpertLayout, expert_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_of_layout: dict[ExpertLayout, GroupCoordinator] = {}


def init_expert_groups(vllm_config: "VllmConfig", backend: str) -> None:
    """Makes the groups that vLLM has none for. Every rank of the engine calls it, once."""
    if vllm_config.model_config is None or vllm_config.model_config.is_moe:
        init_groups_of(expert_layout(vllm_config.parallel_config, get_config(vllm_config)), backend)


def init_groups_of(layout: ExpertLayout, backend: str) -> None:
    """Makes the groups of ranks with the same part of different experts."""
    if layout.etp_size == 1 or layout.ep_size == 1:
        return
    ranks = [
        [stage[index] for index in group]
        for stage in get_ep_group().group_ranks  # one list of all experts' ranks per pipeline stage
        for group in layout.ep_groups()
    ]
    _of_layout[layout] = init_model_parallel_group(
        ranks, get_world_group().local_rank, backend, group_name="experts"
    )


def expert_group(layout: ExpertLayout) -> GroupCoordinator:
    """The ranks among which this rank's part of the experts is dealt out."""
    if layout.etp_size == 1:
        return get_ep_group()
    return _of_layout[layout]


def destroy_expert_groups() -> None:
    """Ends what init_expert_groups made."""
    while _of_layout:
        _of_layout.popitem()[1].destroy()
