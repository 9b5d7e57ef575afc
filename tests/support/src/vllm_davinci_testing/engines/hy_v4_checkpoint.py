"""Small checkpoints of HY-V4's shape under released names, and their tensors in transformers.

vLLM's definition rotates pairs of adjacent entries, which its comments say is the order of released
files; transformers rotates halves. Files here have vLLM's order, and `rotate_halves` reorders the
rows of transformers' network so that both compute the same.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_davinci_testing.engines.zoo_model import ZooModel

NUM_CHOSEN = 24
OPTIONS: dict[str, Any] = {
    "index_n_heads": 32,
    "index_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,  # many activations reach it
    "hc_eps": 1e-3,
    "moe_intermediate_size": 64,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": NUM_CHOSEN,
    # eps of an indexer's key norm, which vLLM fixes.
    "rms_norm_eps": 1e-6,
    # The last layer attends to the tokens selected by the layer before.
    "indexer_types": ["full", "full", "shared"],
}
HY_V4 = ZooModel("hy_v4", "hy_v4", 4, 4, 64, 128, num_layers=3, options=OPTIONS)
# Name written by transformers -> released name, which it reads, too.
_RELEASED_NAMES = {
    r"\.hc_pre\.(hc_(?:attn|mlp)_layer)\.": r".\1.hc_pre.",
    r"\.hc_pre\.hc_head\.": ".hc_head.",
    r"(\.mlp|\.shared_experts)\.linear_gate\.": r"\1.gate_proj.",
}


def release_hy_v4(directory: Path, options: Mapping[str, Any]) -> None:
    """Renames the tensors of a checkpoint written by transformers to released names."""
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for pattern, new in _RELEASED_NAMES.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def rotate_halves(network: nn.Module) -> None:
    """Reorders the rotated rows of transformers' network, loaded from a released file, into
    halves.
    """
    config: Any = network.config
    rope = config.qk_rope_head_dim
    for layer in network.model.layers:
        attention, indexer = layer.self_attn, layer.self_attn.indexer
        whole = [(attention.kv_a_proj_with_mqa.weight, 1)]
        whole.append((attention.q_b_proj.weight, config.num_attention_heads))
        if indexer is not None:
            whole += [(each, 1) for each in (indexer.wk.weight, *indexer.k_norm.parameters())]
            whole.append((indexer.wq_b.weight, config.index_n_heads))
        for tensor, heads in whole:
            rotated = tensor.data.view(heads, len(tensor) // heads, -1)[:, -rope:]
            pairs = rotated.unflatten(1, (-1, 2)).transpose(1, 2)
            rotated.copy_(pairs.flatten(1, 2).clone())
