"""Small random models of families with MTP layers, with the checkpoints' names.

transformers makes the model without MTP layers; these are copied from one of its layers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_davinci_testing.engines.family_zoo import NUM_LAYERS, write_family


@dataclass(frozen=True)
class MTPFamily:
    """One family's names.

    model_type:  model type in transformers
    copied:      index of the layer that the MTP layer copies
    layer:       prefix of the MTP layer's tensors
    norms:       names of norms' weights; with `norm_bias` each is 1
    norm_bias:   value that the model adds to norms' weights
    projection:  name of the weight that projects embedding and hidden state
    hidden_first: True if the hidden state is the projection's first input
    has_own_head: True if the layer has copies of embedding and head
    config:      additional fields of config.json
    """

    model_type: str
    copied: int
    layer: str
    norms: tuple[str, ...]
    projection: str
    hidden_first: bool = False
    has_own_head: bool = False
    norm_bias: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)


_LAST = f"model.layers.{NUM_LAYERS}."


# Families by vLLM's class for the MTP layer.
FAMILIES = {
    "Glm4MoeMTPModel": MTPFamily(
        "glm4_moe",
        NUM_LAYERS - 1,
        _LAST,
        tuple(f"{_LAST}{name}.weight" for name in ("enorm", "hnorm", "shared_head.norm")),
        f"{_LAST}eh_proj.weight",
        has_own_head=True,
        # Released files have these fields, which transformers' class drops.
        config={"first_k_dense_replace": 1, "head_dim": 64},
    ),
    "ErnieMTPModel": MTPFamily(
        "ernie4_5_moe",
        0,  # no experts, like the MTP layer
        "model.mtp_block.0.",
        ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
        "model.mtp_linear_proj.0.weight",
    ),
    "ExaoneMoeMTP": MTPFamily(
        "exaone_moe",
        0,
        "mtp.layers.0.",
        ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"),
        "mtp.fc.weight",
    ),
    "HYV3MTPModel": MTPFamily(
        "hy_v3",
        NUM_LAYERS - 1,
        _LAST,
        tuple(f"{_LAST}{name}.weight" for name in ("enorm", "hnorm", "final_layernorm")),
        f"{_LAST}eh_proj.weight",
        # Released files have these fields, which transformers' class lacks.
        config={
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 64,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    "MiMoMTPModel": MTPFamily(
        "qwen2",
        NUM_LAYERS - 1,
        "model.mtp_layers.0.",
        tuple(
            f"model.mtp_layers.0.{name}.weight"
            for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
        ),
        "model.mtp_layers.0.input_proj.weight",
        hidden_first=True,
        config={"architectures": ["MiMoForCausalLM"]},
    ),
}
_OF_QWEN = MTPFamily(
    "qwen3_next",
    NUM_LAYERS - 1,  # the attention's, like the MTP layer's
    "mtp.layers.0.",
    ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"),
    "mtp.fc.weight",
    norm_bias=1.0,
)
FAMILIES |= {
    "Qwen3NextMTP": _OF_QWEN,
    "Qwen3_5MTP": replace(_OF_QWEN, model_type="qwen3_5_text", config={"mtp_num_hidden_layers": 1}),
    "Qwen3_5MoeMTP": replace(
        _OF_QWEN, model_type="qwen3_5_moe_text", config={"mtp_num_hidden_layers": 1}
    ),
}


def write_mtp_family(name: str, directory: Path) -> Path:
    """Writes a model with one MTP layer; returns the directory. name: in FAMILIES"""
    family = FAMILIES[name]
    write_family(family.model_type, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 1} | dict(family.config)
    path.write_text(json.dumps(config))
    width = config["hidden_size"]
    target = load_file(directory / "model.safetensors")
    begin = f"model.layers.{family.copied}."
    tensors = {
        name.replace(begin, family.layer): tensor
        for name, tensor in target.items()
        if name.startswith(begin)
    }
    noise = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(0)) * 0.01
    parts = [torch.zeros(width, width), torch.eye(width)]
    tensors[family.projection] = torch.cat(parts[:: -1 if family.hidden_first else 1], 1) + noise
    tensors |= {norm: torch.full((width,), 1.0 - family.norm_bias) for norm in family.norms}
    if family.has_own_head:
        tensors |= {
            f"{family.layer}shared_head.head.weight": target["lm_head.weight"],
            f"{family.layer}embed_tokens.weight": target["model.embed_tokens.weight"],
        }
    save_file({n: tensor.clone() for n, tensor in tensors.items()}, directory / "mtp.safetensors")
    return directory
