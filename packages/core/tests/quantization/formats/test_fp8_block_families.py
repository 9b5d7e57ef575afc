"""Published fp8 checkpoints: released families, and scales of every dtype and extent.

Tensors have the released files' names, dtypes and scales, and config.json their quantization
section; sizes are small.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.components.fused_ops import choose_fused_ops
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights
from vllm_davinci.core.quantization.fp8 import Block, as_floats, as_integers
from vllm_davinci.core.quantization.rounding import FloatLayer
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci_testing.engines.family_zoo import small_config
from vllm_davinci_testing.engines.loaded_model import LoadedModel, loads_as

FP8 = torch.float8_e4m3fn
EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)_proj\.weight$")
SHAPE = (200, 300)
OF_TENSORS = {"quant_method": "fp8", "activation_scheme": "dynamic"}
OF_BLOCKS = {**OF_TENSORS, "weight_block_size": [128, 128]}
_KEPT = ("input_layernorm", "post_attention_layernorm", "mlp.gate")


def _compressed(ignored: list[str], strategy: str = "channel") -> dict[str, Any]:
    """As written by llm-compressor for GLM-4.5: a scale per row, dynamic activations per token."""
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
                    **common, **more, "strategy": strategy, "dynamic": False, "observer": "minmax"
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
    model_type: model type of transformers' class
    section:    quantization_config of config.json
    scale:      dtype of scales
    quantized:  regular expression for names of fp8 weights
    wide:       regular expression for names of float32 tensors
    is_fused:   True if one tensor has all experts of a layer
    changes:    further changes of config.json
    """

    model_type: str
    section: dict[str, Any]
    scale: torch.dtype
    quantized: str = r"(_proj|kv_a_proj_with_mqa)\.weight$"
    wide: str = r"e_score_correction_bias$"
    is_fused: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def ending(self) -> str:
        return "_scale" if self.section["quant_method"] == "compressed-tensors" else "_scale_inv"

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the fp8 weight, its scales, and its float values. weight: [.., rows, columns]"""
        largest = weight.float().abs()
        if blocks := self.section.get("weight_block_size"):
            (rows, columns), (height, width) = blocks, weight.shape[-2:]
            whole = pad(largest, (0, -width % columns, 0, -height % rows))
            tiles = whole.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns))
            scale = (tiles.amax((-3, -1)) / 448).to(self.scale)
            wide = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
            wide = wide[..., :height, :width]
        else:
            groups = self.section.get("config_groups", {}).values()
            is_per_row = any(each["weights"]["strategy"] == "channel" for each in groups)
            largest = largest.amax(-1, keepdim=True) if is_per_row else largest.max()
            scale = (largest / 448).to(self.scale)
            wide = scale.float()
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
VARIANTS = {
    "bf16 blocks": Family("qwen3_moe", OF_BLOCKS, torch.bfloat16),
    "fp16 blocks": Family(
        "qwen3_moe", {**OF_TENSORS, "weight_block_size": [64, 128]}, torch.float16
    ),
    "fp32 tensor": Family("qwen3_moe", OF_TENSORS, torch.float32),
    "bf16 experts in one tensor": Family(
        "qwen3_moe", OF_BLOCKS, torch.bfloat16, r"_proj(\.weight)?$", is_fused=True
    ),
    "compressed channel": Family("qwen3_moe", _compressed(["lm_head"]), torch.bfloat16),
    "compressed tensor": Family("qwen3_moe", _compressed(["lm_head"], "tensor"), torch.float32),
}
Write = Callable[[Family], tuple[Path, Path]]


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    choose_fused_ops(request.param)
    yield
    choose_fused_ops(False)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((2, 3), Block(128, 128)),
        ((4, 3), Block(64, 128)),
        ((1,), None),
        ((), None),
        ((200, 1), None),
        ((200,), None),
    ],
)
def test_scales_of_every_dtype_and_extent_are_multiplied(shape, blocks, dtype):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=g).to(FP8)
    scale = (torch.rand(shape, generator=g) + 0.5).to(dtype)
    wide = scale.float()
    if blocks is not None:
        wide = wide.repeat_interleave(blocks.rows, 0).repeat_interleave(blocks.columns, 1)
        wide = wide[: SHAPE[0], : SHAPE[1]]
    elif scale.numel() > 1:
        wide = wide.reshape(-1, 1)
    expected = weight.float() * wide
    assert torch.equal(as_floats(weight, scale, blocks, torch.bfloat16), expected.bfloat16())
    assert torch.equal(as_floats(weight, scale, blocks, torch.float16), expected.half())
    made = as_integers(weight, scale, blocks)
    rounded = find_scheme("W8A8_DYNAMIC", "p").rounded(FloatLayer(expected, torch.float32))
    assert made.keys() == rounded.keys()
    assert all(torch.equal(value, rounded[name]) for name, value in made.items())
    experts = as_floats(
        torch.stack([weight, weight]), torch.stack([scale, 2 * scale]), blocks, torch.float32
    )
    assert torch.equal(experts, torch.stack([expected, 2 * expected]))


def in_one_tensor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns experts as [experts, 2 * intermediate, hidden] and [experts, hidden,
    intermediate].
    """
    made: dict[str, torch.Tensor] = {}
    parts: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if match := EXPERT.match(name):
            parts.setdefault((match["prefix"], match["part"]), []).append(tensor)
        else:
            made[name] = tensor
    for prefix in {prefix for prefix, _ in parts}:
        gate, up = (torch.stack(parts[prefix, part]) for part in ("gate", "up"))
        made[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], 1)
        made[f"{prefix}.down_proj"] = torch.stack(parts[prefix, "down"])
    return made


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes an fp8 checkpoint and its float equivalent; returns both directories."""

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
        tensors = load_file(tmp_path / "floats" / "model.safetensors")
        tensors = in_one_tensor(tensors) if family.is_fused else tensors
        for name, tensor in tensors.items():
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
            content = {name: tensor.contiguous() for name, tensor in content.items()}
            save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
            (directory / "config.json").write_text(json.dumps({**config, **section}))
        return tmp_path / "fp8", tmp_path / "meant"

    return made


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_released_family_checks_loads_and_misses_nothing(name: str, write: Write):
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


@pytest.mark.usefixtures("operators", "registered")
@pytest.mark.parametrize("name", VARIANTS)
def test_published_variants_load_and_check_and_become_floats(name, write, tmp_path):
    fp8, meant = write(VARIANTS[name])
    expected = loads_as(fp8, meant).parameters()
    Exporter(fp8, tmp_path / "out", "FLOAT", torch.bfloat16, {}).run(lambda count: None)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert check_checkpoint(file.parent).quantization == "none"
    third = LoadedModel(file.parent)
    third.load(file.parent)
    assert all(torch.equal(third.parameters()[each], value) for each, value in expected.items())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["bf16 blocks", "compressed channel"])
def test_published_variants_become_integers(name, write, tmp_path):
    fp8, _ = write(VARIANTS[name])
    out = tmp_path / "out"
    Exporter(fp8, out, "W8A8_DYNAMIC", torch.bfloat16, {}).run(lambda count: None)
    assert check_checkpoint(out).can_load
    model, other = LoadedModel(fp8, quantization="ascend"), LoadedModel(out)
    model.load(fp8)
    other.load(out)
    loaded, expected = model.parameters(), other.parameters()
    assert loaded["model.layers.0.self_attn.o_proj.weight"].dtype == torch.int8
    assert all(torch.equal(loaded[each], value) for each, value in expected.items())


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"strategy": "group"}, "a scale per group"), ({"symmetric": False}, "only symmetric scales")],
)
def test_other_fp8_groups_are_refused(changed: dict[str, Any], told: str):
    config = _compressed(["lm_head"])
    config["config_groups"]["group_0"]["weights"] |= changed
    with pytest.raises(UnsupportedFeatureError, match=told):
        Fp8Weights.of(config)
    config = _compressed(["lm_head"])
    config["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "type": "int"}}
    with pytest.raises(UnsupportedFeatureError, match="and weights of another kind"):
        Fp8Weights.of(config)
