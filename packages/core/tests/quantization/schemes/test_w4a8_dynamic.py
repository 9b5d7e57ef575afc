"""Experts with 4-bit weights are stored in 4 bits on the device, and equal a plain definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_davinci.core.fused_moe.gated_activation import GatedActivation
from vllm_davinci.core.quantization.scheme import LayerSettings, find_scheme
from vllm_davinci.core.quantization.schemes.w4a8_dynamic import (
    HalvedExperts,
    W4A8DynamicFusedMoEMethod,
    product_takes_halves,
)
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import DynamicExperts
from vllm_davinci.operators.quantization import dynamic_quant, pack_int4

NUM_EXPERTS, HIDDEN = 3, 128
COUNTS = [4, 0, 5]


def packed_rows(integers: Tensor) -> Tensor:
    """Packs [experts, out, in] like ModelSlim: [experts, out / 2, in]."""
    return (integers[:, 0::2] & 15) | (integers[:, 1::2] << 4)


class Layer(torch.nn.Module):
    """A layer with loaded tensors for its method. inner: intermediate size"""

    def __init__(self, inner: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.integers, self.scales = {}, {}
        for group, out, depth in (("w13", 2 * inner, HIDDEN), ("w2", HIDDEN, inner)):
            shape = (NUM_EXPERTS, out, depth)
            self.integers[group] = torch.randint(-8, 8, shape, generator=g, dtype=torch.int8)
            self.scales[group] = torch.rand(NUM_EXPERTS, out, 1, generator=g) * 1e-2 + 1e-3
            packed = packed_rows(self.integers[group]).npu()
            for part, tensor in (("weight", packed), ("weight_scale", self.scales[group].npu())):
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"{group}_{part}", parameter)


def experts_of(layer: Layer, dtype: torch.dtype, **settings: Any) -> Any:
    method = W4A8DynamicFusedMoEMethod.__new__(W4A8DynamicFusedMoEMethod)
    method.scheme = find_scheme("W4A8_DYNAMIC", "p")
    method.settings, method._dtype = LayerSettings(**settings), dtype
    counts = {"num_local": NUM_EXPERTS, "num_experts": NUM_EXPERTS}
    return method._experts(layer, first=0, **counts, activation=GatedActivation())


def product(layer: Layer, group: str, expert: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantizes tokens; multiplies and rounds the halves of their integers separately."""
    integers, scales = dynamic_quant(rows)
    weight = layer.integers[group][expert].long().t()
    scale = layer.scales[group][expert, :, 0]
    high = integers.long() >> 4
    low = integers.long() - 16 * high - 8
    high, low = (((half @ weight).float() * scale).half().float() for half in (high, low))
    of_eights = 8 * weight.sum(0).float() * scale
    return ((16 * high + low + of_eights) * scales[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_of_four_bits_equal_the_definition(dtype: torch.dtype):
    layer = Layer(inner=64)
    experts = experts_of(layer, dtype)
    assert isinstance(experts, HalvedExperts)
    assert experts.gate_up.weight.shape == (NUM_EXPERTS, HIDDEN, 2 * 64 // 8)
    assert torch.equal(
        experts.down.weight.cpu(), pack_int4(layer.integers["w2"].transpose(1, 2).contiguous())
    )
    rows = torch.randn(sum(COUNTS), HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    counts = torch.tensor(COUNTS).npu()
    actual = experts(rows.npu(), counts)
    expected = []
    for number, part in enumerate(rows.split(COUNTS)):
        gate, up = product(layer, "w13", number, part, dtype).float().chunk(2, -1)
        activated = (torch.nn.functional.silu(gate) * up).to(dtype)
        expected.append(product(layer, "w2", number, activated, dtype))
    assert torch.equal(actual.cpu(), torch.cat(expected))


def test_sizes_that_the_product_does_not_take_are_computed_with_eight_bits():
    assert product_takes_halves(HIDDEN, 136, torch.bfloat16)
    layer = Layer(inner=66)  # not a multiple of 8 columns; only chips limit the depth
    experts = experts_of(layer, torch.bfloat16)
    assert isinstance(experts, DynamicExperts)
    for mine, group in ((experts.gate_up, "w13"), (experts.down, "w2")):
        assert torch.equal(mine.cpu(), layer.integers[group].transpose(1, 2))


def test_undefined_weights_are_not_summed():
    experts = experts_of(Layer(inner=64), torch.bfloat16, is_loaded=False)
    assert not experts.down.of_eights.any()
