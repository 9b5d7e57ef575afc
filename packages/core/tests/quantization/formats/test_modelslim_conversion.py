"""Types and generations of ModelSlim's exports are converted to the tensors that layers load."""

import pytest
import torch
from torch import Tensor

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.scheme import computing_scheme
from vllm_davinci.core.quantization.weight_only import (
    packed_columns,
    unpacked_columns,
    unpacked_rows,
)


def pack_rows(values: Tensor) -> Tensor:
    """Packs [out, in] from -8 to 7 like ModelSlim: [out / 2, in]."""
    low, high = values[0::2].to(torch.int8) & 15, values[1::2].to(torch.int8) << 4
    return low | high


def loaded(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    types = dict.fromkeys(tensors, kind)
    return dict(QuantDescription.parse(types).converted(tensors.items(), torch.bfloat16))


def test_integers_of_four_bits_are_unpacked_with_their_signs():
    values = torch.randint(-8, 8, (6, 5))
    assert torch.equal(unpacked_rows(pack_rows(values)), values.to(torch.int8))


def test_a_layer_of_four_bits_loads_as_one_of_eight():
    values, scale = torch.randint(-8, 8, (4, 6)), torch.rand(4, 1) + 0.1
    made = loaded(
        {
            "p.weight": pack_rows(values),
            "p.weight_scale": scale,
            "p.weight_offset": torch.zeros(4, 1),
            "p.scale_bias": torch.ones(4, 1),
        },
        "W4A8_DYNAMIC",
    )
    assert computing_scheme("W4A8_DYNAMIC", "p.weight").name == "W8A8_DYNAMIC"
    assert made.keys() == {"p.weight", "p.weight_scale", "p.weight_offset"}
    assert torch.equal(made["p.weight"], values.to(torch.int8))


def test_routed_experts_of_four_bits_stay_as_they_are_stored():
    prefix = "model.layers.3.mlp.experts.0.up_proj"
    tensors = {
        f"{prefix}.weight": pack_rows(torch.randint(-8, 8, (4, 6))),
        f"{prefix}.weight_scale": torch.rand(4, 1) + 0.1,
        f"{prefix}.weight_offset": torch.zeros(4, 1),
        f"{prefix}.scale_bias": torch.ones(4, 1),
    }
    description = QuantDescription.parse(dict.fromkeys(tensors, "W4A8_DYNAMIC"))
    scheme = description.of_experts("model.layers.3.mlp.experts")
    assert scheme is not None
    assert scheme.name == "W4A8_DYNAMIC"
    assert description.loads_as(prefix) == "W4A8_DYNAMIC"
    assert description.loads_as("model.layers.3.mlp.up_proj") == "FLOAT"
    made = dict(description.converted(tensors.items(), torch.bfloat16))
    assert made.keys() == tensors.keys() - {f"{prefix}.scale_bias"}
    assert made[f"{prefix}.weight"] is tensors[f"{prefix}.weight"]


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({}, lambda values: values.to(torch.int8)),
        ({"version": "1.0.0"}, lambda values: packed_columns(values.to(torch.int8))),
        ({"version": "1.0.0", "group_size": 2}, pack_rows),
    ],
    ids=["one in a byte", "two columns", "two rows"],
)
def test_weights_of_four_bits_load_from_every_layout(options, stored):
    values = torch.randint(-8, 8, (4, 6))
    tensors = {"p.weight": stored(values), "p.weight_scale": torch.ones(4)}
    types = dict.fromkeys(tensors, "W4A16")
    made = dict(
        QuantDescription.parse({**types, **options}).converted(tensors.items(), torch.bfloat16)
    )
    assert torch.equal(unpacked_columns(made["p.weight"]), values.to(torch.int8))
    assert made["p.weight_scale"].shape == (4, 1)


STATIC = {
    "p.weight": torch.ones(4, 6, dtype=torch.int8),
    "p.quant_bias": torch.zeros(4, dtype=torch.int32),
    "p.input_scale": torch.ones(1),
    "p.input_offset": torch.zeros(1),
    "p.deq_scale": torch.ones(4),
}
PER_CHANNEL = {"p.weight_scale": torch.ones(4, 1), "p.weight_offset": torch.zeros(4, 1)}


@pytest.mark.parametrize(
    ("kind", "kept"), [("W8A8", STATIC.keys()), ("W8A8_MIX", {"p.weight", *PER_CHANNEL})]
)
def test_layers_load_only_the_tensors_that_they_compute_with(kind: str, kept: set[str]):
    assert loaded({**STATIC, **PER_CHANNEL}, kind).keys() == set(kept)


def test_an_asymmetric_weight_of_an_older_static_layer_is_refused():
    offset = torch.zeros(4, 1)
    offset[2] = 3
    with pytest.raises(UnsupportedFeatureError, match=r"p\.weight_offset is not zero"):
        loaded({**STATIC, **PER_CHANNEL, "p.weight_offset": offset}, "W8A8")


def test_a_duplicated_norm_loads_once():
    tensors = {
        "a.norm.weight": torch.zeros(3),
        "a.norm.bias": torch.zeros(3),
        "a.norm.module.weight": torch.ones(3),
        "a.norm.module.bias": torch.ones(3),
        "b.norm.weight": torch.full((3,), 2.0),
    }
    made = loaded(tensors, "FLOAT")
    assert {name: float(value[0]) for name, value in made.items()} == {
        "a.norm.weight": 1,
        "a.norm.bias": 1,
        "b.norm.weight": 2,
    }
    assert QuantDescription.parse({"a.norm.module.bias": "W8A8"}).has_norm_biases
