"""Quantized experts equal an integer definition in plain torch, bit for bit."""

from dataclasses import replace

import pytest
import torch
import torch_npu
from torch import Tensor

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.gated_activation import GatedActivation
from vllm_davinci.core.fused_moe.local_experts import Experts
from vllm_davinci.core.quantization.experts_method import ExpertTensorLoader
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.quantization.schemes.w8a8 import StaticExperts, StaticProjection
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import DynamicExperts
from vllm_davinci.operators.quantization import dynamic_quant, dynamic_quant_in_launch, static_quant
from vllm_davinci_testing.layers.launch_counter import LaunchCounter
from vllm_davinci_testing.processes.forked import output_of

NUM_EXPERTS, HIDDEN, INTER, TOP_K = 6, 64, 32, 2
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Weights:
    """All experts of a layer in a checkpoint's layout: [experts, out, in], and a scale per
    output.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        self.gate_up = torch.randint(
            -128, 128, (NUM_EXPERTS, 2 * INTER, HIDDEN), generator=g, dtype=torch.int8
        )
        self.down = torch.randint(
            -128, 128, (NUM_EXPERTS, HIDDEN, INTER), generator=g, dtype=torch.int8
        )
        self.gate_up_scale = torch.rand(NUM_EXPERTS, 2 * INTER, generator=g).to(dtype) * 1e-3 + 1e-4
        self.down_scale = torch.rand(NUM_EXPERTS, HIDDEN, generator=g).to(dtype) * 1e-3 + 1e-4
        self.dtype = dtype

    def on_device(self, first: int = 0, count: int = NUM_EXPERTS) -> DynamicExperts:
        here = slice(first, first + count)
        down_scale = self.down_scale[here]
        return DynamicExperts(
            gate_up=self.gate_up[here].transpose(1, 2).contiguous().npu(),
            gate_up_scale=self.gate_up_scale[here].float().npu(),
            down=self.down[here].transpose(1, 2).contiguous().npu(),
            down_scale=(down_scale if self.dtype == torch.bfloat16 else down_scale.float()).npu(),
            dtype=self.dtype,
            first=first,
            num_local=count,
            num_experts=NUM_EXPERTS,
        )

    def expert(self, number: int, integers: Tensor, scale: Tensor) -> Tensor:
        """Computes one expert's output for quantized rows."""
        sums = (integers.long() @ self.gate_up[number].long().t()).float()
        values = sums * self.gate_up_scale[number].float() * scale[:, None]
        gate, up = values.chunk(2, -1)
        integers, scale = dynamic_quant_in_launch(torch.nn.functional.silu(gate) * up)
        sums = (integers.long() @ self.down[number].long().t()).float()
        return (sums * self.down_scale[number].float() * scale[:, None]).to(self.dtype)


def tokens(dtype: torch.dtype, count: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(count, HIDDEN, generator=g).to(dtype)
    x[4] = 0
    scores = torch.rand(count, NUM_EXPERTS, generator=g)
    weights, ids = scores.topk(TOP_K)
    return x, weights.to(dtype), ids.int()


def routed(experts: Experts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Runs the stage like a layer without communication."""
    dispatcher = LocalDispatcher()
    tokens = dispatcher.dispatch(SelectedTokens(x, topk_weights, topk_ids), experts)
    results = experts(tokens.rows, tokens.tokens_per_expert, tokens.scales)
    return dispatcher.combine(results, tokens)


@DTYPES
@pytest.mark.parametrize(("first", "count"), [(0, NUM_EXPERTS), (2, 3)])
def test_the_stage_equals_the_integer_definition(dtype: torch.dtype, first: int, count: int):
    weights = Weights(dtype)
    x, topk_weights, ids = tokens(dtype)
    experts = weights.on_device(first, count)
    actual = routed(experts, x.npu(), topk_weights.npu(), ids.npu()).cpu()
    expected = torch.zeros(x.shape)
    for row in range(len(x)):
        integers, scale = dynamic_quant_in_launch(x[row : row + 1])
        for choice in range(TOP_K):
            number = int(ids[row, choice])
            if first <= number < first + count:
                value = weights.expert(number, integers, scale)[0].float()
                expected[row] += value * topk_weights[row, choice].float()
    assert torch.equal(actual, expected.to(dtype))


@DTYPES
def test_rows_that_are_sorted_already_equal_the_definition(dtype: torch.dtype):
    weights = Weights(dtype)
    counts = torch.tensor([3, 0, 5, 1, 2, 4])
    rows = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows[15:] = float("nan")  # rows after the last expert's
    actual = weights.on_device()(rows.npu(), counts.npu()).cpu()
    start = 0
    for number, count in enumerate(counts.tolist()):
        part = rows[start : start + count]
        integers, scale = dynamic_quant(part)
        assert torch.equal(
            actual[start : start + count], weights.expert(number, integers, scale)
        ), number
        start += count


@DTYPES
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_whose_activation_takes_no_integers_round_between_their_products(dtype, limit):
    weights = Weights(dtype)
    experts = weights.on_device()
    scale = experts.gate_up_scale.to(experts.down_scale.dtype)
    experts = replace(experts, product_scale=scale, activation=GatedActivation(limit))
    counts = torch.tensor([3, 0, 5, 1, 2, 4])
    rows = torch.randn(15, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    actual = experts(rows.npu(), counts.npu()).cpu()
    number_of_row = torch.arange(NUM_EXPERTS).repeat_interleave(counts).tolist()
    for row, number in enumerate(number_of_row):
        integers, scale = dynamic_quant(rows[row : row + 1])
        sums = (integers.long() @ weights.gate_up[number].long().t()).float()
        wide = sums * weights.gate_up_scale[number].to(experts.down_scale.dtype).float()
        rounded = (wide * scale[:, None]).to(dtype)
        if limit is not None:
            gate, up = rounded.chunk(2, -1)
            rounded = torch.cat([gate.clamp(max=limit), up.clamp(-limit, limit)], -1)
        activated = torch_npu.npu_swiglu(rounded.npu()).cpu()
        integers, scale = dynamic_quant(activated)
        sums = (integers.long() @ weights.down[number].long().t()).float()
        expected = (sums * weights.down_scale[number].float() * scale[:, None]).to(dtype)
        assert torch.equal(actual[row : row + 1], expected), row


ASKED = """
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import activation_takes_integers
print([activation_takes_integers(4, columns) for columns in (192, 160, 7232, 7296, 28672)])
"""


@pytest.mark.parametrize(
    ("variables", "taken"),
    [
        ({"VNPU_SOC": "Ascend910B3"}, [True, False, True, False, False]),
        ({"VNPU_SOC": "Ascend910_9391", "VNPU_CANN": "9.0"}, [True, False, True, True, False]),
        ({"VNPU_SOC": "reference"}, [True] * 5),
    ],
)
def test_sizes_that_the_activation_takes_are_asked_for(variables, taken):
    assert output_of(ASKED, **variables)[-1] == str(taken)


def test_values_that_are_not_numbers_stay_in_their_token():
    weights = Weights(torch.bfloat16)
    x, topk_weights, ids = tokens(torch.bfloat16)
    experts = weights.on_device()
    sane = routed(experts, x.npu(), topk_weights.npu(), ids.npu()).cpu()
    x[2, 5], x[9] = float("nan"), float("inf")
    disturbed = routed(experts, x.npu(), topk_weights.npu(), ids.npu()).cpu()
    others = [row for row in range(len(x)) if row not in (2, 9)]
    assert torch.equal(disturbed[others], sane[others])
    assert not disturbed[[2, 9]].isfinite().any()


def test_a_nan_scale_affects_only_its_experts_tokens():
    weights = Weights(torch.bfloat16)
    x, topk_weights, ids = tokens(torch.bfloat16)
    sane = routed(weights.on_device(), x.npu(), topk_weights.npu(), ids.npu()).cpu()
    weights.down_scale[3] = float("nan")
    disturbed = routed(weights.on_device(), x.npu(), topk_weights.npu(), ids.npu()).cpu()
    hit = (ids == 3).any(1)
    assert hit.any() and not hit.all()
    assert torch.equal(disturbed[~hit], sane[~hit])
    assert not disturbed[hit].isfinite().any()


# --- input scales from the checkpoint ----------------------------------------------------------


def static_projection(out: int, columns: int, seed: int) -> dict[str, Tensor]:
    """Makes one projection of all experts on the host: weight [experts, out, in], scales, and so
    on.
    """
    g = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randint(-128, 128, (NUM_EXPERTS, out, columns), generator=g).to(torch.int8),
        "input_scale": torch.rand(NUM_EXPERTS, 1, generator=g) * 0.02 + 0.01,
        "input_offset": torch.randint(-20, 20, (NUM_EXPERTS, 1), generator=g).float(),
        "deq_scale": torch.rand(NUM_EXPERTS, out, generator=g) * 2e-5 + 1e-5,
        "quant_bias": torch.randint(-999, 999, (NUM_EXPERTS, out), generator=g).int(),
    }


def static_product(tensors: dict[str, Tensor], number: int, rows: Tensor) -> Tensor:
    of_expert = {name: tensor[number] for name, tensor in tensors.items()}
    integers = static_quant(rows, of_expert["input_scale"], of_expert["input_offset"])
    sums = integers.long() @ of_expert["weight"].long().t() + of_expert["quant_bias"]
    return (sums.float() * of_expert["deq_scale"]).to(rows.dtype)


def static_experts(
    gate_up: dict[str, Tensor], down: dict[str, Tensor], adds_bias: bool = True
) -> StaticExperts:
    def on_device(tensors: dict[str, Tensor], keeps_bias: bool) -> StaticProjection:
        moved = {name: tensor.npu() for name, tensor in tensors.items()}
        moved["weight"] = tensors["weight"].transpose(1, 2).contiguous().npu()
        return StaticProjection(**(moved if keeps_bias else {**moved, "quant_bias": None}))

    return StaticExperts(
        gate_up=on_device(gate_up, True),
        down=on_device(down, adds_bias),
        first=0,
        num_local=NUM_EXPERTS,
        num_experts=NUM_EXPERTS,
    )


def test_launches_per_stage_stay_in_the_budget():
    x, topk_weights, ids = (tensor.npu() for tensor in tokens(torch.bfloat16))
    gate_up, down = static_projection(2 * INTER, HIDDEN, 3), static_projection(HIDDEN, INTER, 4)
    stages: list[tuple[Experts, int]] = [
        # Sort and quantize, product, activation with quantization, product, sum.
        (Weights(torch.bfloat16).on_device(), 5),
        # Five for each row's expert; for each product, eight to quantize, one for the product, four
        # to scale; then activation, sort and sum.
        (static_experts(gate_up, down), 34),
    ]
    for experts, budget in stages:
        with LaunchCounter() as counter:
            routed(experts, x, topk_weights, ids)
        assert len(counter.names) == budget, counter.names


@DTYPES
@pytest.mark.parametrize("adds_bias", [True, False])
def test_experts_with_input_scales_equal_the_integer_definition(dtype, adds_bias):
    gate_up, down = static_projection(2 * INTER, HIDDEN, 1), static_projection(HIDDEN, INTER, 2)
    experts = static_experts(gate_up, down, adds_bias)
    if not adds_bias:
        down["quant_bias"].zero_()
    counts = torch.tensor([3, 0, 5, 1, 2, 4])
    rows = torch.randn(18, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    actual = experts(rows.npu(), counts.npu()).cpu()
    start = 0
    for number, count in enumerate(counts.tolist()):
        part = slice(start, start + count)
        projected = static_product(gate_up, number, rows[part])
        activated = torch_npu.npu_swiglu(projected.npu()).cpu()
        assert torch.equal(actual[part], static_product(down, number, activated)), number
        start += count


def test_rows_of_static_experts_do_not_depend_on_others_that_are_not_numbers():
    experts = static_experts(
        static_projection(2 * INTER, HIDDEN, 1), static_projection(HIDDEN, INTER, 2)
    )
    counts = torch.tensor([3, 0, 5, 1, 2, 4]).npu()
    rows = torch.randn(18, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    sane = experts(rows.npu(), counts).cpu()
    rows[2], rows[4, 7], rows[9] = float("nan"), float("inf"), -float("inf")
    disturbed = experts(rows.npu(), counts).cpu()
    others = [row for row in range(15) if row not in (2, 4, 9)]
    assert torch.equal(disturbed[others], sane[others])


# Tensors of quantized experts that are missing or do not fit are named at load.


def test_gate_and_up_of_one_expert_must_have_one_input_scale():
    loader = loader_of("w13", "input_scale")
    param = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
    for shard, value in (("w1", 0.5), ("w3", 0.25)):
        loader(param, torch.tensor([value]), "w13_input_scale", shard, 1, return_success=True)
    with pytest.raises(
        CheckpointError, match=r"expert 1 is 0\.5 for gate_proj and 0\.25 for up_proj"
    ):
        loader.require_agreement()


# --- loading -----------------------------------------------------------------------------------

INT8 = torch.ones(4, 4, dtype=torch.int8)


def loader_of(group: str, name: str) -> ExpertTensorLoader:
    spec = next(spec for spec in find_scheme("W8A8", "p").parameters if spec.name == name)
    tensor = f"mlp.experts.{group}_{name}"
    return ExpertTensorLoader(load_into_one_place, tensor, spec, torch.bfloat16)


def load_into_one_place(
    param: Tensor, loaded: Tensor, name: str, shard: str, expert: int, return_success: bool
) -> bool:
    """Loads like vLLM: skips experts of other ranks, and requires fitting shapes."""
    if expert >= 2:
        return False
    param[expert].copy_(loaded)
    return True


def test_missing_parts_of_experts_are_counted():
    loader = loader_of("w13", "weight")
    param = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    for expert in range(4):
        for shard in ("w1", "w3"):
            if (expert, shard) != (1, "w3"):
                done = loader(param, INT8, "w13_weight", shard, expert, True)
                assert done == (expert < 2)
    assert loader.missing(2, ("w1", "w3")) == "mlp.experts.w13_weight (1 of 4 parts)"
    loader(param, INT8, "w13_weight", "w3", 1, return_success=True)
    assert loader.missing(2, ("w1", "w3")) is None


def test_an_expert_of_another_shape_is_named():
    loader = loader_of("w2", "weight")
    param = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    with pytest.raises(
        CheckpointError, match=r"mlp\.experts\.w2_weight of expert 1, part w2.*\[9\]"
    ):
        loader(param, torch.ones(9, dtype=torch.int8), "w2_weight", "w2", 1, return_success=True)


@pytest.mark.parametrize("name", ["weight", "quant_bias", "input_scale"])
def test_an_expert_s_tensor_of_another_dtype_is_named(name: str):
    loader = loader_of("w13", name)
    param = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    stored = torch.ones(4, 4, dtype=torch.bfloat16 if name != "input_scale" else torch.int8)
    with pytest.raises(
        CheckpointError,
        match=rf"w13_{name} of expert 0, part w1, holds \w+ in the checkpoint and must hold",
    ):
        loader(param, stored, f"w13_{name}", "w1", 0, return_success=True)
    assert not param.any()
