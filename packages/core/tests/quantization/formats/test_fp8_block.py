"""fp8 weights with a scale per block become floats or int8, at load and offline.

Published fp8 checkpoints: released families, and scales of every dtype and extent.

Tensors have the released files' names, dtypes and scales, and config.json their quantization
section; sizes are small.
"""

import json
import re
import shutil
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
from vllm_davinci.core.errors import CheckpointError, CoreError, UnsupportedFeatureError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.export.source import require_calibratable
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights
from vllm_davinci.core.quantization.fp8 import Block, as_floats, as_integers
from vllm_davinci.core.quantization.rounding import FloatLayer
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci_testing.engines.family_zoo import small_config
from vllm_davinci_testing.engines.fp8_checkpoint import (
    deepseek_of_blocks,
    dequantized,
    write_block_fp8,
)
from vllm_davinci_testing.engines.loaded_model import LoadedModel, loads_as

DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(
            deepseek_of_blocks(), dtype=torch.bfloat16
        )
    network.save_pretrained(directory / "floats")
    return write_block_fp8(directory / "floats", directory / "blocks")


def quantized(source: Path, destination: Path, kind: str) -> Path:
    Exporter(source, destination, kind, torch.bfloat16, {}).run(lambda count: None)
    return destination


def test_every_fp8_number_keeps_its_value():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    finite = numbers[numbers.float().isfinite()].view(2, 127)
    made = as_floats(finite, one, Block(2, 127), torch.float32)
    assert torch.equal(made.view(torch.int32), finite.float().view(torch.int32))  # includes -0
    made = as_floats(numbers.view(2, 128), one, Block(2, 128), torch.bfloat16)
    assert int(made.isnan().sum()) == 2


@pytest.fixture
def compiled_operators() -> Iterator[None]:
    """Uses vllm-davinci-kernels' operators; without them torch allocates each result."""
    choose_fused_ops(True)
    yield
    choose_fused_ops(False)


@pytest.mark.usefixtures("compiled_operators")
@pytest.mark.parametrize("kind", ["FLOAT", "W8A8_DYNAMIC"])
def test_memory_of_one_weight_serves_the_next_but_not_while_it_is_read(kind: str):
    block, names = Block(128, 128), [f"{number}.weight" for number in range(6)]
    files = {name: torch.randn(128, 256).to(torch.float8_e4m3fn) for name in names}
    scales = {f"{name}_scale_inv": torch.rand(1, 2) + 0.5 for name in names}
    stored = [pair for pairs in zip(files.items(), scales.items(), strict=True) for pair in pairs]
    types = dict.fromkeys(names, kind)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        made = Fp8Weights(types, "here", blocks=block).converted(stored, torch.bfloat16)
        return ((name, tensor) for name, tensor in made if name in files)

    kept = dict(weights())
    assert len({tensor.data_ptr() for tensor in kept.values()}) == len(names)
    addresses = set()
    for name, tensor in weights():
        assert torch.equal(tensor, kept[name])
        addresses.add(tensor.data_ptr())
    assert len(addresses) <= 3


def blocks_of(**config: Any) -> Block | None:
    found = Fp8Weights.of({"quant_method": "fp8", **config})
    assert found is not None
    return found.blocks


def test_blocks_equal_those_of_the_configuration():
    assert Fp8Weights.of({}) is None
    assert Fp8Weights.of({"quant_method": "gptq"}) is None
    assert blocks_of(weight_block_size=[64, 128]) == Block(64, 128)
    assert blocks_of() is None
    for size in ([64], [0, 128], ["a", "b"], 128):
        with pytest.raises(UnsupportedFeatureError, match="one size of two positive numbers"):
            blocks_of(weight_block_size=size)


def test_loaded_floats_equal_those_of_transformers_and_of_the_offline_conversion(
    fp8: Path, registered: None, tmp_path: Path
):
    model = LoadedModel(fp8)
    assert model.config.model_config.quantization == "fp8"
    model.load(fp8)
    loaded = model.parameters()
    expected = dequantized(fp8)[DOWN].bfloat16()
    assert torch.equal(loaded["model.layers.1.mlp.experts.routed_experts.w2_weight"][2], expected)
    offline = quantized(fp8, tmp_path / "floats", "FLOAT")
    assert check_checkpoint(offline).quantization == "none"
    other = LoadedModel(offline)
    other.load(offline)
    assert loaded.keys() == other.parameters().keys()
    assert all(torch.equal(loaded[name], value) for name, value in other.parameters().items())


def test_loaded_integers_equal_those_of_the_offline_conversion(fp8, registered, tmp_path):
    model = LoadedModel(fp8, quantization="ascend")
    model.load(fp8)
    loaded = model.parameters()
    assert loaded["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    offline = quantized(fp8, tmp_path / "int8", "W8A8_DYNAMIC")
    described = {layer.name: layer.loads for layer in check_checkpoint(offline).kinds}
    assert described["model.layers.*.mlp.experts.*.down_proj"] == "W8A8_DYNAMIC"
    assert described["model.layers.*.self_attn.kv_b_proj"] == "FLOAT"
    other = LoadedModel(offline)
    other.load(offline)
    different = {
        name
        for name, value in other.parameters().items()
        if name not in loaded or not torch.equal(loaded[name], value)
    }
    # Weights with sizes not divisible by 128 are not fp8, and load unchanged.
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in different} <= {
        "fused_qkv_a_proj"
    }


def test_weights_are_checked_with_their_scales(fp8: Path):
    report = check_checkpoint(fp8)
    assert report.can_load, report.problems()
    assert {kind.loads for kind in report.kinds if "experts" in kind.name} == {"fp8"}


def without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{DOWN}_scale_inv"]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"] = torch.ones(3, 1)


def of_zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"].zero_()


def of_a_float_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (without, f"{DOWN} holds fp8, and {DOWN}_scale_inv is in no file"),
        (of_another_shape, f"{DOWN}_scale_inv has shape [3, 1]"),
        (of_zero, f"{DOWN}_scale_inv holds 0.0"),
        (of_a_float_weight, f"{DOWN}_scale_inv exists without the fp8 tensor {DOWN}"),
    ],
)
def test_an_error_names_the_faulty_tensor_and_its_file(spoil, told, fp8, registered, tmp_path):
    directory = tmp_path / "spoilt"
    shutil.copytree(fp8, directory)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (directory / "model.safetensors.index.json").unlink()
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = LoadedModel(fp8)
    with pytest.raises(CoreError) as error:
        model.load(directory)
    assert f"model.safetensors: {told}" in str(error.value)
    if spoil is not of_zero:  # the check does not read values
        assert not check_checkpoint(directory).can_load


def test_calibration_and_float_sources_are_refused_with_the_alternative(fp8: Path, tmp_path: Path):
    config = json.loads((fp8 / "config.json").read_text())
    with pytest.raises(CheckpointError, match="--type FLOAT"):
        require_calibratable(fp8, config)
    with pytest.raises(CheckpointError, match="needs a source with fp8 weights"):
        quantized(fp8.with_name("floats"), tmp_path / "again", "FLOAT")


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
