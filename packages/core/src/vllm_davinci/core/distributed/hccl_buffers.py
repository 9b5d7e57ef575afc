"""Allocates HCCL's communicators before the worker measures the remaining memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch_npu
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_dp_group,
    get_ep_group,
    get_eplb_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
)

from vllm_davinci.core.config.environment_variables import HCCL_BUFFER, hccl_buffer_mib
from vllm_davinci.core.device.memory import format_bytes
from vllm_davinci.core.device.soc import MIB
from vllm_davinci.core.errors import DeviceError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_communicators(
    vllm_config: "VllmConfig", device: torch.device, own: Iterable[GroupCoordinator] = ()
) -> None:
    """Runs one small collective in each group that steps will use. Every rank calls it once.

    own: groups in addition to vLLM's
    A group's first collective makes its communicator, which takes device memory of twice the
    group's HCCL buffer, 400 MB by default. Later, it would take memory planned for the KV cache.
    Raises DeviceError if the device has less.
    """
    model = vllm_config.model_config
    is_moe = model is not None and model.is_moe
    groups: list[GroupCoordinator] = [get_tp_group(), get_pp_group(), get_pcp_group()]
    if is_moe:
        groups += [get_dp_group(), get_ep_group()]
    if vllm_config.parallel_config.eplb_config.communicator == "torch_nccl":
        groups.append(get_eplb_group())
    for group in (*groups, *own):
        if group.world_size > 1:
            make_communicator(group.unique_name, group.device_group, device)
    torch.accelerator.synchronize()


def make_communicator(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Runs one small collective in a group, for `make_communicators`. Does not wait for it."""
    with needs_buffers_of(f"the group {name}", hccl_buffer_mib()):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


@contextmanager
def needs_buffers_of(owner: str, buffer_mib: int, *remedies: str) -> Iterator[None]:
    """Wraps the creation of a communicator: raises DeviceError if it fails for lack of memory.

    owner:    group that gets the communicator, for the message
    remedies: instructions to the user, in addition to a smaller HCCL_BUFFSIZE
    HCCL has several statuses for this error, so the memory that was free before decides.
    """
    free_bytes, total_bytes = torch_npu.npu.mem_get_info()
    needed_bytes = 2 * buffer_mib * MIB
    try:
        yield
    except RuntimeError as error:
        if needed_bytes <= free_bytes:
            raise
        if buffer_mib == hccl_buffer_mib():
            fewer = f"set {HCCL_BUFFER.key}, {buffer_mib} now, to fewer MiB"
            remedies = (f"{fewer}: every group takes twice that", *remedies)
        raise DeviceError(
            f"The HCCL communicator of {owner} does not fit: it takes {format_bytes(needed_bytes)} "
            f"of device memory, twice its buffer of {buffer_mib} MiB, and "
            f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free. To make it fit: "
            f"{'; or '.join(remedies)}."
        ) from error
