"""fp8 checkpoints as published: scales of every dtype and extent, experts in one tensor."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.components.fused_ops import choose_fused_ops
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights
from vllm_davinci.core.quantization.fp8 import Block, as_floats, as_integers
from vllm_davinci.core.quantization.rounding import FloatLayer
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci_testing.engines.loaded_model import LoadedModel, loads_as

FP8 = torch.float8_e4m3fn
EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)_proj\.weight$")
SHAPE = (200, 300)


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


@dataclass(frozen=True)
class Variant:
    """blocks: size of a scale's block; None: `extent` says which entries share a scale"""

    dtype: torch.dtype
    blocks: Block | None
    extent: str = "block"
    ending: str = "_scale_inv"
    is_fused: bool = False

    def config(self) -> dict[str, Any]:
        if self.ending == "_scale_inv":
            size = None if self.blocks is None else list(self.blocks)
            made = {"quant_method": "fp8", "activation_scheme": "dynamic"}
            return made if size is None else {**made, "weight_block_size": size}
        weights = {"num_bits": 8, "type": "float", "strategy": self.extent, "symmetric": True}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fp8 weight, its scales, and its float values."""
        if self.blocks is not None:
            rows, columns = self.blocks
            tiles = weight.float().unfold(-2, rows, rows).unfold(-2, columns, columns)
            scale = (tiles.abs().amax((-1, -2)) / 448).to(self.dtype)
            wide = scale.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        else:
            largest = weight.float().abs()
            largest = largest.amax(-1, keepdim=True) if self.extent == "channel" else largest.max()
            scale = (largest / 448).to(self.dtype)
            wide = scale.float()
        stored = (weight.float() / wide).to(FP8)
        return stored, scale, (stored.float() * wide).bfloat16()


VARIANTS = {
    "bf16 blocks": Variant(torch.bfloat16, Block(128, 128)),
    "fp16 blocks": Variant(torch.float16, Block(64, 128)),
    "fp32 tensor": Variant(torch.float32, None, "tensor"),
    "bf16 experts in one tensor": Variant(torch.bfloat16, Block(128, 128), is_fused=True),
    "compressed channel": Variant(torch.bfloat16, None, "channel", "_scale"),
    "compressed tensor": Variant(torch.float32, None, "tensor", "_scale"),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3") / "floats"
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, vocab_size=512, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(directory)
    return directory


def in_one_tensor(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate]."""
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


Write = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def write(floats: Path, tmp_path: Path) -> Write:
    """Two directories of a variant: the fp8 checkpoint, and its float equivalent."""

    def made(name: str) -> tuple[Path, Path]:
        variant = VARIANTS[name]
        tensors = load_file(floats / "model.safetensors")
        tensors = in_one_tensor(tensors) if variant.is_fused else tensors
        stored: dict[str, torch.Tensor] = {}
        meant: dict[str, torch.Tensor] = {}
        for each, tensor in tensors.items():
            if each.endswith(("_proj.weight", "_proj")):
                stored[each], stored[f"{each}{variant.ending}"], meant[each] = variant.rounded(
                    tensor
                )
            else:
                stored[each] = meant[each] = tensor
        config = json.loads((floats / "config.json").read_text())
        for directory, content, section in (
            (tmp_path / "fp8", stored, {"quantization_config": variant.config()}),
            (tmp_path / "meant", meant, {}),
        ):
            directory.mkdir()
            content = {key: value.contiguous() for key, value in content.items()}
            save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
            (directory / "config.json").write_text(json.dumps({**config, **section}))
        return tmp_path / "fp8", tmp_path / "meant"

    return made


@pytest.mark.usefixtures("operators", "one_rank", "vllm_config")
@pytest.mark.parametrize("name", VARIANTS)
def test_published_variants_load_and_check_and_become_floats(name, write, tmp_path):
    register()
    fp8, meant = write(name)
    expected = loads_as(fp8, meant).parameters()
    Exporter(fp8, tmp_path / "out", "FLOAT", torch.bfloat16, {}).run(lambda count: None)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert check_checkpoint(file.parent).quantization == "none"
    third = LoadedModel(file.parent)
    third.load(file.parent)
    assert all(torch.equal(third.parameters()[each], value) for each, value in expected.items())


@pytest.mark.usefixtures("one_rank", "vllm_config")
@pytest.mark.parametrize("name", ["bf16 blocks", "compressed channel"])
def test_published_variants_become_integers(name: str, write: Write, tmp_path: Path):
    register()
    fp8, _ = write(name)
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
    config = VARIANTS["compressed channel"].config()
    config["config_groups"]["group_0"]["weights"] |= changed
    with pytest.raises(UnsupportedFeatureError, match=told):
        Fp8Weights.of(config)
    config = VARIANTS["compressed channel"].config()
    config["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "type": "int"}}
    with pytest.raises(UnsupportedFeatureError, match="and weights of another kind"):
        Fp8Weights.of(config)
