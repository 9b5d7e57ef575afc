"""data-parallel ranks agree on a step in one reduction on the host.

vLLM exchanges token counts, and whether to use a graph, before every step. The same message says
here how each DP rank would cut its step; one that would not, an idle one too, is a veto.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Wish:
    """What one DP rank would do.

    num_tokens: rows of its step, padding included
    graph_mode: value of its CUDAGraphMode
    part_sizes: tokens of each ubatch, or () to run the step whole
    prefills:   whether its step has a prefill
    """

    num_tokens: int
    graph_mode: int
    part_sizes: Sequence[int] = ()
    prefills: bool = False


@dataclass(frozen=True)
class Agreement:
    """What all DP ranks do. Tensors are int32, [dp_size], on the host.

    num_tokens: rows of each DP rank's step
    graph_mode: the mode that all wish for, or None
    part_sizes: per ubatch, every DP rank's tokens; None when the step stays whole
    prefills:   whether any of them has a prefill
    """

    num_tokens: torch.Tensor
    graph_mode: int | None
    part_sizes: list[torch.Tensor] | None
    prefills: bool


def agree(wish: Wish, num_parts: int, rank: int, group: ProcessGroup) -> Agreement:
    """The same answer on every DP rank.

    num_parts: ubatches of a split step, the same everywhere
    rank:      this DP rank's place in `group`, whose backend works on the host
    """
    message = torch.zeros(3 + num_parts, dist.get_world_size(group), dtype=torch.int32)
    message[0, rank] = wish.num_tokens
    message[1, rank] = wish.graph_mode
    message[2, rank] = wish.prefills
    for index, size in enumerate(wish.part_sizes):
        message[3 + index, rank] = size
    dist.all_reduce(message, group=group)
    num_tokens, graph_modes, prefills, *part_sizes = message
    all_split = all(bool((sizes > 0).all()) for sizes in part_sizes)
    is_unanimous = bool((graph_modes == graph_modes[0]).all())
    return Agreement(
        num_tokens=num_tokens,
        graph_mode=int(graph_modes[0]) if is_unanimous else None,
        part_sizes=part_sizes if all_split else None,
        prefills=bool(prefills.any()),
    )
