"""DeepSeek-R1 in int8, as a directory that a dry-run takes: its config and its description."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 1200.0
LAYERS = 61
DENSE_LAYERS = 3
EXPERTS = 256
# Of the model's own config.json, what a model class reads.
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": DENSE_LAYERS,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MLP = ("gate_proj", "up_proj", "down_proj")


def description() -> dict[str, str]:
    """The types of an int8 export's tensors: W8A8_DYNAMIC but for the key-value up-projection, the
    router, norms, embedding and head."""
    types = {"model_quant_type": "W8A8_DYNAMIC"}

    def quantized(layer: str) -> None:
        for part in ("weight", "weight_scale", "weight_offset"):
            types[f"{layer}.{part}"] = "W8A8_DYNAMIC"

    floats = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        floats += [
            f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        floats += [
            f"{attention}.{part}.weight"
            for part in ("q_a_layernorm", "kv_a_layernorm", "kv_b_proj")
        ]
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
            quantized(f"{attention}.{part}")
        if number < DENSE_LAYERS:
            groups = [mlp]
        else:
            floats += [f"{mlp}.gate.weight", f"{mlp}.gate.e_score_correction_bias"]
            groups = [f"{mlp}.shared_experts", *(f"{mlp}.experts.{n}" for n in range(EXPERTS))]
        for group in groups:
            for part in MLP:
                quantized(f"{group}.{part}")
    return types | dict.fromkeys(floats, "FLOAT")


def dry_run(
    chip: str, topology: str, *options: str, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON report of a dry-run of rank 0 of 16, with these further options.

    config: the plugin's options
    """
    with tempfile.TemporaryDirectory(prefix="deepseek-r1.") as name:
        report = Path(name) / "report.json"
        _command(Path(name), chip, topology, config, f"--json={report}", *options)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def split_costs(
    chip: str, topology: str, destination: Path, *options: str, config: Mapping[str, Any]
) -> None:
    """Writes the file of `dbo.costs` of such an engine."""
    with tempfile.TemporaryDirectory(prefix="deepseek-r1.") as name:
        options = (f"--split-costs={destination}", *options)
        _command(Path(name), chip, topology, config, *options)


def _command(
    model: Path, chip: str, topology: str, config: Mapping[str, Any] | None, *options: str
) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    types = json.dumps(description())
    (model / "quant_model_description.json").write_text(types, encoding="utf-8")
    subprocess.run(
        [
            *(sys.executable, "-m", "vllm_davinci.meta", "dry-run", f"--model={model}"),
            *(f"--chip={chip}", f"--topology={topology}", "--tensor-parallel-size=16"),
            *("--quantization=ascend", "--gpu-memory-utilization=0.95"),
            f"--additional-config={json.dumps(dict(config or {}))}",
            *options,
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
