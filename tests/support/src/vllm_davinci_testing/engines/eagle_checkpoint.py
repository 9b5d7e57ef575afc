"""Random EAGLE heads for a Llama, in the format of published heads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

AUXILIARY_LAYERS = (1, 3, 5)


Draw = Callable[..., torch.Tensor]


def random_eagle3(
    target: Path,
    destination: Path,
    draft_vocabulary: int = 2048,
    layers: Sequence[int] = AUXILIARY_LAYERS,
) -> Path:
    """Writes an EAGLE-3 head, which drafts the first tokens of the target's vocabulary.

    layers: layers of the target whose hidden states the head reads
    """
    config, draw = _config(target), _drawn_by(4)
    width = config["hidden_size"]
    tensors = {
        "d2t": torch.zeros(draft_vocabulary, dtype=torch.int64),
        "t2d": torch.arange(config["vocab_size"]) < draft_vocabulary,
        "fc.weight": draw(width, len(layers) * width),
        "midlayer.hidden_norm.weight": _ones(width),
        "midlayer.input_layernorm.weight": _ones(width),
        **_layer("midlayer", config, draw, 2 * width),
        "norm.weight": _ones(width),
        "lm_head.weight": draw(draft_vocabulary, width),
    }
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_vocabulary,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    return _write(destination, config | changes, tensors)


def random_eagle(target: Path, destination: Path) -> Path:
    """Writes an EAGLE head, which drafts with the target's own vocabulary."""
    config, draw = _config(target), _drawn_by(5)
    width = config["hidden_size"]
    tensors = {"fc.weight": draw(width, 2 * width), **_layer("layers.0", config, draw, width)}
    changes = {"architectures": ["EagleLlamaForCausalLM"]}
    return _write(destination, config | changes, tensors)


def _config(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config |= config.pop("text_config", {})
    of_llama = {"model_type": "llama", "hidden_act": "silu"}
    return config | of_llama | {"num_hidden_layers": 1, "tie_word_embeddings": False}


def _drawn_by(seed: int) -> Draw:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.03).to(torch.bfloat16)

    return draw


def _ones(width: int) -> torch.Tensor:
    return torch.ones(width, dtype=torch.bfloat16)


def _layer(
    prefix: str, config: dict[str, Any], draw: Draw, num_inputs: int
) -> dict[str, torch.Tensor]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}.post_attention_layernorm.weight": _ones(width),
        f"{prefix}.self_attn.q_proj.weight": draw(queries, num_inputs),
        f"{prefix}.self_attn.k_proj.weight": draw(keys, num_inputs),
        f"{prefix}.self_attn.v_proj.weight": draw(keys, num_inputs),
        f"{prefix}.self_attn.o_proj.weight": draw(width, queries),
        f"{prefix}.mlp.gate_proj.weight": draw(inner, width),
        f"{prefix}.mlp.up_proj.weight": draw(inner, width),
        f"{prefix}.mlp.down_proj.weight": draw(width, inner),
    }


def _write(destination: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(config))
    return destination
