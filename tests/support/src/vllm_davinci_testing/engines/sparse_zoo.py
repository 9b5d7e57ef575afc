"""Small checkpoints with MLA over the tokens that an indexer selects."""

from typing import Any

from vllm_davinci_testing.engines.zoo_model import ZooModel

# Test prompts have up to 150 tokens, so most queries see more tokens than the indexer selects.
NUM_CHOSEN = 24

SPARSE_MLA: dict[str, Any] = {
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": NUM_CHOSEN,
    "index_head_dim": 128,
    # With fewer heads, all products of a key may be negative, and many keys score 0.
    "index_n_heads": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def sparse(name: str, model_type: str, heads: int = 4, **options: Any) -> ZooModel:
    return ZooModel(
        name,
        model_type,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=64,
        hidden_size=128,
        num_layers=3,
        options={**SPARSE_MLA, **options},
    )


SPARSE = (
    sparse("deepseek_v32", "deepseek_v32", n_group=2, topk_group=1),
    sparse("deepseek_v32_heads6", "deepseek_v32", heads=6, n_group=2, topk_group=1),
    # The last layer attends to the tokens selected by the layer before.
    sparse(
        "glm_dsa_shared",
        "glm_moe_dsa",
        n_group=1,
        topk_group=1,
        index_topk_freq=2,
        index_skip_topk_offset=2,
        indexer_rope_interleave=True,  # as in released models
    ),
)
# The context never exceeds the number of selected tokens, so this equals dense MLA.
ALL_CHOSEN = sparse("deepseek_v32_all", "deepseek_v32", n_group=2, topk_group=1, index_topk=512)
