"""The address at which ranks on other hosts reach this host."""

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from vllm.utils.network_utils import get_ip

from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

HCCL_ADDRESS = "HCCL_IF_IP"
HCCL_INTERFACE = "HCCL_SOCKET_IFNAME"
_UNKNOWN = "0.0.0.0"  # vLLM's result if it finds no address


def may_span_hosts(parallel: "ParallelConfig") -> bool:
    """True if ranks of one engine may be on several hosts."""
    return (
        parallel.nnodes > 1
        or parallel.data_parallel_size_local < parallel.data_parallel_size
        or "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend)
    )


def name_host_address(
    parallel: "ParallelConfig", environment: MutableMapping[str, str] = os.environ
) -> None:
    """Makes HCCL use vLLM's address of this host, unless the user has set one.

    HCCL would choose among addresses by its own rules; vLLM uses VLLM_HOST_IP if set. Call it in
    the worker: each host has its own.
    """
    if not may_span_hosts(parallel):
        return
    if environment.get(HCCL_ADDRESS) or environment.get(HCCL_INTERFACE):
        return
    address = get_ip()
    if address == _UNKNOWN:
        return
    environment[HCCL_ADDRESS] = address
    logger.info_once(
        "%s is set to %s, vLLM's address of this host (VLLM_HOST_IP), at which ranks of other"
        " hosts connect. To choose another: %s or %s.",
        HCCL_ADDRESS,
        address,
        HCCL_ADDRESS,
        HCCL_INTERFACE,
    )
