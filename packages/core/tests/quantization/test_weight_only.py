"""Layers with integer weights and 16-bit inputs equal their definition in plain torch."""

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.schemes.weight_only import (
    WeightOnlyExperts,
    WeightOnlyProjection,
)
from vllm_davinci.core.quantization.weight_only import (
    arranged_experts,
    packed_columns,
    refusal,
    unpacked_columns,
)
from vllm_davinci_testing.layers.launch_counter import LaunchCounter
from vllm_davinci_testing.layers.quantized_linear import fill, prepare

IN, OUT = 128, 48
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KINDS = pytest.mark.parametrize("kind", ["W8A16", "W4A16"])
GROUPS = pytest.mark.parametrize("group_size", [0, 32])
SYMMETRY = pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])


pytestmark = pytest.mark.usefixtures("registered")


class Exported:
    """A layer's exported tensors. All products of `inputs` with its weight are exact."""

    def __init__(
        self,
        kind: str,
        group_size: int,
        is_symmetric: bool,
        out: int = OUT,
        columns: int = IN,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        half = 8 if kind == "W4A16" else 128
        groups = columns // group_size if group_size else 1
        self.integers = torch.randint(-half, half, (out, columns), generator=g, dtype=torch.int8)
        # Powers of two, so that products are not rounded and sums do not depend on the order.
        self.scale = 2.0 ** torch.randint(-8, -5, (out, groups), generator=g)
        zeros = torch.randint(-half, half, (out, groups), generator=g).float()
        self.offset = torch.zeros_like(zeros) if is_symmetric else zeros
        is_packed = kind == "W4A16"
        self.tensors = {
            "weight": packed_columns(self.integers) if is_packed else self.integers,
            "weight_scale": self.scale,
            "weight_offset": self.offset,
        }

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Returns [out, in], rounded like the product."""
        wide = self.integers.float().unflatten(1, (self.scale.shape[1], -1))
        values = (wide - self.offset.unsqueeze(2)) * self.scale.to(dtype).float().unsqueeze(2)
        return values.flatten(1).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        sums = x.double() @ self.floats(x.dtype).double().t()
        return (sums if bias is None else sums + bias.double()).float().to(x.dtype)


def inputs(dtype: torch.dtype, rows: int = 7, columns: int = IN) -> Tensor:
    g = torch.Generator().manual_seed(5)
    return (torch.randint(-4, 5, (rows, columns), generator=g) / 4).to(dtype)


def build(
    layer: type[LinearBase], *sizes: int, kinds: dict[str, str], group_size: int = 0,
    prefix: str = "p", **options: object,
) -> LinearBase:  # fmt: skip
    types = {f"{name}.weight": kind for name, kind in kinds.items()}
    description = QuantDescription.parse({**types, "version": "1.0.0", "group_size": group_size})
    with torch.device("npu", 0):
        return layer(  # type: ignore[no-any-return]
            *sizes, quant_config=AscendQuantizationConfig(description), prefix=prefix,
            **{"bias": False, "return_bias": False, **options},
        )  # fmt: skip


def test_packed_columns_keep_their_signs():
    values = torch.randint(-8, 8, (3, 4, 10), dtype=torch.int8)
    assert torch.equal(unpacked_columns(packed_columns(values)), values)


@DTYPES
@KINDS
@GROUPS
@SYMMETRY
def test_layers_equal_their_definition(dtype, kind, group_size, is_symmetric):
    export = Exported(kind, group_size, is_symmetric)
    made = build(
        ReplicatedLinear, IN, OUT, kinds={"p": kind}, group_size=group_size, params_dtype=dtype
    )
    fill(made, export)
    prepare(made)
    x = inputs(dtype)
    assert torch.equal(made(x.npu()).cpu(), export.product(x))
    assert torch.equal(made(x.view(7, 1, IN).npu()).cpu(), export.product(x).view(7, 1, OUT))
    assert {name for name, _ in made.named_parameters()} == {"weight"}


@DTYPES
@KINDS
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
def test_a_float_bias_is_added_before_rounding(dtype, kind, layer):
    export = Exported(kind, 32, is_symmetric=False)
    made = build(layer, IN, OUT, kinds={"p": kind}, group_size=32, params_dtype=dtype, bias=True)
    fill(made, export)
    bias = (torch.arange(OUT) / 8).to(dtype)
    made.bias.data.copy_(bias)
    prepare(made)
    x = inputs(dtype)
    assert torch.equal(made(x.npu()).cpu(), export.product(x, bias))


def test_a_product_is_one_launch():
    export = Exported("W4A16", 32, is_symmetric=False)
    made = build(
        ReplicatedLinear, IN, OUT, kinds={"p": "W4A16"}, group_size=32, bias=True,
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    fill(made, export)
    made.bias.data.zero_()
    prepare(made)
    x = inputs(torch.bfloat16).npu()
    with LaunchCounter() as counter:
        made(x)
    assert counter.names == ["npu::npu_weight_quant_batchmatmul"]


@KINDS
@GROUPS
def test_fused_projections_equal_their_parts(kind: str, group_size: int):
    dtype = torch.bfloat16
    kinds = {f"attn.{name}": kind for name in ("q_proj", "k_proj", "v_proj")}
    made = build(
        QKVParallelLinear, IN, 16, 4, 2, kinds=kinds, prefix="attn.qkv_proj", params_dtype=dtype,
        group_size=group_size,
    )  # fmt: skip
    exports = {
        name: Exported(kind, group_size, False, heads * 16, seed=seed)
        for seed, (name, heads) in enumerate({"q": 4, "k": 2, "v": 2}.items())
    }
    for name, export in exports.items():
        fill(made, export, name)
    prepare(made)
    x = inputs(dtype)
    expected = torch.cat([export.product(x) for export in exports.values()], -1)
    assert torch.equal(made(x.npu()).cpu(), expected)


@KINDS
def test_latent_up_projections_become_the_floats_that_the_integers_stand_for(kind: str):
    dtype = torch.bfloat16
    export = Exported(kind, 32, is_symmetric=False)
    made = build(
        ColumnParallelLinear, IN, OUT, kinds={"attn.kv_b_proj": kind}, prefix="attn.kv_b_proj",
        group_size=32, params_dtype=dtype,
    )  # fmt: skip
    fill(made, export)
    prepare(made)
    assert torch.equal(made.weight.cpu(), export.floats(dtype))


@DTYPES
@pytest.mark.parametrize(("kind", "group_size"), [("W8A16", 0), ("W4A16", 0), ("W4A16", 32)])
def test_experts_equal_their_definition(dtype: torch.dtype, kind: str, group_size: int):
    hidden, inter, num_experts = 64, 32, 5

    def projections(out: int, columns: int) -> tuple[list[Exported], WeightOnlyProjection]:
        exports = [
            Exported(kind, group_size, bool(seed % 2), out, columns, seed)
            for seed in range(num_experts)
        ]
        weight, scale, offset = (
            torch.stack([export.tensors[name] for export in exports]).npu()
            for name in ("weight", "weight_scale", "weight_offset")
        )
        arranged = arranged_experts(weight, scale.to(dtype), offset.to(dtype), int(kind[1]))
        return exports, WeightOnlyProjection(
            **dict(zip(("weight", "scale", "offset"), arranged, strict=True))
        )

    gate_ups, gate_up = projections(2 * inter, hidden)
    downs, down = projections(hidden, inter)
    experts = WeightOnlyExperts(
        gate_up=gate_up, down=down, first=0, num_local=num_experts, num_experts=num_experts
    )
    x = inputs(dtype, 9, hidden)
    g = torch.Generator().manual_seed(1)
    weights, ids = torch.rand(9, num_experts, generator=g).topk(2)
    dispatcher = LocalDispatcher()
    tokens = dispatcher.dispatch(
        SelectedTokens(x.npu(), weights.to(dtype).npu(), ids.int().npu()), experts
    )
    results = experts(tokens.rows, tokens.tokens_per_expert, tokens.scales)
    actual = dispatcher.combine(results, tokens).cpu().float()
    expected = torch.zeros(x.shape)
    for row in range(len(x)):
        for choice in range(2):
            number = int(ids[row, choice])
            gate, up = gate_ups[number].product(x[row : row + 1]).float().chunk(2, -1)
            activated = (torch.nn.functional.silu(gate) * up).to(dtype)
            result = downs[number].product(activated)[0].float()
            expected[row] += result * weights.to(dtype)[row, choice].float()
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert (actual - expected).abs().max() <= 4 * step * expected.abs().max()


@pytest.mark.parametrize(
    ("group_size", "sizes", "told"),
    [
        (16, (IN, OUT), "a scale per 16 entries of a weight"),
        (48, (96, OUT), "a scale per 48 entries of a weight"),
        (64, (96, OUT), "96 inputs on a rank are not a multiple of the group size 64"),
        (32, (64, 12), "4-bit weights of 64 x 12: 12 is not a multiple of 8"),
        (0, (65536, OUT), "the most on a side is 65535"),
    ],
)
def test_weights_that_the_operator_does_not_take_are_refused(group_size, sizes, told):
    assert told in (refusal(4, group_size, *sizes) or "")
    with pytest.raises(UnsupportedFeatureError, match=r"p is W4A16.*Quantize the model again"):
        build(ReplicatedLinear, *sizes, kinds={"p": "W4A16"}, group_size=group_size)


def test_eight_bit_weights_of_experts_in_groups_are_refused():
    told = "a scale per 32 entries of experts' 8-bit weights is not supported"
    assert told in (refusal(8, 32, 64, OUT, is_expert=True) or "")
    assert refusal(8, 64, 64, OUT, is_expert=True) is None
    assert refusal(8, 32, 64, OUT) is None


def test_offsets_that_16_bits_do_not_hold_are_refused():
    export = Exported("W8A16", 0, is_symmetric=True)
    export.tensors["weight_offset"] = torch.full((OUT, 1), 0.5)
    made = build(ReplicatedLinear, IN, OUT, kinds={"p": "W8A16"}, params_dtype=torch.bfloat16)
    fill(made, export)
    with pytest.raises(UnsupportedFeatureError, match=r"p\.weight_offset holds offsets"):
        prepare(made)


def test_a_missing_scale_names_its_tensor():
    export = Exported("W4A16", 0, is_symmetric=True)
    del export.tensors["weight_scale"]
    made = build(ReplicatedLinear, IN, OUT, kinds={"p": "W4A16"}, params_dtype=torch.bfloat16)
    fill(made, export)
    with pytest.raises(CheckpointError, match=r"p is quantized as W4A16.*lacks p\.weight_scale"):
        prepare(made)
