"""Small checkpoints with routed experts, one for each routing rule."""

from vllm_davinci_testing.engines.deepseek_zoo import V3_EXPERTS, YARN, deepseek
from vllm_davinci_testing.engines.zoo_model import ZooModel

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
# Routed experts: softmax over all or over the chosen experts; every run has fewer ranks than
# experts.
MIXTURES = (
    ZooModel(
        *("qwen3_moe_softmax_top2_of_8", "qwen3_moe", 4, 2, 64),
        hidden_size=128,
        options={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    ZooModel(
        *("qwen3_moe_unnormalized_top3_of_16", "qwen3_moe", 4, 2, 64),
        hidden_size=128,
        seed=1,
        options={
            "num_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        },
    ),
    # Fused launches of experts require at least this hidden size.
    ZooModel(
        *("qwen3_moe_hidden1024", "qwen3_moe", 4, 2, 64),
        hidden_size=1024,
        seed=2,
        options={
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    # Layers with windows, and layers with full attention without positions; a selection bias
    # without MLA; shared experts.
    ZooModel(
        *("exaone_moe_window32_sigmoid_top2_of_8", "exaone_moe", 4, 2, 64),
        hidden_size=128,
        seed=3,
        options={
            **WINDOWS,
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    # vLLM and the checkpoint name the experts differently; norms over all heads' channels.
    ZooModel(
        *("minimax_m2_sigmoid_top2_of_8", "minimax_m2", 4, 2, 64),
        hidden_size=128,
        seed=4,
        options={
            **LOCAL_EXPERTS,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # vLLM runs it with transformers' code, but its own experts.
    ZooModel(
        *("hunyuan_moe_top2_of_8", "hunyuan_v1_moe", 4, 2, 64),
        hidden_size=128,
        seed=5,
        options={"num_experts": 8, "moe_topk": [2, 2]},
    ),
    # Sinks in every softmax; layers with windows and with full attention; experts with biases,
    # clipped SwiGLU.
    ZooModel(
        *("gpt_oss_sinks_window32_top2_of_8", "gpt_oss", 8, 2, 64),
        hidden_size=128,
        seed=4,
        options={
            **WINDOWS,
            **LOCAL_EXPERTS,
            "rope_parameters": {k: v for k, v in YARN.items() if k[0] != "m"} | {"truncate": False},
        },
    ),
    # Groups and a selection bias; shared experts; a dense first layer.
    deepseek(
        "deepseek_v3_moe",
        "deepseek_v3",
        q_lora_rank=96,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        **V3_EXPERTS,
    ),
    # All features of DeepSeek-R1, with scaled positions.
    deepseek(
        "deepseek_r1_yarn_moe",
        "deepseek_v3",
        q_lora_rank=96,
        rope_parameters=YARN,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        **V3_EXPERTS,
    ),
    # Softmax scores; the best groups are those with the best expert.
    deepseek(
        "deepseek_v2_moe",
        "deepseek_v2",
        q_lora_rank=None,
        first_k_dense_replace=0,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        moe_intermediate_size=64,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    ),
)
