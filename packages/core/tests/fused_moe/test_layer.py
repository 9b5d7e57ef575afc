"""A whole layer built like vLLM's DeepSeek: results, weights, launches."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE

from vllm_davinci.core.errors import CheckpointError, ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.fused_moe.method import NPUUnquantizedFusedMoEMethod
from vllm_davinci.core.fused_moe.piece_plan import plan_pieces
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import W8A8DynamicFusedMoEMethod
from vllm_davinci_testing.layers.launch_counter import LaunchCounter

pytestmark = pytest.mark.usefixtures("registered")

NUM_EXPERTS, TOP_K, HIDDEN_SIZE, INTERMEDIATE_SIZE = 8, 2, 32, 48
SCALING_FACTOR = 2.5
DOWN = "down_proj.weight"


def deepseek_layer(vllm_config: VllmConfig) -> DeepseekV2MoE:
    config = DeepseekV3Config(
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INTERMEDIATE_SIZE,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=SCALING_FACTOR,
    )
    layer = DeepseekV2MoE(
        config,
        vllm_config.parallel_config,
        prefix="model.layers.1.mlp",
        apply_routed_scale_to_output=True,
    ).to("npu")
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values / math.sqrt(parameter.shape[-1]))
    for module in layer.modules():
        method: Any = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    # A dispatch mode does not see inside the operator that vLLM wraps the layer in.
    layer.experts._forward_entry = moe_runner._moe_forward_shared
    return layer


def defined(layer: DeepseekV2MoE, x: torch.Tensor) -> torch.Tensor:
    """Computes the layer's output in plain torch from its own parameters."""
    named = {name: parameter.data.cpu() for name, parameter in layer.named_parameters()}

    def mlp(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (rows @ gate_up.t()).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up @ down.t()

    scores = (x @ named["gate.weight"].t()).sigmoid()
    choice = (scores + named["gate.e_score_correction_bias"]).view(len(x), 4, -1)
    kept = torch.zeros(len(x), 4, dtype=torch.bool)
    kept.scatter_(1, choice.topk(2, -1).values.sum(-1).topk(2, -1).indices, True)
    ids = choice.masked_fill(~kept[..., None], -math.inf).flatten(1).topk(TOP_K, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    total = mlp(x, named["shared_experts.gate_up_proj.weight"], named[f"shared_experts.{DOWN}"])
    for expert in range(NUM_EXPERTS):
        share = (weights * (ids == expert)).sum(-1, keepdim=True) * SCALING_FACTOR
        w13, w2 = (named[f"experts.routed_experts.{name}_weight"][expert] for name in ("w13", "w2"))
        total += share * mlp(x, w13, w2)
    return total


def run(layer: torch.nn.Module, x: torch.Tensor, config: VllmConfig) -> torch.Tensor:
    with torch.inference_mode(), set_forward_context({"requests": None}, config):
        return layer(x.npu())


def measure_memory(layer: torch.nn.Module, x: torch.Tensor, config: VllmConfig) -> None:
    with torch.inference_mode(), set_forward_context(None, config):
        layer(x.npu())


@pytest.mark.parametrize("num_tokens", [1, 19])
def test_a_layer_equals_its_definition(num_tokens: int, vllm_config: VllmConfig):
    layer = deepseek_layer(vllm_config)
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        run(layer, x, vllm_config).cpu(), defined(layer, x), atol=2e-5, rtol=1e-5
    )


def test_weights_loaded_again_are_the_ones_used(vllm_config: VllmConfig):
    layer = deepseek_layer(vllm_config)
    experts = layer.experts.routed_experts
    x = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    run(layer, x, vllm_config)
    weight = torch.ones(HIDDEN_SIZE, INTERMEDIATE_SIZE) / INTERMEDIATE_SIZE
    for expert in range(NUM_EXPERTS):
        experts.weight_loader(experts.w2_weight, weight, "w2_weight", "w2", expert)
    torch.testing.assert_close(
        run(layer, x, vllm_config).cpu(), defined(layer, x), atol=2e-5, rtol=1e-5
    )


def test_chunks_fill_the_free_memory_and_change_no_bit(vllm_config: VllmConfig):
    layer = deepseek_layer(vllm_config)
    x = torch.randn(30000, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    forward = layer.experts.routed_experts.quant_method.moe_forward
    whole = run(layer, x, vllm_config)

    def peak_bytes() -> int:
        torch.npu.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.npu.reset_peak_memory_stats()
        assert torch.equal(run(layer, x, vllm_config), whole)
        return torch.accelerator.max_memory_allocated() - before

    of_whole = peak_bytes()
    with torch.inference_mode():
        for gib, asked, max_tokens in [(0, None, 1024), (-1, None, 1024), (4, 7000, 7000)]:
            assert not plan_pieces(layer, gib << 30, asked, len(x))  # chunks cannot be smaller
            assert forward.pieces.max_tokens == max_tokens
            # Only the experts' rows grow with the chunks, including gate and up.
            rows = TOP_K * 4 * (2 * HIDDEN_SIZE + 3 * INTERMEDIATE_SIZE)
            saved = of_whole - peak_bytes()
            assert saved > 0.5 * (len(x) - max_tokens) * rows
        plan_pieces(layer, 4 << 30, None, len(x))
    assert forward.pieces.count(len(x)) == 1
    # A third of the memory; a token's rows take as much of it as in a step.
    of_third = forward.pieces.max_tokens
    assert (4 << 30) / 3 / of_third == pytest.approx(rows, rel=0.5)
    with torch.inference_mode():
        assert plan_pieces(layer, 4 << 30, None, len(x), parts=12)
    assert forward.pieces.max_tokens == of_third // 4


# Launches: 1 for the router, 3 for the shared experts, 6 from the choice of experts (whose weights
# include the routed scaling factor) to the weighted sum, and 1 to add both results.
LAUNCHES = 11


def test_launches_per_layer_stay_in_the_budget(vllm_config: VllmConfig):
    layer = deepseek_layer(vllm_config)
    for num_tokens in (1, 40):
        x = torch.zeros(num_tokens, HIDDEN_SIZE).npu()
        with (
            torch.inference_mode(),
            set_forward_context({"requests": None}, vllm_config),
            LaunchCounter() as counter,
        ):
            layer(x)
        crossings = {"aten::_to_copy", "aten::item", "aten::_local_scalar_dense", "aten::nonzero"}
        assert not crossings & set(counter.names), "a copy between host and device"
        assert len(counter.names) == LAUNCHES, counter.names


@pytest.fixture
def beside_layer(vllm_config: VllmConfig) -> Callable[[], DeepseekV2MoE]:
    """Makes a second layer whose shared experts run on their own stream."""

    def make() -> DeepseekV2MoE:
        vllm_config.compilation_config.static_forward_context.clear()
        vllm_config.compilation_config.static_all_moe_layers.clear()
        vllm_config.additional_config = {"torchair_graph_config": {"enable_multistream_moe": True}}
        return deepseek_layer(vllm_config)

    return make


@pytest.mark.parametrize("num_tokens", [1, 19])
def test_shared_experts_beside_routed_ones_give_the_same_bits_in_stages(
    num_tokens: int, vllm_config: VllmConfig, beside_layer: Callable[[], DeepseekV2MoE]
):
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    expected = run(deepseek_layer(vllm_config), x, vllm_config).cpu()
    layer = beside_layer()
    measure_memory(layer, x, vllm_config)
    main, streams = torch.accelerator.current_stream(), set()
    with LaunchCounter() as counter:

        def note(name: str) -> None:
            counter.names.append(f"shared {name}")
            streams.add(torch.accelerator.current_stream())

        for name, module in layer.shared_experts.named_children():
            module.register_forward_hook(lambda *_, name=name: note(name))
        assert torch.equal(run(layer, x, vllm_config).cpu(), expected)
    assert len(streams) == 1
    assert main not in streams
    grouped = [place for place, name in enumerate(counter.names) if "grouped_matmul" in name]
    moments = [
        counter.names.index("npu::npu_moe_gating_top_k"),
        counter.names.index("shared gate_up_proj"),
        counter.names.index("npu::npu_moe_init_routing_v2"),
        counter.names.index("shared act_fn"),
        grouped[0],
        grouped[-1],
        counter.names.index("shared down_proj"),
        counter.names.index("npu::npu_moe_finalize_routing"),
    ]
    assert moments == sorted(moments), counter.names


def test_shared_experts_that_are_more_than_their_stages_run_as_a_whole(vllm_config, beside_layer):
    def doubled(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return 2 * output

    x = torch.randn(7, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    plain = deepseek_layer(vllm_config)
    plain.shared_experts.register_forward_hook(doubled)
    expected = run(plain, x, vllm_config).cpu()
    layer = beside_layer()
    layer.shared_experts.register_forward_hook(doubled)
    measure_memory(layer, x, vllm_config)
    assert torch.equal(run(layer, x, vllm_config).cpu(), expected)


def test_a_served_step_does_not_wait_to_compare_shared_experts_with_their_stages(
    vllm_config: VllmConfig, beside_layer: Callable[[], DeepseekV2MoE]
):
    x = torch.randn(7, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    expected = run(deepseek_layer(vllm_config), x, vllm_config).cpu()
    layer = beside_layer()
    with LaunchCounter() as counter:
        result = run(layer, x, vllm_config)
    assert "aten::equal" not in counter.names
    assert torch.equal(result.cpu(), expected)
    with LaunchCounter() as counter:
        measure_memory(layer, x, vllm_config)
    assert "aten::equal" in counter.names


def test_the_layers_method_is_ours_and_asks_for_logits(vllm_config: VllmConfig):
    method = deepseek_layer(vllm_config).experts.routed_experts.quant_method
    assert isinstance(method, NPUUnquantizedFusedMoEMethod)
    assert method.is_monolithic


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation": "gelu"}, r"activation 'gelu' \(.* support 'silu' and .*'relu2_no_mul'\)"),
        ({"has_bias": True}, r"'silu' \(experts with biases support 'swigluoai'\)"),
        ({"apply_router_weight_on_input": True}, "weights on the input of more than one expert"),
    ],
)
def test_experts_that_are_not_computed_are_refused_by_layer_before_weights_load(
    options: dict[str, Any], named: str, vllm_config: VllmConfig
):
    with pytest.raises(UnsupportedFeatureError, match=rf"model\.layers\.7\.mlp.* {named}"):
        FusedMoEFactory(
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=INTERMEDIATE_SIZE,
            prefix="model.layers.7.mlp.experts",
            **options,
        )


def test_a_contradiction_of_options_ends_loading(vllm_config: VllmConfig):
    vllm_config.additional_config = {"expert_tensor_parallel_size": 2}
    with pytest.raises(ConfigurationError, match="is 2 and does not divide the 1 ranks"):
        deepseek_layer(vllm_config)


# Expert layers with weights in the compressed-tensors format.

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
