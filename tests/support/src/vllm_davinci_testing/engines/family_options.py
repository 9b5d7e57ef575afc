"""Configurations of families, in addition to the common sizes."""

from typing import Any

from vllm_davinci_testing.engines.model_zoo import VOCAB_SIZE

# Sizes that MLA's operators support.
_MLA = {
    "hidden_size": 128,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Keys of released checkpoints that vLLM reads and transformers' configurations lack.
OF_FAMILY: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {**_MLA, "topk_method": "greedy"},
    "deepseek_v3": {**_MLA, **_SIGMOID},
    "deepseek_v32": {**_MLA, **_SIGMOID, "index_head_dim": 128, "index_topk": 512},
    # No dense layers: vLLM requires a norm in them that transformers lacks.
    "axk1": {**_MLA, **_SIGMOID, "first_k_dense_replace": 0, "mlp_layer_types": None},
    "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {**_MLA, "first_k_dense_replace": 1},
    "glm_moe_dsa": {
        **_MLA,
        "first_k_dense_replace": 1,
        **_SIGMOID,
        "index_head_dim": 128,
        "index_topk": 512,
    },
    "hy_v3": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 64,
        "route_norm": True,
        "qk_norm": True,
    },
    # Released models' values are narrower than keys, and vLLM would use a CUDA backend for that.
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "add_swa_attention_sink_bias": True,
        "swa_head_dim": 64,
        "swa_v_head_dim": 64,
        "v_head_dim": 64,
        "rope_theta": 5000000.0,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5000000.0), ("sliding_attention", 10000.0))
        },
        "sliding_window_size": 32,
    },
    "longcat_flash": {
        **_MLA,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ffn_hidden_size": 384,
        "expert_ffn_hidden_size": 64,
        "zero_expert_num": 4,
        "zero_expert_type": "identity",
    },
    "minicpm3": _MLA,
    # transformers splits the convolution into three equal parts; released files do not.
    "olmo_hybrid": {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    # With several groups, transformers normalizes all groups together, trained models each group
    # separately.
    "mamba2": {"hidden_size": 256, "expand": 2, "num_heads": 8, "head_dim": 64, "n_groups": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "hrm_text": {"H_cycles": 2, "L_cycles": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 64,
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    # Layers after the second read the caches of earlier layers.
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [384] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
    },
    # As in released models, layers without a window have wider heads.
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 512}},
        "num_experts": None,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 32,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 48,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 16},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
        },
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 0,
        "mla_use_nope": True,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_dim": 256,
        "conv_dim": 256,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 384},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "attention_hidden_size": 512,
        "attention_head_dim": 128,
        "mamba_headdim": 64,
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
    },
}
