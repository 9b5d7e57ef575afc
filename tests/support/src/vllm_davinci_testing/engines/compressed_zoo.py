"""Small checkpoints of DeepSeek-V4's shape, under the names that released ones have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_davinci_testing.engines.zoo_model import VOCAB_SIZE, ZooModel

# Fewer than the rows that most prompts of tests have, 4 tokens each.
NUM_CHOSEN = 12
WINDOW = 16

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
# Released keys, as both transformers and vLLM read them.
RELEASED: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4, 0, 0],  # the last one is that of a layer for further tokens
    "num_hash_layers": 2,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 4,
    "o_lora_rank": 24,
    # With few, all of a key's products may be negative, and many keys have the score 0.
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": NUM_CHOSEN,
    "sliding_window": WINDOW,
    "moe_intermediate_size": 192,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,  # which many activations reach
    "hc_eps": 1e-3,
    "hc_sinkhorn_iters": 3,  # each is four launches, for which tests wait
    "rope_scaling": YARN,
}
COMPRESSED = (
    ZooModel(
        "deepseek_v4",
        "deepseek_v4",
        num_heads=8,
        num_kv_heads=1,
        head_size=64,
        hidden_size=128,
        num_layers=5,
        options=RELEASED,
    ),
)
# transformers' name of a tensor in a file -> the released one.
_RELEASED_NAMES = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.norm\.": "norm.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"^model\.": "",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}


@torch.no_grad()
def fill_streams_and_tables(network: nn.Module) -> None:
    """Fills what random matrices leave neutral: streams, places in groups, tables of experts."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        part = name.rpartition(".")[2]
        if part in ("fn", "hc_fn"):
            tensor.normal_(std=0.5 / tensor.shape[1] ** 0.5)
        elif part in ("base", "hc_base", "position_bias"):
            tensor.normal_(std=0.5)
        elif part in ("scale", "hc_scale"):
            tensor.normal_(mean=1.0, std=0.1)
        elif part == "tid2eid":
            scores = torch.rand(tensor.shape[0], RELEASED["n_routed_experts"])
            tensor.copy_(scores.topk(tensor.shape[1], dim=-1).indices)


def release(directory: Path, options: Mapping[str, Any]) -> None:
    """Gives a checkpoint that transformers has written the released names of tensors and keys."""
    path = directory / "model.safetensors"
    tensors = {_released_name(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path = directory / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        del written[key]
    released = {"topk_method": "noaux_tc", "vocab_size": VOCAB_SIZE, **options}
    path.write_text(json.dumps({**written, **released}), encoding="utf-8")


def _released_name(name: str) -> str:
    for pattern, new in _RELEASED_NAMES.items():
        name = re.sub(pattern, new, name)
    return name
