"""Small checkpoints of DeepSeek-V4's shape, with released tensor names."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

from vllm_davinci_testing.engines.transformers_reference import TransformersReference
from vllm_davinci_testing.engines.zoo_model import VOCAB_SIZE, ZooModel

# Most test prompts have more rows; each row has 4 tokens.
NUM_CHOSEN = 12
WINDOW = 16

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
# Indexer, experts and streams, shared with later models.
INDEXED_STREAMS: dict[str, Any] = {
    # With fewer heads, all products of a key may be negative, and many keys score 0.
    "index_n_heads": 32,
    "index_head_dim": 128,  # the graphs' operator requires it
    "moe_intermediate_size": 192,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,  # many activations reach it
    "hc_eps": 1e-3,
    "hc_sinkhorn_iters": 3,  # each iteration is four launches, for which tests wait
}
# Released keys, which both transformers and vLLM read.
RELEASED: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 4, 0, 0],  # the last entry is an MTP layer's
    "num_hash_layers": 2,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 48,
    "o_groups": 4,
    "o_lora_rank": 24,
    "index_topk": NUM_CHOSEN,
    "sliding_window": WINDOW,
    **INDEXED_STREAMS,
    "rope_scaling": YARN,
}
COMPRESSED = (
    ZooModel("deepseek_v4", "deepseek_v4", 8, 1, 64, 128, num_layers=5, options=RELEASED),
)
# transformers' tensor name in a file -> the released name.
_RELEASED_NAMES = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.norm\.": "norm.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"^model\.": "",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}


@torch.no_grad()
def fill_streams_and_tables(network: nn.Module) -> None:
    """Fills tensors that random weights leave neutral: streams, group positions, expert tables."""
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
    """Renames a transformers checkpoint's tensors and keys to the released names."""
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


# A routed expert's tensors: released name -> name in a reference with a module per expert.
_EXPERT_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def in_transformers(name: str, model_type: str = "deepseek_v4") -> str:
    """Translates a released tensor name to the name in transformers' model."""
    renamings = [
        each
        for each in get_checkpoint_conversion_mapping(model_type) or ()
        if isinstance(each, WeightRenaming)
    ]
    prefix, _, part = name.rpartition(".")
    if part.startswith("weight"):  # with its scales
        name, part = f"{prefix}.weight", part.removeprefix("weight")
    else:
        part = ""
    for each in renamings:
        name = each.rename_source_key(name)[0]
    name = re.sub(
        r"(?<=\.experts\.)(\d+)\.(w[123])", lambda m: f"{m[1]}.{_EXPERT_PARTS[m[2]]}", name
    )
    return ("" if name.startswith(("lm_head.", "model.")) else "model.") + name + part


def with_int8_keys(network: nn.Module) -> nn.Module:
    """Makes the indexers of transformers' model choose by rotated keys rounded to 8 bits."""
    for module in network.modules():
        if isinstance(module, DeepseekV4IndexerScorer):
            module.register_forward_pre_hook(_with_rounded_keys)
    return network


def _with_rounded_keys(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    query, keys, hidden = inputs
    size = range(keys.shape[-1])
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in size] for i in size])
    rotated = keys.float() @ matrix
    scale = rotated.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    rounded = (rotated / scale).round() * (scale / 16).half().float()
    return query.float() @ matrix / 16, rounded, hidden


MTP = "mtp.0."
MTP_FILE = "mtp.safetensors"


def with_mtp(source: Path, destination: Path) -> Path:
    """Copies a checkpoint and adds an MTP layer after the last layer.

    The layer is a copy of the last one that also reads a little of the next token: some of its
    drafts are right.
    """
    shutil.copytree(source, destination)
    target = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    size, last = config["hidden_size"], f"layers.{config['num_hidden_layers'] - 1}."
    generator = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> torch.Tensor:
        return torch.randn(size, size, generator=generator) * scale

    ones = torch.ones(size)
    tensors = {n.replace(last, MTP): t for n, t in target.items() if n.startswith(last)}
    tensors |= {f"{MTP}{n}": t for n, t in target.items() if n.startswith(("hc_head_", "norm."))}
    tensors |= {
        f"{MTP}enorm.weight": ones,
        f"{MTP}hnorm.weight": ones + 0.1 * torch.randn(size, generator=generator),
        f"{MTP}e_proj.weight": drawn(0.02),
        f"{MTP}h_proj.weight": torch.eye(size) + drawn(0.02),
        f"{MTP}emb.tok_emb.weight": target["embed.weight"],
        f"{MTP}head.weight": target["head.weight"],
    }
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, destination / MTP_FILE, metadata={"format": "pt"})
    return destination


_FP8 = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight$")
_FP4 = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def write_native(source: Path, native: Path, floats: Path) -> None:
    """Rounds a checkpoint to DeepSeek's own types: fp8 in blocks, experts in MXFP4.

    native, floats: directories for the rounded weights in these types, and in fp32
    """
    for directory in (native, floats):
        shutil.copytree(source, directory)
    for path in source.glob("*.safetensors"):
        stored: dict[str, torch.Tensor] = {}
        rounded: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            is_fp4 = _FP4.search(name) is not None
            if not is_fp4 and (".compressor." in name or not _FP8.search(name)):
                stored[name] = rounded[name] = tensor
                continue
            block = (1, 32) if is_fp4 else (128, 128)
            scale, spread = _powers_of_two(tensor, block, 6.0 if is_fp4 else 448.0)
            scaled = tensor / spread
            if is_fp4:
                numbers = (scaled.abs().unsqueeze(-1) - _FP4_VALUES).abs().argmin(-1)
                values = _FP4_VALUES[numbers] * scaled.sign()
                codes = (numbers + 8 * (scaled < 0)).to(torch.uint8)
                packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
                stored[name] = packed.view(torch.int8)
            else:
                stored[name] = scaled.to(torch.float8_e4m3fn)
                values = stored[name].float()
            stored[f"{name.removesuffix('weight')}scale"] = scale.to(torch.float8_e8m0fnu)
            rounded[name] = values * spread
        for directory, tensors in ((native, stored), (floats, rounded)):
            save_file(tensors, directory / path.name, metadata={"format": "pt"})
    path = native / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"expert_dtype": "fp4", "quantization_config": NATIVE}
    path.write_text(json.dumps(config), encoding="utf-8")


NATIVE = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def _powers_of_two(
    tensor: torch.Tensor, block: tuple[int, int], largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns power-of-two scales per block, and repeated for each entry."""
    padding = (0, -tensor.shape[1] % block[1], 0, -tensor.shape[0] % block[0])
    padded = nn.functional.pad(tensor, padding).unflatten(1, (-1, block[1]))
    peaks = padded.unflatten(0, (-1, block[0])).abs().amax(dim=(1, 3))
    scale = (peaks / largest).log2().ceil().exp2()
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return scale, spread[: tensor.shape[0], : tensor.shape[1]]


class PredictingReference:
    """Runs transformers' modules like a checkpoint's MTP layer, in fp32."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        """directory: receives a checkpoint with the MTP layer's last layer, head and norm"""
        self._model = TransformersReference(checkpoint).network
        own = load_file(checkpoint / MTP_FILE)
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        last = f"layers.{config['num_hidden_layers']}."
        tensors = load_file(checkpoint / "model.safetensors")
        tensors |= {
            name.removeprefix(MTP) if name.startswith((f"{MTP}hc_head_", f"{MTP}norm."))
            else name.replace(MTP, last): tensor
            for name, tensor in own.items()
        }  # fmt: skip
        directory.mkdir()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config["num_hidden_layers"] += 1
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self._layers = TransformersReference(directory).network
        self._own = {name.removeprefix(MTP): tensor for name, tensor in own.items()}

    @torch.inference_mode()
    def drafts(self, token_ids: list[int]) -> list[int]:
        """Returns drafts for the third and later tokens, each computed from all tokens before
        it.
        """
        tokens = torch.tensor([token_ids])
        seen: list[torch.Tensor] = []
        hook = self._model.model.hc_head.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
        self._model(tokens)
        hook.remove()
        streams, base = seen[0][:, :-1], self._layers.model
        embedded = base.embed_tokens(tokens[:, 1:])
        embedded[:, 0] = 0
        positions = torch.arange(embedded.shape[1]).unsqueeze(0)
        known = self._linear("h_proj", self._norm("hnorm", streams))
        mixed = known + self._linear("e_proj", self._norm("enorm", embedded)).unsqueeze(2)
        ropes = {
            kind: base.rotary_emb(embedded, position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        mask = create_sliding_window_causal_mask(
            config=base.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        out = base.layers[-1](
            mixed, position_embeddings=ropes, position_ids=positions, attention_mask=mask
        )
        drafts: list[int] = (
            self._layers.lm_head(base.norm(base.hc_head(out)))[0].argmax(-1).tolist()
        )
        return drafts

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self._own[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._own[f"{name}.weight"]
        return nn.functional.rms_norm(x, weight.shape, weight, self._model.config.rms_norm_eps)
