"""Process groups of the ranks that exchange tokens."""

from typing import TYPE_CHECKING

import torch
import torch_npu
from vllm.distributed import get_ep_group
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_world_group,
    init_model_parallel_group,
)

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.soc import Soc, soc_of
from vllm_davinci.core.distributed.hccl_buffers import needs_buffers_of
from vllm_davinci.core.fused_moe.communication import CommunicationRule, RoutedSizes, window_mib
from vllm_davinci.core.fused_moe.dispatcher.fused import FusedGroup
from vllm_davinci.core.fused_moe.expert_layout import ExpertLayout, expert_layout
from vllm_davinci.core.fused_moe.expert_map_agreement import check_expert_maps
from vllm_davinci.core.fused_moe.expert_map_file import redundant_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_of_layout: dict[ExpertLayout, GroupCoordinator] = {}
_fused: dict[ExpertLayout, FusedGroup] = {}

# How users can shrink the buffer of fused launches, or avoid it.
_FEWER_TOKENS = (
    "lower --max-num-seqs and --max-num-batched-tokens",
    "choose another dispatch method: additional_config key 'moe_communication' = 'all_to_all'",
)


def init_expert_groups(vllm_config: "VllmConfig", backend: str) -> None:
    """Creates the groups that vLLM lacks. Every rank of the engine calls it once."""
    model = vllm_config.model_config
    if model is None or not model.is_moe:
        return
    config = get_config(vllm_config)
    experts = get_ep_group()
    if experts.world_size > 1:
        check_expert_maps(config.expert_map_path, experts.cpu_group)
    soc = soc_of(torch_npu.npu.get_device_name())
    layout = expert_layout(vllm_config.parallel_config, config)
    num_redundant = redundant_experts(config, model.get_num_experts(), layout.ep_size)
    sizes = RoutedSizes.of_model(model, num_redundant)
    rule = CommunicationRule.of_engine(vllm_config, config, soc, model.dtype, sizes)
    init_groups_of(rule.layout, backend)
    if rule.may_fuse:
        tokens = rule.max_fused_tokens(soc, vllm_config.scheduler_config.max_num_batched_tokens)
        init_fused_group(rule.layout, soc, backend, tokens, sizes)


def init_groups_of(layout: ExpertLayout, backend: str) -> None:
    """Creates the groups of ranks with the same part of different experts."""
    if layout.etp_size > 1 and layout.ep_size > 1:
        _of_layout[layout] = _new_group(layout, backend, "experts")


def init_fused_group(
    layout: ExpertLayout, soc: Soc, backend: str, max_tokens: int, sizes: RoutedSizes
) -> None:
    """Creates a second group of those ranks: fused launches need a dedicated one.

    max_tokens: most tokens per rank in one launch, which decides the size of the group's HCCL
                buffer
    """
    limits = soc.fused_experts
    assert limits is not None
    group = _new_group(layout, backend, "fused_experts")
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    buffer_mib = window_mib(limits, max_tokens, sizes, layout)
    options.hccl_config = {"hccl_buffer_size": buffer_mib}
    # vLLM makes its groups without options. All ranks make all groups of a world, in one order.
    own = None
    for ranks in _ranks_of(layout):
        made = torch.distributed.new_group(ranks, backend=backend, pg_options=options)
        own = made if group.rank in ranks else own
    assert own is not None
    hccl = own._get_backend(torch.device("npu"))
    with needs_buffers_of(
        f"fused launches of experts, of up to {max_tokens} tokens,", buffer_mib, *_FEWER_TOKENS
    ):
        name = hccl.get_hccl_comm_name(group.rank_in_group)
    _fused[layout] = FusedGroup(group, name, limits, max_tokens)


def _new_group(layout: ExpertLayout, backend: str, name: str) -> GroupCoordinator:
    return init_model_parallel_group(
        _ranks_of(layout), get_world_group().local_rank, backend, group_name=name
    )


def _ranks_of(layout: ExpertLayout) -> list[list[int]]:
    return [
        [stage[index] for index in group]
        for stage in get_ep_group().group_ranks  # the ranks with experts of each pipeline stage
        for group in layout.ep_groups()
    ]


def expert_group(layout: ExpertLayout) -> GroupCoordinator:
    """The ranks among which this rank's part of the experts is divided."""
    if layout.etp_size == 1:
        return get_ep_group()
    return _of_layout[layout]


def groups_of_experts() -> list[GroupCoordinator]:
    """Groups made by `init_expert_groups` that run collectives."""
    return list(_of_layout.values())


def fused_group(layout: ExpertLayout) -> FusedGroup:
    """The ranks of `expert_group`, in the dedicated group for fused launches."""
    return _fused[layout]
