"""Checkpoints that round-to-nearest writes: close to their source, whole, and loadable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.calibration import input_ranges
from vllm_davinci.core.quantization.description import FILE_NAME, QuantDescription, QuantType
from vllm_davinci.core.quantization.examination import examine
from vllm_davinci.core.quantization.export import Exported, Exporter, model_dtype
from vllm_davinci.core.quantization.rounding import InputRange, dynamic_tensors, static_tensors
from vllm_davinci.core.quantization.tensors import float_from_bits

# DeepSeek's shapes at their smallest: a dense layer, then one of experts; latent attention.
DEEPSEEK = transformers.DeepseekV3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    max_position_embeddings=64,
)
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
    source: Path, destination: Path, kind: QuantType, dtype: torch.dtype = torch.bfloat16
) -> Exported:
    ranges = {}
    if kind is QuantType.W8A8:
        ranges = input_ranges(source, WINDOWS, lambda count: None)
    return Exporter(source, destination, kind, dtype, ranges).run(lambda count: None)


def test_a_rounded_weight_is_within_half_a_step():
    weight = torch.randn(20, 32)
    weight[3] = 0
    tensors = dynamic_tensors(weight, torch.bfloat16)
    scale = tensors["weight_scale"].float()
    back = tensors["weight"].float() * scale
    # A scale of 8 bits may be too small for the largest value by half its own step.
    assert ((back - weight).abs() <= scale * 0.501 + weight.abs() * 2**-8).all()
    assert not tensors["weight_offset"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_static_tensors_reproduce_the_product_and_its_bias(dtype: torch.dtype):
    weight, bias, x = torch.randn(24, 48), torch.randn(24), torch.rand(7, 48) * 5 - 1
    tensors = static_tensors(weight, bias, InputRange(x.min().item(), x.max().item()), dtype)
    scale, offset = tensors["input_scale"].float(), tensors["input_offset"].float()
    integers = (x / scale + offset).round().clamp(-128, 127)
    deq_scale = tensors["deq_scale"]
    assert deq_scale.dtype == (torch.int64 if dtype == torch.float16 else torch.float32)
    if dtype == torch.float16:
        deq_scale = float_from_bits(deq_scale)
    sums = integers.double() @ tensors["weight"].double().t() + tensors["quant_bias"]
    expected = x @ weight.t() + bias
    error = (sums * deq_scale - expected).abs()
    assert error.max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("kind", [QuantType.W8A8_DYNAMIC, QuantType.W8A8])
def test_projections_and_experts_are_quantized_and_the_rest_is_not(
    kind: QuantType, source: Path, tmp_path: Path
):
    written = export(source, tmp_path, kind)
    assert examine(tmp_path).can_load
    types = QuantDescription.load(tmp_path / FILE_NAME).types
    assert types["model.layers.0.self_attn.q_a_proj.weight"] == kind.value
    assert types["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == kind.value
    assert types["model.layers.1.mlp.shared_experts.up_proj.weight"] == kind.value
    assert types["model.layers.1.mlp.experts.3.down_proj.weight"] == "W8A8_DYNAMIC"
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.input_layernorm.weight",
    ):
        assert types[name] == "FLOAT"
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(types)
    assert written.num_bytes < written.source_bytes
    assert (tmp_path / "tokenizer_config.json").is_file()


def test_progress_counts_every_byte_of_the_source(source: Path, tmp_path: Path):
    seen: list[int] = []
    Exporter(source, tmp_path, QuantType.W8A8_DYNAMIC, torch.bfloat16, {}).run(seen.append)
    stored = load_file(source / "model.safetensors")
    assert sum(seen) == sum(tensor.nbytes for tensor in stored.values())


def test_the_models_dtype_is_the_asked_one(source: Path, tmp_path: Path):
    export(source, tmp_path, QuantType.W8A8_DYNAMIC, torch.float16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.float16
    assert model_dtype({"dtype": "float32"}, None) == torch.bfloat16
    assert model_dtype({"torch_dtype": "float16"}, None) == torch.float16
    assert model_dtype({"torch_dtype": "float16"}, "bfloat16") == torch.bfloat16


def test_parts_of_one_product_get_one_input_scale(source: Path, tmp_path: Path):
    export(source, tmp_path, QuantType.W8A8)
    stored = load_file(tmp_path / "model.safetensors")
    for layer, first, second in (
        ("model.layers.0.self_attn", "q_a_proj", "kv_a_proj_with_mqa"),
        ("model.layers.0.mlp", "gate_proj", "up_proj"),
    ):
        for name in ("input_scale", "input_offset"):
            assert torch.equal(
                stored[f"{layer}.{first}.{name}"], stored[f"{layer}.{second}.{name}"]
            )


def test_a_quantized_source_is_refused(source: Path, tmp_path: Path):
    export(source, tmp_path / "once", QuantType.W8A8_DYNAMIC)
    with pytest.raises(CheckpointError, match="is quantized already"):
        export(tmp_path / "once", tmp_path / "twice", QuantType.W8A8_DYNAMIC)


def test_experts_in_one_tensor_are_refused(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    experts = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 4)}
    save_file(experts, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="all experts in one tensor"):
        export(source, tmp_path / "out", QuantType.W8A8_DYNAMIC)


def test_a_layer_that_calibration_did_not_reach_is_named(source: Path, tmp_path: Path):
    exporter = Exporter(source, tmp_path, QuantType.W8A8, torch.bfloat16, {})
    with pytest.raises(CheckpointError, match=r"never reached model\.layers\.0\.mlp\.down_proj"):
        exporter.run(lambda count: None)
