"""After loading, it is decided once which layers return integer activations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.linear import LinearBase

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.layers.quantized_activation import QuantizedActivation
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan, step_sizes
from vllm_davinci.operators.quantization import dynamic_quant, dynamic_quant_in_launch
from vllm_davinci_testing.layers.quantized_linear import DTYPES, Exported, inputs
from vllm_davinci_testing.layers.resolved_outputs import in_order, mlp, resolve

pytestmark = pytest.mark.usefixtures("registered")


def resolved_mlp(dtype: torch.dtype) -> tuple[LinearBase, LinearBase, list[Exported]]:
    gate_up, down_proj, exports = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", dtype)
    layers = [gate_up, SiluAndMul(), down_proj]
    resolve(lambda: in_order(layers, inputs(dtype).npu()), *layers)
    return gate_up, down_proj, exports


@DTYPES
def test_a_dynamic_mlp_keeps_integers_and_equals_its_definition(dtype: torch.dtype):
    gate_up, down_proj, exports = resolved_mlp(dtype)
    x = inputs(dtype)
    projected = gate_up(x.npu())
    assert isinstance(projected, QuantizedActivation) and projected.integers.dtype == torch.int32
    activated = SiluAndMul()(projected)
    assert isinstance(activated, QuantizedActivation) and activated.integers.dtype == torch.int8
    assert activated.shape == (len(x), 96) and activated.dtype == dtype
    actual = down_proj(activated).cpu()

    integers, scale = dynamic_quant(x)
    gate, up = (export.scaled(integers, scale) for export in exports[:2])
    gated = torch.nn.functional.silu(gate) * up
    again, scale = dynamic_quant_in_launch(gated)
    assert torch.equal(activated.integers.cpu(), again)
    expected = exports[2].scaled(again, scale).to(dtype)
    assert torch.equal(actual, expected)


def test_other_operators_that_read_or_write_integers_are_refused():
    gate_up, _, _ = resolved_mlp(torch.bfloat16)
    x = inputs(torch.bfloat16).npu()
    projected = gate_up(x)
    values = torch.zeros(projected.shape, dtype=projected.dtype, device=projected.device)
    for use in (
        lambda: projected + 0,
        lambda: projected[:2],
        lambda: projected.mul_(2),
        lambda: values.mul_(projected),
        lambda: torch.add(values, 1, out=projected),
        lambda: torch._foreach_add_([projected], 1),
        lambda: SiluAndMul()(projected) + 0,
    ):
        with pytest.raises(
            UnsupportedFeatureError, match="an activation that is stored as integers"
        ):
            use()
    assert not values.any()


@pytest.mark.parametrize(
    "use",
    [
        lambda projected: GeluAndMul()(projected),
        lambda projected: projected[:, :96] + 0,
        lambda projected: projected.mul_(2),
        lambda projected: (SiluAndMul()(projected), projected + 0),
        lambda projected: SiluAndMul()(projected) + 0,
        lambda projected: SiluAndMul()(projected),
        lambda projected: projected,
    ],
    ids=["gelu", "slice", "write", "also_read", "activated_read", "activated_unread", "unread"],
)
def test_a_projection_that_anything_else_reads_returns_floats(use: Callable[[Tensor], object]):
    dtype = torch.bfloat16
    gate_up, _, exports = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", dtype)
    x = inputs(dtype)
    plain = torch.cat([export.dynamic(x) for export in exports[:2]], -1)
    resolve(lambda: use(gate_up(x.npu())), gate_up)
    again = gate_up(x.npu())
    assert type(again) is torch.Tensor
    assert torch.equal(again.cpu(), plain)


def test_operators_compute_the_same_in_the_dummy_run():
    gate_up, down_proj, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)
    x = inputs(torch.bfloat16).npu()
    layers = [gate_up, SiluAndMul(), down_proj]
    expected, seen = in_order(layers, x), []
    resolve(lambda: seen.append(in_order(layers, x)), *layers)
    assert torch.equal(seen[0], expected)


def test_a_dummy_run_that_fails_leaves_floats():
    gate_up, _, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)

    def run() -> None:
        SiluAndMul()(gate_up(inputs(torch.bfloat16).npu()))
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        resolve(run, gate_up)
    assert type(gate_up(inputs(torch.bfloat16).npu())) is torch.Tensor


def test_an_output_read_differently_by_some_steps_is_float_in_all(caplog: pytest.LogCaptureFixture):
    gate_up, down_proj, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)
    x = inputs(torch.bfloat16).npu()
    layers = [gate_up, SiluAndMul(), down_proj]
    plan = OutputPlan(torch.nn.ModuleList(layers))
    assert not plan.resolve([lambda: in_order(layers, x)] * 2)
    plan.check([lambda: in_order(layers, x)])
    assert isinstance(gate_up(x), QuantizedActivation) and not caplog.records
    with caplog.at_level("WARNING"):
        plan.check([lambda: gate_up(x).new_empty(3), lambda: in_order(layers, x)])
    assert "read as floats what other steps read as integers: 0." in caplog.text
    assert type(gate_up(x)) is torch.Tensor
    plan.check([lambda: in_order(layers, x)])
    assert type(gate_up(x)) is torch.Tensor


@pytest.mark.parametrize(
    ("tensor", "data", "most", "sizes"),
    [
        (1, 1, 8192, [1, 2]),
        (2, 1, 8192, [1, 3, 256, 257]),  # sequence parallel
        (2, 2, 8192, [1, 3, 17, 256, 257]),
        (2, 2, 64, [1, 3, 17, 64]),
    ],
)
def test_dummy_runs_have_the_sizes_of_all_kinds_of_steps(vllm_config, tensor, data, most, sizes):
    vllm_config.parallel_config.tensor_parallel_size = tensor
    vllm_config.parallel_config.data_parallel_size = data
    vllm_config.scheduler_config.max_num_batched_tokens = most
    vllm_config.scheduler_config.max_num_seqs = 16
    vllm_config.additional_config = {"sequence_parallel": {"enabled": True}}
    assert step_sizes(vllm_config) == sizes


@pytest.mark.parametrize(("gate", "down"), [("W8A8", "W8A8_DYNAMIC"), ("W8A8_DYNAMIC", "W8A8")])
def test_an_mlp_of_several_types_rounds_between_its_layers(gate: str, down: str):
    dtype = torch.bfloat16
    gate_up, down_proj, exports = mlp(gate, down, dtype)
    x = inputs(dtype)
    run: Callable[[Exported, Tensor], Tensor] = (
        Exported.static if gate == "W8A8" else Exported.dynamic
    )
    layers = [gate_up, SiluAndMul(), down_proj]
    resolve(lambda: in_order(layers, x.npu()), *layers)
    projected = gate_up(x.npu())
    assert torch.equal(projected.cpu(), torch.cat([run(e, x) for e in exports[:2]], -1))
    activated = SiluAndMul()(projected)
    last = Exported.static if down == "W8A8" else Exported.dynamic
    assert torch.equal(down_proj(activated).cpu(), last(exports[2], activated.cpu()))
