"""Small checkpoints with random weights, made on the spot, which together have every property.

The weights are as large as trained ones, so that an error anywhere changes the tokens: with the
usual tiny initial weights, a model repeats its input whatever its attention computes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from vllm_davinci_testing.engines.hybrid_zoo import HYBRIDS
from vllm_davinci_testing.engines.sparse_zoo import ALL_CHOSEN, SPARSE
from vllm_davinci_testing.engines.zoo_model import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    NUM_BYTES,
    VOCAB_SIZE,
    ZooModel,
)

__all__ = ["BOS", "BOS_ID", "EOS", "EOS_ID", "NUM_BYTES", "VOCAB_SIZE", "ZooModel"]

# Properties that have to occur: the four families, tied and untied embeddings, head sizes 64, 80
# and 128, 1, 2, 4 and 8 queries per key-value head, a window shorter than the sequences.
ZOO = (
    ZooModel("llama_head64_gqa4", "llama", 8, 2, 64),
    ZooModel("llama_head128_mha_tied", "llama", 2, 2, 128, tied=True),
    ZooModel(
        "llama3_rope_head80_gqa4",
        "llama",
        4,
        1,
        80,
        hidden_size=320,
        options={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    ZooModel("qwen2_bias_head64_gqa8_tied", "qwen2", 8, 1, 64, hidden_size=512, tied=True),
    ZooModel("qwen2_bias_head128_gqa2", "qwen2", 4, 2, 128, hidden_size=512),
    ZooModel("qwen3_norm_head128_gqa2", "qwen3", 4, 2, 128),
    ZooModel("qwen3_norm_head64_gqa8_tied", "qwen3", 8, 1, 64, tied=True),
    ZooModel(
        "mistral_window32_head80_gqa2",
        "mistral",
        4,
        2,
        80,
        hidden_size=320,
        options={"sliding_window": 32},
    ),
    ZooModel(
        "mistral_window48_head64_gqa4_tied",
        "mistral",
        8,
        2,
        64,
        tied=True,
        options={"sliding_window": 48},
    ),
)


def deepseek(name: str, model_type: str, heads: int = 4, **options: Any) -> ZooModel:
    """Multi-head MLA in dense layers, with the sizes the operators take."""
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

# Queries with and without their own latent, YaRN with its factor on the softmax scale.
DEEPSEEK = (
    deepseek("deepseek_v2_lite_dense", "deepseek_v2", q_lora_rank=None),
    deepseek("deepseek_v3_dense", "deepseek_v3", q_lora_rank=96),
    deepseek("deepseek_r1_yarn_dense", "deepseek_v3", q_lora_rank=96, rope_parameters=YARN),
)

# As many heads as a rank of DeepSeek-R1 has without tensor parallelism.
HEADS128 = deepseek("deepseek_v3_heads128_dense", "deepseek_v3", heads=128, q_lora_rank=96)

# Of DeepSeek-V3 and R1: a first dense layer, then shared experts and sigmoid scores with a bias.
V3_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

# Routed experts: softmax over all or over the chosen, more experts than any run has ranks.
MIXTURES = (
    ZooModel(
        "qwen3_moe_softmax_top2_of_8",
        "qwen3_moe",
        4,
        2,
        64,
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
        "qwen3_moe_unnormalized_top3_of_16",
        "qwen3_moe",
        4,
        2,
        64,
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
    # Fused launches of experts take no smaller hidden size.
    ZooModel(
        "qwen3_moe_hidden1024",
        "qwen3_moe",
        4,
        2,
        64,
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
    # Windows beside whole attention without positions; a bias of the choice without MLA; shared
    # experts.
    ZooModel(
        "exaone_moe_window32_sigmoid_top2_of_8",
        "exaone_moe",
        4,
        2,
        64,
        hidden_size=128,
        seed=3,
        options={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
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
    # vLLM names the experts otherwise than the checkpoint; norms over all heads' channels at once.
    ZooModel(
        "minimax_m2_sigmoid_top2_of_8",
        "minimax_m2",
        4,
        2,
        64,
        hidden_size=128,
        seed=4,
        options={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # vLLM runs it by transformers' own code, and the experts by its own.
    ZooModel(
        "hunyuan_moe_top2_of_8",
        "hunyuan_v1_moe",
        4,
        2,
        64,
        hidden_size=128,
        seed=5,
        options={"num_experts": 8, "moe_topk": [2, 2]},
    ),
    # Sinks in every softmax; windows beside whole attention; experts with biases, clipped SwiGLU.
    ZooModel(
        "gpt_oss_sinks_window32_top2_of_8",
        "gpt_oss",
        8,
        2,
        64,
        hidden_size=128,
        seed=4,
        options={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {k: v for k, v in YARN.items() if k[0] != "m"} | {"truncate": False},
        },
    ),
    # Groups and a correction bias of the choice; shared experts; a first dense layer.
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
    # All that DeepSeek-R1 has, on stretched positions.
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
    # Softmax scores, of which the best groups are those with the best expert.
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
EVERY = (*ZOO, *DEEPSEEK, HEADS128, *MIXTURES, *HYBRIDS, *SPARSE, ALL_CHOSEN)
BY_NAME = {model.name: model for model in EVERY}


def small_deepseek(**fields: Any) -> transformers.DeepseekV3Config:
    """DeepSeek-V3's shape at its smallest: a dense layer, then one of experts; MLA.

    fields: those that are to be otherwise
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


def write_checkpoint(model: ZooModel, directory: Path) -> Path:
    """Writes configuration, fp32 weights and tokenizer as transformers does; the directory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        network = transformers.AutoModelForCausalLM.from_config(model.config(), dtype=torch.float32)
        fill_with_normal_weights(network)
    network.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_bert(directory: Path, seed: int = 0) -> Path:
    """An encoder-only model with bidirectional attention, embeddings from its first token.

    Its file has a pooling layer, as released ones have, which embeddings do without.
    """
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=256,
        pad_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.BertModel(config)
        fill_with_normal_weights(network)
    network.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


# Tokens whose embeddings are not finite, and one that alone goes to an expert with such weights.
NAN_TOKEN, INFINITE_TOKEN, MISROUTED_TOKEN = 250, 251, 252
POISONS = (NAN_TOKEN, INFINITE_TOKEN, MISROUTED_TOKEN)
POISONED_EXPERT = 3


@torch.no_grad()
def write_poisoned(source: Path, directory: Path) -> Path:
    """A mixture of experts with POISONS and POISONED_EXPERT, made from another checkpoint."""
    network = transformers.AutoModelForCausalLM.from_pretrained(source)
    layer = network.model.layers[0]
    embeddings = network.model.embed_tokens.weight
    # Two channels that nothing but embeddings reaches before the router: one is the same for all
    # tokens and keeps them away from the expert, one is this token's and brings it there.
    embeddings[:, 0], embeddings[:, 1] = 0, 1
    layer.self_attn.o_proj.weight[:2] = 0
    router = layer.mlp.gate.weight
    router[POISONED_EXPERT] = 0
    router[POISONED_EXPERT, 0], router[POISONED_EXPERT, 1] = 8, -4
    embeddings[MISROUTED_TOKEN, 0] = 4
    layer.mlp.experts.down_proj[POISONED_EXPERT] = float("nan")
    embeddings[NAN_TOKEN] = float("nan")
    embeddings[INFINITE_TOKEN] = float("inf")
    network.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def fill_with_normal_weights(network: nn.Module) -> None:
    """Matrices with a gain of 1.2, norms and biases that differ between channels."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            # An embedding's row is what a projection's input is.
            module.weight.normal_(std=1.2 / math.sqrt(module.weight.shape[1]))
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.normal_(std=0.3)
        elif module.__class__.__name__.endswith(("Experts", "Router")):
            for weight in module.parameters():  # [experts, out, in], or [experts, in]
                weight.normal_(std=1.2 / math.sqrt(weight.shape[-1]))
            for bias in module.buffers():  # of the choice, small beside scores of 0 to 1
                bias.normal_(std=0.05)
        elif module.__class__.__name__.endswith("Norm"):
            module.weight.normal_(mean=1.0, std=0.1)
            if getattr(module, "bias", None) is not None:
                module.bias.normal_(std=0.1)
        if getattr(module, "sinks", None) is not None:  # scores of attention, without values
            module.sinks.normal_(mean=1.0)


def write_tokenizer(directory: Path) -> None:
    """A token per byte, so that any text has tokens and any tokens have a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: index for index, byte in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=EOS
    ).save_pretrained(directory)
