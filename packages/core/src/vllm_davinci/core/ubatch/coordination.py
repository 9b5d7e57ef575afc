"""Data-parallel ranks coordinate a step in one reduction on the host.

vLLM exchanges token counts and graphs' modes before every step. This message says how each DP rank
would split its step. A rank that keeps its step whole, even an idle one, prevents the split.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from vllm_davinci.core.config.time_limits import LONGER_WAIT
from vllm_davinci.core.errors import DeviceError


@dataclass(frozen=True)
class RankStep:
    """The step that one DP rank would run alone.

    ubatch_sizes: tokens of each ubatch, or () to run the step whole
    prefills:     whether it has a prefill
    """

    ubatch_sizes: Sequence[int] = ()
    prefills: bool = False


@dataclass(frozen=True)
class CoordinatedStep:
    """The step that all DP ranks run. Tensors are int32, [dp_size], on the host.

    ubatch_sizes: per ubatch, every DP rank's tokens; None if the step stays whole
    prefills:     whether any rank has a prefill
    """

    ubatch_sizes: list[torch.Tensor] | None
    prefills: bool


def coordinate_across_dp(
    own: RankStep, num_ubatches: int, dp_rank: int, group: ProcessGroup
) -> CoordinatedStep:
    """Returns the same step on every DP rank. All ranks call it, once per step.

    num_ubatches: of a split step, the same everywhere
    dp_rank:      this rank's index in `group`, whose backend works on the host
    """
    message = torch.zeros(1 + num_ubatches, dist.get_world_size(group), dtype=torch.int32)
    message[0, dp_rank] = own.prefills
    for index, size in enumerate(own.ubatch_sizes):
        message[1 + index, dp_rank] = size
    try:
        dist.all_reduce(message, group=group)
    except RuntimeError as error:  # gloo's, at the timeout or if a process has ended
        raise DeviceError(
            f"Data-parallel rank {dp_rank} timed out waiting for the step of the other "
            f"{dist.get_world_size(group) - 1}: {error}. {LONGER_WAIT}"
        ) from error
    prefills, *ubatch_sizes = message
    all_split = all(bool((sizes > 0).all()) for sizes in ubatch_sizes)
    return CoordinatedStep(
        ubatch_sizes=ubatch_sizes if all_split else None, prefills=bool(prefills.any())
    )
