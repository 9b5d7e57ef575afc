"""Expert layers with weights in the compressed-tensors format."""

from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.quantization import get_quantization_config

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import W8A8DynamicFusedMoEMethod

pytestmark = pytest.mark.usefixtures("registered")

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE = 8, 2, 32, 48


def compressed_layer(strategy: str, dynamic: bool) -> Any:
    """Makes a layer of compressed-tensors experts with int8 weights and activations."""
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": strategy, "dynamic": dynamic},
    }
    quant_config = get_quantization_config("compressed-tensors").from_config(
        {"format": "int-quantized", "ignore": [], "config_groups": {"group_0": group}}
    )
    return FusedMoEFactory(
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        prefix="model.layers.7.mlp.experts",
        quant_config=quant_config,
    ).routed_experts


def test_int8_experts_of_compressed_tensors_equal_those_of_modelslim(vllm_config: VllmConfig):
    layer = compressed_layer("token", dynamic=True)
    assert isinstance(layer.quant_method, W8A8DynamicFusedMoEMethod)
    assert {name for name, _ in layer.named_parameters()} == {
        "w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks .*experts\.w13_weight"):
        layer.quant_method.process_weights_after_loading(layer)


def test_static_experts_of_compressed_tensors_are_refused_with_a_way_out(vllm_config: VllmConfig):
    with pytest.raises(
        UnsupportedFeatureError,
        match=r"mlp\.experts: .*static or asymmetric.*vllm-davinci quantize",
    ):
        compressed_layer("tensor", dynamic=False)
