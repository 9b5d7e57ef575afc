"""Small checkpoints like DeepSeek's: MLA, with and without routed experts."""

from typing import Any

import transformers

from vllm_davinci_testing.engines.zoo_model import ZooModel


def deepseek(name: str, model_type: str, heads: int = 4, **options: Any) -> ZooModel:
    """Describes a dense model with MLA, in sizes that the operators support."""
    return ZooModel(
        name,
        model_type,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=64,
        hidden_size=128,
        options={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
            "n_routed_experts": 0,
            **options,
        },
    )


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

# Queries with and without their own down-projection; YaRN with its factor on the softmax scale.
DEEPSEEK = (
    deepseek("deepseek_v2_lite_dense", "deepseek_v2", q_lora_rank=None),
    deepseek("deepseek_v3_dense", "deepseek_v3", q_lora_rank=96),
    deepseek("deepseek_r1_yarn_dense", "deepseek_v3", q_lora_rank=96, rope_parameters=YARN),
)

# All heads of DeepSeek-R1, as on a rank without tensor parallelism.
HEADS128 = deepseek("deepseek_v3_heads128_dense", "deepseek_v3", heads=128, q_lora_rank=96)
# A number that decodes pad to 8, or to 4 on each of two ranks.
HEADS6 = deepseek("deepseek_v3_heads6_dense", "deepseek_v3", heads=6, q_lora_rank=96)

# DeepSeek-V3 and R1: a dense first layer, then shared experts and sigmoid scores with a bias.
V3_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def small_deepseek(**fields: Any) -> transformers.DeepseekV3Config:
    """Returns the smallest configuration like DeepSeek-V3's: MLA, a dense layer, then an expert
    layer.

    fields: values to change
    """
    return transformers.DeepseekV3Config(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 64,
            "v_head_dim": 16,
            "topk_method": "noaux_tc",
            "max_position_embeddings": 64,
            **fields,
        }
    )
