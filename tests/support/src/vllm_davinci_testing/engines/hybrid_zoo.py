"""Small checkpoints with recurrent state, alone or beside attention."""

from typing import Any

from vllm_davinci_testing.engines.zoo_model import ZooModel

# Gated DeltaNet, and gated attention with partial rotary embedding; dense layers and experts.
GATED_DELTA_NET: dict[str, Any] = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
MAMBA2_OF_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "chunk_size": 128,
}
EXPERTS_OF_QWEN: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
HYBRIDS = (
    ZooModel(
        *("qwen3_next_moe", "qwen3_next", 4, 2, 64),
        hidden_size=128,
        num_layers=4,
        options={
            **GATED_DELTA_NET,
            **EXPERTS_OF_QWEN,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    # States larger than a block of keys and values, so that blocks grow.
    ZooModel(
        *("qwen3_next_large_state", "qwen3_next", 4, 1, 64),
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
    # Projections are not interleaved; states are fp32 with any model dtype.
    ZooModel(
        *("qwen3_5_dense", "qwen3_5_text", 4, 2, 64),
        hidden_size=128,
        num_layers=4,
        seed=2,
        tied=True,
        options=GATED_DELTA_NET,
    ),
    ZooModel(
        *("qwen3_5_moe", "qwen3_5_moe_text", 4, 2, 64),
        hidden_size=128,
        num_layers=4,
        seed=3,
        options={**GATED_DELTA_NET, **EXPERTS_OF_QWEN},
    ),
    # Mamba2 with two groups, attention, and separate MLP layers.
    ZooModel(
        *("nemotron_h", "nemotron_h", 4, 2, 64),
        hidden_size=128,
        num_layers=5,
        seed=4,
        options={
            "layer_types": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            **MAMBA2_OF_NEMOTRON,
        },
    ),
    # Experts without gates, chosen in groups with a bias, and a shared expert.
    ZooModel(
        *("nemotron_h_moe", "nemotron_h", 4, 2, 64),
        hidden_size=128,
        num_layers=4,
        seed=7,
        options={
            **MAMBA2_OF_NEMOTRON,
            "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
        },
    ),
    # Mamba2 with one group, replicated on every rank; experts and a shared expert; no positions.
    ZooModel(
        *("granite_hybrid_moe", "granitemoehybrid", 4, 2, 32),
        hidden_size=128,
        num_layers=3,
        seed=5,
        tied=True,
        options={
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "position_embedding_type": None,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
    ),
    # Kimi delta attention, and MLA without positions. All layers have experts, because transformers
    # writes dense layers under experts' names.
    ZooModel(
        *("kimi_linear", "kimi_linear", 4, 4, 64),
        hidden_size=128,
        num_layers=4,
        seed=6,
        options={
            "linear_attn_config": {
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "mla_use_nope": True,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "rms_norm_eps": 1e-5,
        },
    ),
    # Decay rates up to 2; norms over all heads, after attention.
    ZooModel(
        *("olmo_hybrid", "olmo_hybrid", 4, 4, 64),
        hidden_size=256,
        num_layers=4,
        seed=7,
        options={
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
)
