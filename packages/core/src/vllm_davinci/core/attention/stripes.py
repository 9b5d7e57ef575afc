"""Tokens of a request that each rank holds under decode context parallelism."""

from typing import NamedTuple, TypeVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group

Numbers = TypeVar("Numbers", int, np.ndarray)
Positions = TypeVar("Positions", np.ndarray, torch.Tensor)


class Stripes(NamedTuple):
    """Division of a request's tokens: consecutive runs, assigned to the ranks in turn.

    size:       ranks among which tokens are divided
    rank:       this one
    interleave: tokens per run
    """

    size: int
    rank: int
    interleave: int

    def length(self, tokens: Numbers, rank: int | None = None) -> Numbers:
        """Number of a request's first `tokens` tokens that a rank holds. rank: None for this one"""
        rank = self.rank if rank is None else rank
        turns, rest = np.divmod(tokens, self.interleave * self.size)
        last = np.clip(rest - rank * self.interleave, 0, self.interleave)
        kept: Numbers = turns * self.interleave + last
        return kept

    def lengths(self, tokens: list[int]) -> list[int]:
        """`length` of each request on this rank."""
        kept: list[int] = self.length(np.asarray(tokens, dtype=np.int64)).tolist()
        return kept

    def owners(self, positions: Positions) -> Positions:
        """The rank that holds each token of a request. positions: of the tokens, from 0"""
        owners: Positions = positions // self.interleave % self.size
        return owners

    def places(self, positions: Positions) -> Positions:
        """Index of each token among the tokens of its rank."""
        turns = positions // (self.interleave * self.size)
        places: Positions = turns * self.interleave + positions % self.interleave
        return places


def stripes_of(vllm_config: VllmConfig) -> Stripes | None:
    """Division of tokens among this engine's ranks; None if every rank holds all tokens."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return None
    group = get_dcp_group()
    return Stripes(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


def divides_context() -> bool:
    """True if the engine that is being built divides each context among ranks."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.decode_context_parallel_size > 1
