"""Sizes of a model's layers on one rank."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of MLA; nope, rope and value are sizes of a head's parts."""

    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelSizes:
    """
    ranks:        tensor-parallel ranks
    intermediate: columns of the MLP, on one rank
    experts:      number on one rank; all_experts: of the model
    groups, chosen_groups: groups of experts
    heads, kv_heads: numbers on one rank
    index_heads:  heads of sparse attention's indexer
    has_common:   True: includes calls that depend on no model's sizes
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_size: int
    intermediate: int
    epsilon: float
    latent: LatentSizes | None = None
    all_experts: int = 0
    experts: int = 0
    top_k: int = 0
    groups: int = 1
    chosen_groups: int = 1
    is_sigmoid: bool = False
    scaling_factor: float = 1.0
    expert_intermediate: int = 0
    index_heads: int = 0
    has_common: bool = False
