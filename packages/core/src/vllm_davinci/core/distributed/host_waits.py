"""Timeouts of ranks that wait for each other on the host while serving."""

import torch.distributed as dist
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group

from vllm_davinci.core.config.time_limits import StepLimits


def limit_host_waits() -> None:
    """Limits all later waits of ranks on the host to the timeout of a step.

    Call it once all ranks serve: before, one rank may load weights for minutes longer than another.
    """
    limit = StepLimits.of_environment().coordination
    for group in (get_tp_group(), get_pp_group(), get_dp_group()):
        if group.world_size > 1:
            dist.distributed_c10d._set_pg_timeout(limit, group.cpu_group)
