"""Round-to-nearest writes complete, loadable checkpoints that are close to their source."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.export.destination import PARTIAL_NAME
from vllm_davinci.core.export.exporter import Exported, Exporter, model_dtype
from vllm_davinci.core.export.layer_types import LayerTypes
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.quantization.tensors import float_from_bits
from vllm_davinci.operators.quantization import static_quant
from vllm_davinci_testing.engines.deepseek_zoo import small_deepseek
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges

DEEPSEEK = small_deepseek()
WEIGHTS = "model.safetensors"
WRITTEN = "quant_model_weights-00001-of-00001.safetensors"
WINDOWS = [torch.arange(60).remainder(61)[None]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(DEEPSEEK, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def export(
    source: Path, destination: Path, kind: str, dtype: torch.dtype = torch.bfloat16
) -> Exported:
    ranges = {}
    if kind == "W8A8":
        ranges = input_ranges(source, WINDOWS)
    return Exporter(source, destination, kind, dtype, ranges).run(lambda count: None)


def test_a_rounded_weight_is_within_half_a_step():
    weight = torch.randn(20, 32)
    weight[3] = 0
    tensors = find_scheme("W8A8_DYNAMIC", "p").rounded(FloatLayer(weight, torch.bfloat16))
    scale = tensors["weight_scale"]
    assert scale.dtype == torch.float32 and scale.shape == (20, 1)
    back = tensors["weight"].float() * scale
    assert ((back - weight).abs() <= scale * 0.501).all()
    assert not tensors["weight_offset"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_static_tensors_reproduce_the_product_and_its_bias(dtype: torch.dtype):
    weight, bias, x = torch.randn(24, 48), torch.randn(24), torch.rand(7, 48) * 5 - 1
    seen = InputRange(x.min().item(), x.max().item())
    tensors = find_scheme("W8A8", "p").rounded(FloatLayer(weight, dtype, bias, seen))
    assert list(tensors) == ["weight", "quant_bias", "input_scale", "input_offset", "deq_scale"]
    scale, offset = tensors["input_scale"], tensors["input_offset"]
    assert scale.dtype == offset.dtype == torch.float32
    integers = static_quant(x, scale, offset)
    deq_scale = tensors["deq_scale"]
    assert deq_scale.dtype == (torch.int64 if dtype == torch.float16 else torch.float32)
    if dtype == torch.float16:
        deq_scale = float_from_bits(deq_scale)
    sums = integers.double() @ tensors["weight"].double().t() + tensors["quant_bias"]
    expected = x @ weight.t() + bias
    error = (sums * deq_scale - expected).abs()
    assert error.max() < 0.02 * expected.abs().max()


def test_projections_of_recurrent_states_are_quantized_and_convolutions_are_not():
    layer, types = "model.layers.0.linear_attn", LayerTypes("W8A8_DYNAMIC", {})
    for name in ("in_proj_qkvz", "in_proj_ba", "in_proj_z", "out_proj"):
        assert types.of(f"{layer}.{name}.weight", (8, 8), torch.bfloat16) == "W8A8_DYNAMIC"
    assert types.of(f"{layer}.conv1d.weight", (8, 1, 4), torch.bfloat16) == "FLOAT"


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_projections_and_experts_are_quantized_and_no_other_layer(kind, source, tmp_path):
    written = export(source, tmp_path, kind)
    assert check_checkpoint(tmp_path).can_load
    types = QuantDescription.load(tmp_path / DESCRIPTION).types
    assert types["model.layers.0.self_attn.q_a_proj.weight"] == kind
    assert types["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == kind
    assert types["model.layers.1.mlp.shared_experts.up_proj.weight"] == kind
    assert types["model.layers.1.mlp.experts.3.down_proj.weight"] == "W8A8_DYNAMIC"
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.input_layernorm.weight",
    ):
        assert types[name] == "FLOAT"
    stored = load_file(tmp_path / WRITTEN)
    assert set(stored) == set(types)
    assert written.num_bytes < written.source_bytes
    assert (tmp_path / "tokenizer_config.json").is_file()


def test_progress_counts_every_byte_of_the_source(source: Path, tmp_path: Path):
    seen: list[int] = []
    Exporter(source, tmp_path, "W8A8_DYNAMIC", torch.bfloat16, {}).run(seen.append)
    stored = load_file(source / "model.safetensors")
    assert sum(seen) == sum(tensor.nbytes for tensor in stored.values())


def test_the_model_has_the_requested_dtype(source: Path, tmp_path: Path):
    export(source, tmp_path, "W8A8_DYNAMIC", torch.float16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    stored = load_file(tmp_path / WRITTEN)
    assert stored["model.embed_tokens.weight"].dtype == torch.float16
    assert model_dtype({"dtype": "float32"}, None) == torch.bfloat16
    assert model_dtype({"torch_dtype": "float16"}, None) == torch.float16
    assert model_dtype({"torch_dtype": "float16"}, "bfloat16") == torch.bfloat16


def test_parts_of_one_product_get_one_input_scale(source: Path, tmp_path: Path):
    export(source, tmp_path, "W8A8")
    stored = load_file(tmp_path / WRITTEN)
    for layer, first, second in (
        ("model.layers.0.self_attn", "q_a_proj", "kv_a_proj_with_mqa"),
        ("model.layers.0.mlp", "gate_proj", "up_proj"),
    ):
        for name in ("input_scale", "input_offset"):
            assert torch.equal(
                stored[f"{layer}.{first}.{name}"], stored[f"{layer}.{second}.{name}"]
            )


def test_a_quantized_source_is_refused(source: Path, tmp_path: Path):
    export(source, tmp_path / "once", "W8A8_DYNAMIC")
    with pytest.raises(CheckpointError, match="is already quantized"):
        export(tmp_path / "once", tmp_path / "twice", "W8A8_DYNAMIC")


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_fused_experts_become_the_same_as_separate_ones(kind, is_transposed, source, tmp_path):
    fused = tmp_path / "fused"
    shutil.copytree(source, fused)
    tensors = load_file(source / WEIGHTS)
    experts = "model.layers.1.mlp.experts"
    separate = {
        part: torch.stack([tensors.pop(f"{experts}.{n}.{part}.weight") for n in range(4)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    gate_up = torch.cat([separate["gate_proj"], separate["up_proj"]], 1)
    for name, tensor in (("gate_up_proj", gate_up), ("down_proj", separate["down_proj"])):
        stored = tensor.transpose(1, 2) if is_transposed else tensor
        tensors[f"{experts}.{name}"] = stored.contiguous()
    save_file(tensors, fused / WEIGHTS, metadata={"format": "pt"})
    # Calibration runs separate projections, because transformers reads other models in the other
    # layout.
    ranges = input_ranges(source, WINDOWS) if kind == "W8A8" else {}
    written = [
        Exporter(start, tmp_path / name, kind, torch.bfloat16, ranges).run(lambda count: None)
        for start, name in ((source, "one"), (fused, "other"))
    ]
    assert written[0].counts == written[1].counts
    one, other = (load_file(tmp_path / name / WRITTEN) for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    types = [
        QuantDescription.load(tmp_path / name / DESCRIPTION).types for name in ("one", "other")
    ]
    assert types[0] == types[1]


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 8)}, r"gate_up_proj .* \[2, 8, 4\]"),
        ({"gate_up_proj": (2, 8, 4)}, r"experts\.gate_up_proj .* \[2, 8, 4\]"),
        ({"w1": (2, 4, 8)}, r"experts\.w1 .* \[2, 4, 8\]"),
        (
            {"gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4), "down_proj_bias": (2, 4)},
            r"experts\.down_proj_bias .* \[2, 4\]",
        ),
    ],
)
def test_experts_in_an_unknown_layout_are_refused_with_their_shape(tensors, named, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    experts = {
        f"model.layers.0.mlp.experts.{name}": torch.ones(shape) for name, shape in tensors.items()
    }
    save_file(experts, source / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{named}.*one tensor per expert"):
        export(source, tmp_path / "out", "W8A8_DYNAMIC")


def test_layers_behind_the_model_are_dynamic_in_a_static_export(source: Path, tmp_path: Path):
    with_head = tmp_path / "source"
    shutil.copytree(source, with_head)
    tensors = load_file(source / WEIGHTS)
    tensors |= {
        name.replace("layers.0.", "layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.0." in name
    }
    save_file(tensors, with_head / WEIGHTS, metadata={"format": "pt"})
    export(with_head, tmp_path / "out", "W8A8")
    types = QuantDescription.load(tmp_path / "out" / DESCRIPTION).types
    assert types["model.layers.0.mlp.down_proj.weight"] == "W8A8"
    assert types["model.layers.2.mlp.down_proj.weight"] == "W8A8_DYNAMIC"
    assert types["model.layers.2.self_attn.q_a_proj.weight"] == "W8A8_DYNAMIC"
    assert types["model.layers.2.self_attn.kv_b_proj.weight"] == "FLOAT"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_failed_export_leaves_nothing_behind(is_new: bool, source: Path, tmp_path: Path):
    destination = tmp_path / "out"
    if not is_new:
        destination.mkdir()

    def fail(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Exporter(source, destination, "W8A8_DYNAMIC", torch.bfloat16, {}).run(fail)
    assert destination.exists() == (not is_new)
    assert is_new or not any(destination.iterdir())
    export(source, destination, "W8A8_DYNAMIC")
    assert not (destination / PARTIAL_NAME).exists()


def test_a_full_disk_is_refused_before_rounding(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    with pytest.raises(CheckpointError, match=r"out needs 1 MiB at least, .* 0 MiB free"):
        export(source, tmp_path / "out", "W8A8_DYNAMIC")
    assert not (tmp_path / "out").exists()


def test_a_file_refused_by_the_system_ends_in_one_line(source: Path, tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"is not written, and its files are removed.*too large"
        ):
            export(source, tmp_path / "out", "W8A8_DYNAMIC")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out").exists()


def test_a_layer_that_calibration_did_not_reach_is_named(source: Path, tmp_path: Path):
    exporter = Exporter(source, tmp_path, "W8A8", torch.bfloat16, {})
    with pytest.raises(CheckpointError, match=r"never reached model\.layers\.0\.mlp\.down_proj"):
        exporter.run(lambda count: None)


def test_an_incomplete_source_is_refused_before_rounding(source: Path, tmp_path: Path):
    broken = tmp_path / "source"
    shutil.copytree(source, broken)
    tensors = load_file(source / WEIGHTS)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(tensors, broken / WEIGHTS, metadata={"format": "pt"})
    seen: list[int] = []
    exporter = Exporter(broken, tmp_path / "out", "W8A8_DYNAMIC", torch.bfloat16, {})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight: is missing"):
        exporter.run(seen.append)
    assert not seen
