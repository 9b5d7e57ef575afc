"""Stand-ins for hub adapters that vLLM's tests name: random, with the originals' layers.

If the model has a stand-in (hub.py), its adapters fit the stand-in. Of other adapters, tests read
only names, ranks and shapes. Adapters are written once, beside the models, in the layout of a hub's
cache.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import hub

RANK = 8


@dataclass(frozen=True)
class Adapter:
    """
    layers:   name -> input and output features, of each changed layer
    targets:  in its configuration: a list, or a regular expression
    alpha:    in its configuration
    base:     base model in its configuration
    kind:     peft's name for this kind of adapter
    """

    layers: dict[str, tuple[int, int]]
    targets: list[str] | str
    alpha: int = 2 * RANK
    base: str = ""
    kind: str = "LORA"


def _in_layers(prefix: str, of_layer: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Returns these layers' shapes in each of a stand-in's two decoder layers."""
    return {f"{prefix}.{n}.{name}": sizes for n in range(2) for name, sizes in of_layer.items()}


def _names(layers: dict[str, tuple[int, int]]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in layers})


# Projections of hub.py's Llama and Qwen3.
_DECODER = _in_layers(
    "model.layers",
    {
        "self_attn.q_proj": (128, 128),
        "self_attn.k_proj": (128, 128),
        "self_attn.v_proj": (128, 128),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_proj": (128, 256),
        "mlp.up_proj": (128, 256),
        "mlp.down_proj": (256, 128),
    },
)
_LLAMA = {**_DECODER, "model.embed_tokens": (128256, 128), "lm_head": (128, 128256)}
_BAICHUAN = _in_layers(
    "model.layers", {"self_attn.W_pack": (128, 384), "self_attn.o_proj": (128, 128)}
)
_CHATGLM = _in_layers("transformer.encoder.layers", {"self_attention.query_key_value": (128, 384)})
_QWEN3_ADAPTER = Adapter(_DECODER, _names(_DECODER), alpha=32, base="Qwen/Qwen3-0.6B")

ADAPTERS = {
    "charent/self_cognition_Alice": _QWEN3_ADAPTER,
    "charent/self_cognition_Bob": _QWEN3_ADAPTER,
    "Jackmin108/Qwen3-0.6B-Meow-LoRA": _QWEN3_ADAPTER,
    "Jackmin108/Qwen3-0.6B-Woof-LoRA": _QWEN3_ADAPTER,
    "jekunz/smollm-135m-lora-fineweb-faroese": Adapter(_DECODER, _names(_DECODER)),
    "swapnilbp/llama_tweet_ptune": Adapter(_DECODER, _names(_DECODER), kind="PROMPT_TUNING"),
    "jeeejeee/llama32-3b-text2sql-spider": Adapter(_LLAMA, _names(_LLAMA), alpha=32),
    "jeeejeee/baichuan7b-text2sql-spider": Adapter(_BAICHUAN, _names(_BAICHUAN)),
    "jeeejeee/baichuan7b-zero-init": Adapter(_BAICHUAN, sorted(_BAICHUAN)),
    "jeeejeee/baichuan-7b-lora-zero-regex": Adapter(_BAICHUAN, r"model\..*(W_pack|o_proj)"),
    "jeeejeee/chatglm3-text2sql-spider": Adapter(_CHATGLM, _names(_CHATGLM)),
}


def make_missing() -> None:
    """Writes missing adapters."""
    for name, adapter in ADAPTERS.items():
        revision = hashlib.sha256(name.encode()).hexdigest()[:40]
        folder = hub.DIRECTORY / "hub" / f"models--{name.replace('/', '--')}"
        if (folder / "refs" / "main").exists():
            continue
        _write(folder / "snapshots" / revision, adapter, seed=int(revision[:8], 16))
        (folder / "refs").mkdir(exist_ok=True)
        # Written last: the adapter is complete.
        (folder / "refs" / "main").write_text(revision, encoding="utf-8")


def _write(directory: Path, adapter: Adapter, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (size_in, size_out) in adapter.layers.items():
        is_embedding = name.endswith("embed_tokens")
        suffixes = ("embedding_A", "embedding_B") if is_embedding else ("A.weight", "B.weight")
        shapes = (RANK, size_in), (size_out, RANK)
        for suffix, shape in zip(suffixes, shapes, strict=True):
            values = torch.randn(shape, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_{suffix}"] = values.to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": adapter.kind,
        "base_model_name_or_path": adapter.base,
        "r": RANK,
        "lora_alpha": adapter.alpha,
        "target_modules": adapter.targets,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
