"""Writes float checkpoints for ModelSlim: `write_models.py CHECKPOINTS DIRECTORY`.

Runs in ModelSlim's environment, whose older transformers writes the configurations that ModelSlim
reads. Writes small models of ModelSlim's types with random weights, and this repository's two
trained checkpoints in the older format.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY = 4096  # size of the trained checkpoints' tokenizer
# ModelSlim reads the MTP layer from this file, under this layer number, whatever the model's depth.
MTP_FILE, MTP_LAYER = "model-00163-of-000163.safetensors", 61
DEEPSEEK_CODE = "modeling_deepseek.py"

COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Any] = {
    "qwen3": transformers.Qwen3Config(head_dim=128, **QWEN, **COMMON),
    "qwen2_5": transformers.Qwen2Config(**QWEN, **COMMON),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        **QWEN,
        **COMMON,
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=96,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        routed_scaling_factor=2.0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        **COMMON,
    ),
}


def main(checkpoints: Path, directory: Path) -> None:
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        network = transformers.AutoModelForCausalLM.from_config(config)
        fill(network)
        target = directory / name
        network.to(torch.bfloat16).save_pretrained(target)
        finish(target, checkpoints / "tiny_llama")
    for name in ("tiny_llama", "tiny_deepseek"):
        target = directory / name
        shutil.copytree(checkpoints / name, target)
        finish(target, checkpoints / name)
    widen(directory / "tiny_llama", directory / "tiny_llama_wide")


def widen(source: Path, target: Path) -> None:
    """Converts a checkpoint to fp32, from which ModelSlim rounds."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    wide = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file(wide, file, metadata={"format": "pt"})
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "torch_dtype": "float32"}, indent=2), encoding="utf-8")


def fill(network: torch.nn.Module) -> None:
    """Makes weights as large as trained weights, so that their values determine the tokens."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1 if "embed" in name else parameter.shape[-1] ** -0.5)
            elif name.endswith(".bias"):
                parameter.normal_(0, 0.3)


def finish(directory: Path, tokenizer: Path) -> None:
    """Writes tokenizer and configuration in this transformers' format, and DeepSeek's shards."""
    shutil.copy(tokenizer / "tokenizer.json", directory)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    kept = {name: settings[name] for name in ("bos_token", "eos_token", "pad_token")}
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    if config["model_type"] == "deepseek_v3":
        split(directory, config)
        config["num_nextn_predict_layers"] = 1
        shutil.copy(Path(__file__).with_name(DEEPSEEK_CODE), directory)
        place = DEEPSEEK_CODE.removesuffix(".py")
        config["auto_map"] = {"AutoModelForCausalLM": f"{place}.DeepseekV3ForCausalLM"}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def split(directory: Path, config: dict[str, Any]) -> None:
    """Splits the checkpoint into two shards with an index; the second has an MTP layer."""
    first = directory / "model-00001-of-000163.safetensors"
    (directory / "model.safetensors").rename(first)
    tensors = load_file(first)
    depth, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, extra = f"model.layers.{depth - 1}.", f"model.layers.{depth}."
    more = {
        name.replace(last, extra): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    head = {
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden) * hidden**-0.5,
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.norm.weight": torch.ones(hidden),
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    for name, tensor in head.items():
        more[f"model.layers.{MTP_LAYER}.{name}"] = tensor.to(torch.bfloat16)
    save_file(more, directory / MTP_FILE, metadata={"format": "pt"})
    places = dict.fromkeys(tensors, first.name) | dict.fromkeys(more, MTP_FILE)
    size = sum(tensor.nbytes for tensor in (tensors | more).values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
