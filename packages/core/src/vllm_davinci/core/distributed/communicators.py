"""HCCL's communicators, made before the worker measures memory."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tp_group,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_communicators(
    vllm_config: "VllmConfig", device: torch.device, own: Iterable[GroupCoordinator] = ()
) -> None:
    """Runs one small collective in each group that steps will use. Every rank calls it, once.

    own: groups beside those of vLLM
    A group's communicator is made at its first collective, and takes twice the group's HCCL buffer
    of device memory, 400 MB unless configured otherwise. Made later it would take what the plan has
    given to the KV cache.
    """
    model = vllm_config.model_config
    is_moe = model is not None and model.is_moe
    groups: list[GroupCoordinator] = [get_tp_group(), get_pp_group()]
    if is_moe:
        groups += [get_dp_group(), get_ep_group()]
    for group in (*groups, *own):
        if group.world_size > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group.device_group)
    torch.accelerator.synchronize()
