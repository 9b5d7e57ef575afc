"""check-model detects float checkpoints that do not match their config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_davinci.core.checkpoint.check import check_checkpoint

HIDDEN, INTER, HEADS, GROUPS, HEAD, VOCABULARY, LAYERS = 8, 12, 4, 2, 6, 16, 3
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
CONTENT, ROTARY, VALUE, KV_LORA, QUERIES, EXPERTS, MOE_INTER = 16, 64, 32, 512, 24, 3, 10
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "qk_nope_head_dim": CONTENT,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUE,
    "kv_lora_rank": KV_LORA,
    "q_lora_rank": QUERIES,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "moe_intermediate_size": MOE_INTER,
}
Shapes = dict[str, tuple[int, ...]]


def gated(prefix: str, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj": (width, HIDDEN),
        f"{prefix}.up_proj": (width, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, width),
    }


def outside() -> Shapes:
    return {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCABULARY, HIDDEN),
    }


def norms(layer: str) -> Shapes:
    return {f"{layer}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}


def llama() -> Shapes:
    shapes = outside()
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        attention = f"{layer}.self_attn"
        shapes |= norms(layer) | gated(f"{layer}.mlp", INTER)
        shapes |= {
            f"{attention}.q_proj": (HEADS * HEAD, HIDDEN),
            f"{attention}.k_proj": (GROUPS * HEAD, HIDDEN),
            f"{attention}.v_proj": (GROUPS * HEAD, HIDDEN),
            f"{attention}.o_proj": (HIDDEN, HEADS * HEAD),
        }
    return shapes


def deepseek() -> Shapes:
    """The first layer is dense; all others have experts."""
    shapes = outside()
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        shapes |= norms(layer)
        shapes |= {
            f"{attention}.q_a_proj": (QUERIES, HIDDEN),
            f"{attention}.q_b_proj": (HEADS * (CONTENT + ROTARY), QUERIES),
            f"{attention}.kv_a_proj_with_mqa": (KV_LORA + ROTARY, HIDDEN),
            f"{attention}.kv_b_proj": (HEADS * (CONTENT + VALUE), KV_LORA),
            f"{attention}.o_proj": (HIDDEN, HEADS * VALUE),
        }
        if number == 0:
            shapes |= gated(f"{layer}.mlp", INTER)
        else:
            shapes |= {f"{layer}.mlp.gate": (EXPERTS, HIDDEN)}
            shapes |= gated(f"{layer}.mlp.shared_experts", 2 * MOE_INTER)
            for expert in range(EXPERTS):
                shapes |= gated(f"{layer}.mlp.experts.{expert}", MOE_INTER)
    return shapes


V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 0, 4, 0],
    "tie_word_embeddings": False,
}


def deepseek_v4() -> Shapes:
    """Has released names, and two kinds of layers."""
    shapes: Shapes = {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    for number in range(4):
        shapes[f"layers.{number}.attn.wkv"] = shapes[f"layers.{number}.attn.wo_b"] = (HEAD, HIDDEN)
        if number % 2:
            shapes[f"layers.{number}.attn.compressor.wkv"] = (HEAD, HIDDEN)
    return shapes


def problems(directory: Path, shapes: Shapes, config: dict[str, Any]) -> list[str]:
    tensors = {f"{name}.weight": torch.ones(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return [f"{one.subject}: {one.what}" for one in check_checkpoint(directory).issues]


MODELS = {
    "llama": (llama, LLAMA),
    "deepseek": (deepseek, DEEPSEEK),
    "deepseek_v4": (deepseek_v4, V4),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_complete_model_has_no_finding(model: str, tmp_path: Path):
    make, config = MODELS[model]
    assert problems(tmp_path, make(), config) == []


def test_layers_that_were_pruned_of_heads_or_width_are_another_model(tmp_path: Path):
    """A config.json of an unknown kind says nothing about inner sizes."""
    shapes = llama()
    shapes["model.layers.1.mlp.gate_proj"] = shapes["model.layers.1.mlp.up_proj"] = (4, HIDDEN)
    shapes["model.layers.1.mlp.down_proj"] = (HIDDEN, 4)
    assert problems(tmp_path, shapes, {**LLAMA, "model_type": "other"}) == []


@pytest.mark.parametrize(
    ("model", "lost", "told"),
    [
        (
            "llama",
            "model.layers.1.self_attn.q_proj",
            "model.layers.1.self_attn.q_proj.weight: is missing; 2 other layers have it",
        ),
        (
            "llama",
            "model.layers.2.input_layernorm",
            "model.layers.2.input_layernorm.weight: is missing; 2 other layers have it",
        ),
        (
            "deepseek",
            "model.layers.2.self_attn.o_proj",
            "model.layers.2.self_attn.o_proj.weight: is missing; 1 other layer has it",
        ),
        (
            "deepseek",
            "model.layers.2.mlp.experts.1.up_proj",
            "model.layers.2.mlp.experts.1.up_proj.weight: is missing; other experts of the layer",
        ),
        (
            "llama",
            "lm_head",
            "lm_head.weight: is missing, and config.json has tie_word_embeddings false",
        ),
        (
            "deepseek_v4",
            "layers.3.attn.compressor.wkv",
            "layers.3.attn.compressor.wkv.weight: is missing; 1 other layer has it",
        ),
    ],
)
def test_a_missing_weight_is_named(model: str, lost: str, told: str, tmp_path: Path):
    make, config = MODELS[model]
    shapes = make()
    del shapes[lost]
    assert told in "\n".join(problems(tmp_path, shapes, config))


def test_a_projection_that_no_layer_has_is_named_by_its_other_half(tmp_path: Path):
    for part, told in (
        ("up_proj", "model.layers.1.mlp.experts.0.up_proj.weight: is missing, and gate_proj is"),
        ("down_proj", "model.layers.0.mlp.down_proj.weight: is missing, and gate_proj is there"),
    ):
        shapes = {name: shape for name, shape in deepseek().items() if not name.endswith(part)}
        assert told in "\n".join(problems(tmp_path, shapes, DEEPSEEK))


def test_a_tied_head_may_be_absent(tmp_path: Path):
    shapes = llama()
    del shapes["lm_head"]
    assert problems(tmp_path, shapes, {**LLAMA, "tie_word_embeddings": True}) == []


@pytest.mark.parametrize(
    ("model", "key", "value", "told"),
    [
        ("llama", "hidden_size", 9, "q_proj.weight: has shape [24, 8]; config.json says [24, 9]"),
        ("llama", "head_dim", 5, "o_proj.weight: has shape [8, 24]; config.json says [8, 20]"),
        ("llama", "num_key_value_heads", 4, "k_proj.weight: has shape [12, 8]; config.json says"),
        ("llama", "intermediate_size", 13, "down_proj.weight: has shape [8, 12]; config.json says"),
        ("deepseek", "moe_intermediate_size", 11, "experts.1.up_proj.weight: has shape [10, 8]"),
        ("deepseek", "n_shared_experts", 1, "shared_experts.up_proj.weight: has shape [20, 8]"),
        ("deepseek", "q_lora_rank", 25, "q_b_proj.weight: has shape [320, 24]; config.json says"),
        ("deepseek", "num_attention_heads", 8, "kv_b_proj.weight: has shape [192, 512]"),
        ("deepseek", "v_head_dim", 48, "o_proj.weight: has shape [8, 128]; config.json says"),
        ("deepseek", "kv_lora_rank", 256, "has kv_lora_rank 256 (must be 512)"),
        ("deepseek", "qk_nope_head_dim", 24, "has qk_nope_head_dim 24 (must be a multiple of 16)"),
    ],
)
def test_sizes_that_contradict_config_json_or_the_operators_are_named(
    model: str, key: str, value: int, told: str, tmp_path: Path
):
    shapes, config = (llama(), LLAMA) if model == "llama" else (deepseek(), DEEPSEEK)
    assert told in "\n".join(problems(tmp_path, shapes, {**config, key: value}))
