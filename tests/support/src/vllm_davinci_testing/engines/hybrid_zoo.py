"""Small checkpoints whose layers keep states, in place of keys and values or beside them."""

from __future__ import annotations

from typing import Any

from vllm_davinci_testing.engines.zoo_model import ZooModel

# Gated DeltaNet before gated attention with partial rotary positions; dense layers and experts.
GATED_DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
HYBRIDS = (
    ZooModel(
        "qwen3_next_moe",
        "qwen3_next",
        4,
        2,
        64,
        hidden_size=128,
        num_layers=4,
        options={
            **GATED_DELTA_NET,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    # States of more bytes than a block of keys and values has: blocks grow.
    ZooModel(
        "qwen3_next_large_state",
        "qwen3_next",
        4,
        1,
        64,
        hidden_size=128,
        num_layers=2,
        seed=1,
        options={
            **GATED_DELTA_NET,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_value_heads": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    # Without interleaved projections, whose states are in fp32 whatever the model's dtype.
    ZooModel(
        "qwen3_5_dense",
        "qwen3_5_text",
        4,
        2,
        64,
        hidden_size=128,
        num_layers=4,
        seed=2,
        tied=True,
        options=GATED_DELTA_NET,
    ),
    ZooModel(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        4,
        2,
        64,
        hidden_size=128,
        num_layers=4,
        seed=3,
        options={
            **GATED_DELTA_NET,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
)
