"""fp8 checkpoints of released families: their names, dtypes and settings.

Tensors have the names, dtypes and scales of the released files, and config.json has their section
of quantization; sizes are small.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.out_of_tree import register
from vllm_davinci_testing.engines.family_zoo import small_config
from vllm_davinci_testing.engines.loaded_model import loads_as

FP8 = torch.float8_e4m3fn
BLOCK = 128
OF_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_KEPT = ("input_layernorm", "post_attention_layernorm", "mlp.gate")


def _compressed(ignored: list[str]) -> dict[str, Any]:
    """GLM-4.5 as llm-compressor writes it: a scale per row, dynamic activations per token."""
    common = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    more = {"actorder": None, "block_structure": None, "observer_kwargs": {}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    **common, **more, "strategy": "channel", "dynamic": False, "observer": "minmax"
                },
                "input_activations": {
                    **common, **more, "strategy": "token", "dynamic": True, "observer": None
                },
                "output_activations": None,
            }
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Family:
    """
    model_type: of transformers' class
    section:    quantization_config of config.json
    scale:      dtype of scales
    quantized:  regular expression: names of weights in fp8
    wide:       likewise of tensors in float32
    changes:    of config.json beside that
    """

    model_type: str
    section: dict[str, Any]
    scale: torch.dtype
    quantized: str = r"(_proj|kv_a_proj_with_mqa)\.weight$"
    wide: str = r"e_score_correction_bias$"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def ending(self) -> str:
        return "_scale" if self.section["quant_method"] == "compressed-tensors" else "_scale_inv"

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fp8 weight, its scales, and its float values."""
        rows, columns = weight.shape
        if self.ending == "_scale":
            scale = (weight.float().abs().amax(1, keepdim=True) / 448).to(self.scale)
            wide = scale.float()
        else:
            whole = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
            whole[:rows, :columns] = weight.float().abs()
            largest = whole.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))
            scale = (largest / 448).to(self.scale)
            wide = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            wide = wide[:rows, :columns]
        stored = (weight.float() / wide).to(FP8)
        return stored, scale, (stored.float() * wide).to(weight.dtype)


_LAYERS_KEPT = [f"model.layers.{layer}.{part}" for layer in range(2) for part in _KEPT]
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # transformers does not write them
FAMILIES = {
    "DeepSeek-V3.1": Family(
        "deepseek_v3",
        {**OF_BLOCKS, "fmt": "e4m3", "scale_fmt": "ue8m0"},
        torch.float32,
        changes=NOAUX,
    ),
    "Kimi-K2": Family(
        "deepseek_v3",
        {**OF_BLOCKS, "fmt": "e4m3"},
        torch.float32,
        changes={**NOAUX, "model_type": "kimi_k2"},
    ),
    "Qwen3-235B-FP8": Family(
        "qwen3_moe",
        {**OF_BLOCKS, "fmt": "e4m3", "modules_to_not_convert": ["lm_head", *_LAYERS_KEPT]},
        torch.bfloat16,
    ),
    "GLM-4.5-FP8": Family(
        "glm4_moe", _compressed(["lm_head", "model.layers.1.mlp.gate"]), torch.bfloat16
    ),
    "MiniMax-M2": Family(
        "minimax_m2",
        {
            **OF_BLOCKS,
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        torch.float32,
        quantized=r"(_proj|\.w[123])\.weight$",
        wide=r"(e_score_correction_bias|gate\.weight)$",
        changes={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
}
Write = Callable[[Family], tuple[Path, Path]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Two directories: the fp8 checkpoint, and its float equivalent."""

    # vLLM gives the class the type of all models that share it, such as kimi_k2.
    monkeypatch.setattr(transformers.DeepseekV3Config, "model_type", "deepseek_v3")

    def made(family: Family) -> tuple[Path, Path]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = transformers.AutoModelForCausalLM.from_config(
                small_config(family.model_type), dtype=torch.bfloat16
            )
        network.save_pretrained(tmp_path / "floats")
        stored: dict[str, torch.Tensor] = {}
        meant: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(tmp_path / "floats" / "model.safetensors").items():
            if re.search(family.quantized, name):
                stored[name], stored[f"{name}{family.ending}"], meant[name] = family.rounded(tensor)
            else:
                is_wide = re.search(family.wide, name)
                stored[name] = meant[name] = tensor.float() if is_wide else tensor
        config = json.loads((tmp_path / "floats" / "config.json").read_text()) | family.changes
        for folder, content, section in (
            ("fp8", stored, {"quantization_config": family.section}),
            ("meant", meant, {}),
        ):
            directory = tmp_path / folder
            directory.mkdir()
            save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
            (directory / "config.json").write_text(json.dumps({**config, **section}))
        return tmp_path / "fp8", tmp_path / "meant"

    return made


@pytest.mark.usefixtures("one_rank", "vllm_config")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_released_family_checks_loads_and_misses_nothing(name: str, write: Write):
    register()
    family = FAMILIES[name]
    fp8, meant = write(family)
    model = loads_as(fp8, meant)

    tensors = load_file(fp8 / "model.safetensors")
    for lost in (
        next(each for each in tensors if each.endswith(family.ending)),
        next(each for each in sorted(tensors) if ".experts.5." in each),
        "model.norm.weight",
    ):
        kept = {each: tensor for each, tensor in tensors.items() if each != lost}
        save_file(kept, fp8 / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=re.escape(lost.removesuffix(family.ending))):
            model.load(fp8)
