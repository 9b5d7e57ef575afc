"""Training recipes: model shapes and numbers of steps."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import DeepseekV3Config, DeepseekV4Config, LlamaConfig, PreTrainedConfig

VOCAB_SIZE = 4096  # tokens; the same for all checkpoints, which share the tokenizer
CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class Recipe:
    """A checkpoint's recipe. Sequences are short at first and fill the context at the end."""

    config: Callable[[], PreTrainedConfig]
    description: str
    steps: int
    batch_tokens: int = 4096
    sequence_tokens: int = 256
    full_context_share: float = 0.25
    """Share of final steps whose sequences have CONTEXT_TOKENS tokens."""
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    average_decay: float = 0.995
    """Decay per step of the weights' moving average, which is saved."""
    balance_ratio: float = 4.0
    """Step of the routers' correction bias, times the learning rate. The DeepSeek-V3 report
    (section 4.2) uses 0.001 with a peak learning rate of 2.2e-4.
    """
    starts_from: str | None = None
    """Another checkpoint, whose tensors of equal name and shape are the initial values."""


OF_ALL = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
}
WITH_EXPERTS = {
    **OF_ALL,
    "hidden_size": 192,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "q_lora_rank": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def _llama_config() -> LlamaConfig:
    return LlamaConfig(
        **OF_ALL,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )


def _deepseek_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        **WITH_EXPERTS,
        intermediate_size=512,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        kv_lora_rank=512,  # the only size that every MLA kernel supports
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.0,
        num_mtp_layers=1,  # written to mtp.safetensors by train_draft.py
        # Constant in transformers' implementation; vLLM's reads it from the configuration.
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
    )


# DeepSeek-V4's released keys, which transformers reads and converts to its own.
DEEPSEEK_V4_KEYS: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4, 0],  # the last entry is the MTP layer's
    "num_hash_layers": 2,
    "qk_rope_head_dim": 16,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": CONTEXT_TOKENS // 4,
    },
    "topk_method": "noaux_tc",  # read only by vLLM
}


def _deepseek_v4_config() -> DeepseekV4Config:
    return DeepseekV4Config(
        **WITH_EXPERTS,
        head_dim=64,
        o_groups=2,
        o_lora_rank=48,
        sliding_window=64,
        index_n_heads=16,
        index_head_dim=128,  # the only size that the fused indexer supports
        index_topk=64,  # all rows of short sequences, a quarter of a full context's rows
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_sinkhorn_iters=5,
        num_nextn_predict_layers=1,
        **deepcopy(DEEPSEEK_V4_KEYS),  # copied, because transformers modifies them
    )


RECIPES = {
    "tiny_llama": Recipe(
        config=_llama_config,
        description=(
            "A dense Llama: 6 layers, 4 query heads on 2 key/value heads of size 64, "
            "tied embeddings."
        ),
        steps=1800,
    ),
    "tiny_deepseek": Recipe(
        config=_deepseek_config,
        description=(
            "A DeepSeek-V3: multi-head latent attention (kv_lora_rank 512, rope 64), one dense "
            "layer, then three with a shared expert and 8 routed ones in 4 groups, 2 per token."
        ),
        steps=1800,
    ),
    "tiny_deepseek_v4": Recipe(
        config=_deepseek_v4_config,
        description=(
            "A DeepSeek-V4: four residual streams; a window of 64 tokens in all layers, in two "
            "also 64 chosen rows of 4 tokens, in one rows of 128 tokens; a shared expert and 8 "
            "routed ones, 2 per token, in two layers by a table."
        ),
        steps=1200,
        batch_tokens=2048,
        starts_from="tiny_deepseek",
    ),
}
