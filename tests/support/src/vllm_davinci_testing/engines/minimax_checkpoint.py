"""A small MiniMax-M3 with random weights, under its released names and keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

from vllm_davinci_testing.engines.model_zoo import EOS_ID, NUM_BYTES
from vllm_davinci_testing.engines.released_weights import write_network

IMAGE, VIDEO = "]<]image[>[", "]<]video[>["
SPECIAL = (IMAGE, VIDEO, "]<]start of image[>[", "]<]end of image[>[")
FIRST_ID = NUM_BYTES + 2
BLOCK_SIZE, NUM_CHOSEN = 128, 2
LAYERS = [0, 1, 1]  # True if an index chooses blocks; True if there are experts
# The text's fields are written twice, for transformers and for vLLM.
RELEASED: dict[str, Any] = {
    "hidden_act": "swigluoai",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "moe_layer_freq": LAYERS,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 64,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": NUM_CHOSEN,
        "sparse_block_size": BLOCK_SIZE,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": LAYERS,
    },
}
# transformers' keys that the released keys replace.
_REPLACED = (
    *("layer_types", "mlp_layer_types", "rope_parameters"),
    *("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"),
    "index_local_blocks",
)
_VISION = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 112,
}


def minimax_config() -> transformers.PretrainedConfig:
    return transformers.AutoConfig.for_model(
        "minimax_m3_vl",
        text_config={
            "vocab_size": FIRST_ID + len(SPECIAL),
            "hidden_size": 128,
            "intermediate_size": 64,
            "dense_intermediate_size": 192,
            "shared_intermediate_size": 64,
            "num_hidden_layers": len(LAYERS),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rotary_dim": 32,
            "max_position_embeddings": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,  # many activations reach it
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "bos_token_id": EOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": EOS_ID,
            **{key: RELEASED[key] for key in ("moe_layer_freq", "sparse_attention_config")},
        },
        vision_config=_VISION,
        image_token_index=FIRST_ID,
        video_token_index=FIRST_ID + 1,
        projector_hidden_size=192,
    )


def write_minimax(directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights, tokenizer and processor; returns the directory."""
    write_network(minimax_config(), directory, seed)
    _name_dense_layers(directory / "model.safetensors")
    path = directory / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    text = {key: value for key, value in written["text_config"].items() if key not in _REPLACED}
    written["text_config"] = {**text, **RELEASED}
    written["vision_config"] |= {
        "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
        "rope_theta": 10000.0,
    }
    path.write_text(json.dumps(written), encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    module = transformers.models.minimax_m3_vl
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    module.processing_minimax_m3_vl.MiniMaxM3VLProcessor(
        image_processor=module.image_processing_minimax_m3_vl.MiniMaxM3VLImageProcessor(size=size),
        video_processor=module.video_processing_minimax_m3_vl.MiniMaxM3VLVideoProcessor(size=size),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)
    return directory


def _name_dense_layers(path: Path) -> None:
    """Restores the released names: transformers writes all MLPs as experts."""
    dense = [f".layers.{layer}." for layer, has_experts in enumerate(LAYERS) if not has_experts]

    def released(name: str) -> str:
        is_dense = name.startswith("vision_tower.") or any(map(name.__contains__, dense))
        return name.replace(".block_sparse_moe.", ".mlp.") if is_dense else name

    renamed = {released(name): each for name, each in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
