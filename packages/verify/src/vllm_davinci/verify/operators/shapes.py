"""Sizes of released models' layers, on one rank of a layout that serves them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "deployments" / "models"


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of MLA: nope, rope and value are sizes of a head's parts."""

    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelSizes:
    """
    ranks:        tensor-parallel ranks that share heads and columns
    intermediate: columns of the MLP on one rank
    experts:      on one rank; all_experts of the model
    groups, chosen_groups: of experts
    heads, kv_heads: on one rank
    index_heads:  of the indexer of sparse attention
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


# Model -> its tensor-parallel ranks, and over how many its experts are spread.
LAYOUTS = {
    "qwen3-8b": (1, 1),
    "qwen3-30b-a3b": (2, 16),
    "glm-4.5-air": (8, 32),
    "deepseek-v3": (8, 64),
    "deepseek-v3.2": (8, 64),
}


def sizes_of(name: str) -> ModelSizes:
    """The sizes of a model of the deployments' table."""
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    ranks, expert_ranks = LAYOUTS[name]
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    all_experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    latent = None
    if "kv_lora_rank" in config:
        latent = LatentSizes(
            config["q_lora_rank"],
            config["kv_lora_rank"],
            config["qk_nope_head_dim"],
            config["qk_rope_head_dim"],
            config["v_head_dim"],
        )
    return ModelSizes(
        name=name,
        hidden=config["hidden_size"],
        heads=heads // ranks,
        kv_heads=max(1, config["num_key_value_heads"] // ranks),
        head_size=head_size,
        rotary_size=int(head_size * config.get("partial_rotary_factor", 1.0)),
        intermediate=config["intermediate_size"] // ranks,
        epsilon=config["rms_norm_eps"],
        latent=latent,
        all_experts=all_experts,
        experts=max(1, all_experts // expert_ranks) if all_experts else 0,
        top_k=config.get("num_experts_per_tok") or 0,
        groups=config.get("n_group") or 1,
        chosen_groups=config.get("topk_group") or 1,
        is_sigmoid=config["model_type"].startswith(("deepseek", "glm")),
        scaling_factor=config.get("routed_scaling_factor") or 1.0,
        expert_intermediate=config.get("moe_intermediate_size") or 0,
        index_heads=config.get("index_n_heads") or 0,
    )
