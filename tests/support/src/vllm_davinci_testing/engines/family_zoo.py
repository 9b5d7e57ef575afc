"""A small random checkpoint of every text family that both vLLM and transformers have.

Sizes are set under each configuration's names for them; family_options.py has options of single
families.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from vllm_davinci_testing.engines.family_options import OF_FAMILY
from vllm_davinci_testing.engines.model_zoo import (
    BOS_ID,
    BY_NAME,
    EOS_ID,
    RELEASED,
    VOCAB_SIZE,
    fill_with_normal_weights,
    write_checkpoint,
    write_tokenizer,
)

NUM_LAYERS = 2
# Values of fields by name, for every configuration that has them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "n_embd": 256,
    "d_model": 256,
    "intermediate_size": 384,
    "ffn_dim": 384,
    "n_inner": 384,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "n_layer": NUM_LAYERS,
    "n_layers": NUM_LAYERS,
    "num_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "n_positions": 512,
    "n_ctx": 512,
    "max_position_embeddings": 512,
    "max_seq_len": 512,
    "word_embed_proj_dim": 256,
    "rotary_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 32,
    "query_pre_attn_scalar": 64,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
}
# Fields that are set only in transformers' configuration, because vLLM reads them differently:
# vllm/model_executor/models/commandr.py, cohere2_moe.py, mimo_v2.py
_ONE_TOKEN_MORE = (
    {"sliding_window": SIZES["sliding_window"] + 1},
    "vLLM's layers see one token more than the configuration says, as the model was trained",
)
OF_REFERENCE: dict[str, tuple[dict[str, Any], str]] = {
    "cohere2": _ONE_TOKEN_MORE,
    "cohere2_moe": _ONE_TOKEN_MORE,
    "hy_v4": (
        {},
        "rotated rows are ordered by halves in transformers: vLLM rotates pairs of neighbours",
    ),
    "mimo_v2_flash": (
        {"sliding_window": SIZES["sliding_window"]},
        "vLLM's window includes the token itself, transformers' adds it to sliding_window_size",
    ),
}


def text_families() -> list[str]:
    """Returns, sorted, the model types whose text generation class has the same name in vLLM."""
    from vllm.model_executor.models import registry

    by_class = {
        name: model_type
        for model_type, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if isinstance(name, str)
    }
    return sorted(by_class[name] for name in registry._TEXT_GENERATION_MODELS if name in by_class)


def small_config(model_type: str) -> transformers.PretrainedConfig:
    """Returns the family's configuration with small sizes. Raises transformers' errors."""
    default = transformers.AutoConfig.for_model(model_type)
    known = default.to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    # Sets a window if the family has one by default.
    if known.get("sliding_window") is None:
        sizes.pop("sliding_window", None)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(known.get(name), list):
            sizes[name] = _ends_of(known[name])
    return transformers.AutoConfig.for_model(
        model_type, **{**sizes, **OF_FAMILY.get(model_type, {})}
    )


def _ends_of(kinds: Iterable[str]) -> list[str]:
    """Repeats a family's distinct kinds of layers up to the number of layers."""
    different = list(dict.fromkeys(kinds))
    return (different * NUM_LAYERS)[:NUM_LAYERS]


def write_family(model_type: str, directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights and tokenizer; returns the directory."""
    if model_type in RELEASED:
        return write_checkpoint(BY_NAME[model_type], directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForCausalLM.from_config(
            small_config(model_type), dtype=torch.float32
        )
        fill_with_normal_weights(network)
    network.save_pretrained(directory)
    write_tokenizer(directory)
    return directory
