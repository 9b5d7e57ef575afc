"""Missing, misshapen or refused tensors of quantized layers are named when loading."""

import pytest
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_davinci.core.checkpoint.load_errors import describe_failure
from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci_testing.layers.quantized_linear import (
    IN,
    OUT,
    Exported,
    build,
    config_of,
    fill,
    prepare,
    single,
)

pytestmark = pytest.mark.usefixtures("registered")


# --- bad checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("W8A8", name) for name in ("weight", "quant_bias", "input_scale", "input_offset")),
        ("W8A8", "deq_scale"),
        *(("W8A8_DYNAMIC", name) for name in ("weight", "weight_scale", "weight_offset")),
    ],
)
def test_a_missing_tensor_is_named_at_load(kind: str, name: str):
    made = single(kind, torch.bfloat16)
    export = Exported.make(kind, OUT, IN, torch.bfloat16)
    del export.tensors[name]
    fill(made, export)
    with pytest.raises(CheckpointError, match=rf"lacks p\.{name}.*check-model"):
        prepare(made)


def test_a_missing_part_of_a_fused_layer_is_named_at_load():
    kinds = {f"attn.{name}": "W8A8_DYNAMIC" for name in ("q_proj", "k_proj", "v_proj")}
    made = build(QKVParallelLinear, IN, 16, 4, 2, kinds=kinds, prefix="attn.qkv_proj")
    fill(made, Exported.make("W8A8_DYNAMIC", 64, IN, torch.float32), "q")
    fill(made, Exported.make("W8A8_DYNAMIC", 32, IN, torch.float32), "v")
    with pytest.raises(CheckpointError, match=r"attn\.qkv_proj\.weight \(part 'k'\)"):
        prepare(made)


@pytest.mark.parametrize("name", ["weight", "quant_bias", "deq_scale", "input_scale"])
@pytest.mark.parametrize("layer", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_a_wrong_shape_is_named_at_load(name: str, layer: type[LinearBase]):
    made = single("W8A8", torch.bfloat16, layer)
    export = Exported.make("W8A8", OUT, IN, torch.bfloat16)
    export.tensors[name] = torch.cat([export[name], export[name]])[: export[name].shape[0] + 1]
    if layer is ColumnParallelLinear and name != "input_scale":
        export.tensors[name] = export[name][:-2]  # a column-parallel layer takes a slice
    with pytest.raises(CheckpointError, match=rf"p\.{name}.*has shape .*config\.json"):
        fill(made, export)


@pytest.mark.parametrize(
    ("kind", "name", "stored", "allowed"),
    [
        ("W8A8", "weight", torch.bfloat16, "int8"),
        ("W8A8", "weight", torch.uint8, "int8"),
        ("W8A8_DYNAMIC", "weight_scale", torch.int8, "a floating dtype"),
        ("W8A8", "input_scale", torch.int8, "a floating dtype"),
        ("W8A8", "input_offset", torch.int64, "int8 or int32 or float16 or bfloat16 or float32"),
        ("W8A8", "deq_scale", torch.bfloat16, "float32 or int64"),
        ("W8A8", "quant_bias", torch.float32, "int32"),
    ],
)
def test_a_wrong_dtype_is_named_at_load(kind: str, name: str, stored: torch.dtype, allowed: str):
    made = single(kind, torch.bfloat16)
    export = Exported.make(kind, OUT, IN, torch.bfloat16)
    export.tensors[name] = export[name].to(stored)
    seen = str(stored).removeprefix("torch.")
    with pytest.raises(
        CheckpointError, match=rf"p\.{name} holds {seen} .* must hold {allowed}: .*check-model"
    ):
        fill(made, export)


def test_input_scales_that_differ_between_parts_are_an_error():
    kinds = {"mlp.gate_proj": "W8A8", "mlp.up_proj": "W8A8"}
    made = build(MergedColumnParallelLinear, IN, [32, 32], kinds=kinds, prefix="mlp.gate_up_proj")
    export = Exported.make("W8A8", 32, IN, torch.float32)
    fill(made, export, 0)
    export.tensors["input_scale"] = export["input_scale"] * 2
    fill(made, export, 1)
    with pytest.raises(CheckpointError, match="input_scale differs between its parts"):
        prepare(made)


@pytest.mark.parametrize(
    ("types", "told"), [({"a.p.weight": "FLOAT"}, "is FLOAT"), ({}, "has no entry")]
)
def test_a_tensor_without_a_place_is_named_with_its_layers_entry(types: dict[str, str], told: str):
    error = KeyError("p.weight_scale")
    text = describe_failure("hub/model", QuantDescription.parse(types), error)
    assert text is not None
    assert f"has p.weight_scale, which the model does not have: p.weight {told}" in text
    assert describe_failure("hub/model", QuantDescription.parse(types), ValueError("other")) is None


def test_asymmetric_weights_are_refused():
    made = single("W8A8_DYNAMIC", torch.bfloat16)
    export = Exported.make("W8A8_DYNAMIC", OUT, IN, torch.bfloat16)
    export.tensors["weight_offset"][3] = 4
    fill(made, export)
    with pytest.raises(UnsupportedFeatureError, match=r"p\.weight_offset is not zero"):
        prepare(made)


def test_a_quantized_lm_head_is_refused():
    with pytest.raises(UnsupportedFeatureError, match=r"lm_head\.weight.*FLOAT"):
        ParallelLMHead(64, 32, quant_config=config_of({"lm_head": "W8A8"}), prefix="lm_head")
