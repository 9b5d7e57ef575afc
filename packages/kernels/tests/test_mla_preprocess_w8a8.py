"""The stage before MLA with int8 projections: torch_npu's launches, bit for bit."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch_npu
from mla_stage import EPSILON, HEADS, HIDDEN, KV_LORA, NOPE, ROPE, Block, near
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_davinci.kernels import reference

ops = torch.ops.vllm_davinci
FRACTAL_NZ = 29
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KINDS = pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
RANKS = pytest.mark.parametrize("q_lora_rank", [None, 48])


@dataclass
class Projection:
    """An int8 weight with what its product needs; the sums' bias is of static ones."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    @classmethod
    def make(cls, columns: int, rows: int, dtype: torch.dtype, is_dynamic: bool) -> "Projection":
        generator = torch.Generator().manual_seed(columns)
        stored = torch.randint(-128, 128, (columns, rows), generator=generator, dtype=torch.int8)
        weight = stored.npu().t()
        # Sums are about 74 * 74 * sqrt(rows) large; results then about one.
        scale = (torch.rand(columns, generator=generator) + 0.5) / 5500 / rows**0.5
        if is_dynamic:  # rows have scales of about 1 / 40
            return cls(weight, scale.npu() * 40, None)
        bias = torch.randint(-9000, 9000, (columns,), generator=generator, dtype=torch.int32)
        if dtype == torch.float16:
            scale = scale.view(torch.int32).long()
        return cls(weight, scale.npu(), bias.npu())

    def of(self, rows: Tensor, row_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        product: Tensor = torch_npu.npu_quant_matmul(
            rows, self.weight, self.scale,
            pertoken_scale=row_scale, bias=self.bias, output_dtype=dtype,
        )  # fmt: skip
        return product


class IntegerBlock(Block):
    """A block whose projections are int8, and rows that are quantized."""

    def __init__(
        self,
        dtype: torch.dtype,
        q_lora_rank: int | None,
        num_tokens: int,
        is_dynamic: bool,
        has_norm_bias: bool = False,
    ) -> None:
        super().__init__(dtype, q_lora_rank, num_tokens)
        self.dtype = dtype
        columns = (q_lora_rank or 0) + KV_LORA + ROPE
        kind = (dtype, is_dynamic)
        self.a = Projection.make(columns, HIDDEN, *kind)
        self.b = Projection.make(HEADS * (NOPE + ROPE), q_lora_rank or HIDDEN, *kind)
        generator = torch.Generator().manual_seed(num_tokens)
        self.rows = torch.randint(
            -128, 128, (num_tokens, HIDDEN), generator=generator, dtype=torch.int8
        ).npu()
        self.row_scale = None
        if is_dynamic:
            self.row_scale = (torch.rand(num_tokens, generator=generator) + 0.5).npu() / 40
        self.norm_bias = self.input_scale = self.input_offset = None
        if q_lora_rank is not None:
            if has_norm_bias:
                self.norm_bias = torch.randn(q_lora_rank, generator=generator).to(dtype).npu()
            if not is_dynamic:
                self.input_scale = torch.tensor([0.0123]).npu()
                self.input_offset = torch.tensor([-7], dtype=torch.int32).npu()

    def arguments(self) -> list[object]:
        return [
            self.rows,
            self.row_scale,
            self.a.weight,
            self.a.scale,
            self.a.bias,
            self.q_a_norm,
            self.norm_bias,
            self.input_scale,
            self.input_offset,
            self.b.weight,
            self.b.scale,
            self.b.bias,
            self.kv_a_norm,
            self.W_UK,
            self.cos,
            self.sin,
            self.slots,
            *self.caches,
            EPSILON,
            EPSILON,
        ]

    def composed(self, num_decode_tokens: int) -> tuple[Tensor, ...]:
        """The stage as calls of torch_npu."""
        num_tokens = self.rows.shape[0]
        kv = joint = self.a.of(self.rows, self.row_scale, self.dtype)
        queries, query_scale = self.rows, self.row_scale
        if self.q_lora_rank is not None:
            compressed, kv = joint[:, : self.q_lora_rank], joint[:, self.q_lora_rank :]
            normed = torch_npu.npu_rms_norm(compressed, self.q_a_norm, EPSILON)[0]
            if self.norm_bias is not None:
                normed += self.norm_bias
            if self.row_scale is None:
                queries = torch_npu.npu_quantize(
                    normed, self.input_scale, self.input_offset, torch.qint8, -1, True
                )
            else:
                queries, query_scale = torch_npu.npu_dynamic_quant(normed)
        q = self.b.of(queries, query_scale, self.dtype).view(num_tokens, HEADS, NOPE + ROPE)
        _, _, k_pe, kv_c_normed = torch_npu.npu_kv_rmsnorm_rope_cache(
            kv[:, None, None, :], self.kv_a_norm, self.cos, self.sin, self.slots,
            self.caches[1], self.caches[0],
            epsilon=EPSILON, cache_mode="PA_BNSD", is_output_kv=True,
        )  # fmt: skip
        q_pe = torch_npu.npu_interleave_rope(q[..., NOPE:].unsqueeze(2), self.cos, self.sin)
        ql_nope = torch_npu.npu_transpose_batchmatmul(
            q[:num_decode_tokens, :, :NOPE], self.W_UK,
            perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2),
        )  # fmt: skip
        return ql_nope, q_pe.squeeze(2), q, kv_c_normed.flatten(1), k_pe.flatten(1)


def check_equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None:
            assert torch.equal(ours.cpu(), theirs.cpu())


@DTYPES
@KINDS
@RANKS
@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(1, 1), (5, 5), (7, 3), (6, 0)])
def test_it_equals_its_composition_and_its_definition(
    num_tokens: int,
    num_decode_tokens: int,
    q_lora_rank: int | None,
    is_dynamic: bool,
    dtype: torch.dtype,
) -> None:
    made = (dtype, q_lora_rank, num_tokens, is_dynamic)
    block, other, host = (IntegerBlock(*made) for _ in range(3))
    found = ops.mla_preprocess_w8a8(*block.arguments(), num_decode_tokens)
    on_host = [a.cpu() if isinstance(a, Tensor) else a for a in host.arguments()]
    defined = reference.mla_preprocess_w8a8(*on_host, num_decode_tokens)
    assert [ours is None for ours in found] == [ours is None for ours in defined]
    check_equal((*found, *block.caches), (*other.composed(num_decode_tokens), *other.caches))
    if found[0] is not None:  # a float product, which the device may sum in another order
        near(found[0], defined[0])
    check_equal((*found[1:], *block.caches), (*defined[1:], *on_host[17:19]))
    assert all(bool(ours.any()) for ours in found if ours is not None)
    assert all(bool(cache.any()) for cache in block.caches) or num_tokens == 1  # its slot is -1


@KINDS
def test_a_bias_of_the_query_norm_is_added_before_quantization(is_dynamic: bool) -> None:
    made = (torch.bfloat16, 48, 7, is_dynamic)
    block, other = (IntegerBlock(*made, has_norm_bias=True) for _ in range(2))
    found = ops.mla_preprocess_w8a8(*block.arguments(), 3)
    check_equal(found, other.composed(3))
    without = ops.mla_preprocess_w8a8(*IntegerBlock(*made).arguments(), 3)
    assert not torch.equal(found[2], without[2])
    on_host = [a.cpu() if isinstance(a, Tensor) else a for a in other.arguments()]
    check_equal(found[1:], reference.mla_preprocess_w8a8(*on_host, 3)[1:])


def run(program: str, **environment: str) -> str:
    """The output of a program that runs in a process of its own, in this folder."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TILES = """
from itertools import product
import torch
import torch_npu
import vllm_davinci.kernels
from test_mla_preprocess_w8a8 import FRACTAL_NZ, IntegerBlock

torch.npu.config.allow_internal_format = True
side = torch.npu.Stream()
for is_dynamic, q_lora_rank, stream in product((True, False), (None, 48), (None, side)):
    made = (torch.bfloat16, q_lora_rank, 7, is_dynamic)
    plain, tiles = IntegerBlock(*made), IntegerBlock(*made)
    for projection in (tiles.a, tiles.b):
        projection.weight = torch_npu.npu_format_cast(projection.weight.contiguous(), FRACTAL_NZ)
        assert torch_npu.get_npu_format(projection.weight) == FRACTAL_NZ
    results = torch.ops.vllm_davinci.mla_preprocess_w8a8(*tiles.arguments(), 3, stream)
    for ours, expected in zip((*results, *tiles.caches), (*plain.composed(3), *plain.caches)):
        assert torch.equal(ours.cpu(), expected.cpu()), (made, stream)
print("equal")
"""


@pytest.mark.parametrize("schedule", ["threads", "fuzz:1"])
def test_weights_may_lie_in_the_matrix_units_own_order(schedule: str) -> None:
    """On a chip for which torch_npu converts them through aclnn."""
    chip = {"VNPU_SOC": "Ascend950PR_9599", "VNPU_RACES": "raise", "VNPU_SCHEDULE": schedule}
    assert run(TILES, **chip).endswith("equal\n")


@KINDS
def test_inputs_may_be_views(is_dynamic: bool) -> None:
    block = IntegerBlock(torch.bfloat16, 48, 6, is_dynamic)
    expected = ops.mla_preprocess_w8a8(*block.arguments(), 2)

    def inside(tensor: Tensor) -> Tensor:
        """The same values as every second column of something larger."""
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]

    viewed = [
        inside(a) if isinstance(a, Tensor) and not 17 <= index < 19 else a
        for index, a in enumerate(block.arguments())
    ]
    check_equal(ops.mla_preprocess_w8a8(*viewed, 2), expected)


@KINDS
@RANKS
@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(5, 5), (7, 3)])
def test_a_side_stream_changes_no_bit(
    num_tokens: int, num_decode_tokens: int, q_lora_rank: int | None, is_dynamic: bool
) -> None:
    """Two products in place of one have the same sums of integers."""
    made = (torch.bfloat16, q_lora_rank, num_tokens, is_dynamic)
    block, other = (IntegerBlock(*made) for _ in range(2))
    alone = ops.mla_preprocess_w8a8(*block.arguments(), num_decode_tokens)
    beside = ops.mla_preprocess_w8a8(
        *other.arguments(), num_decode_tokens, side_stream=torch.npu.Stream()
    )
    check_equal((*alone, *block.caches), (*beside, *other.caches))


BESIDE = """
import torch
import vllm_davinci.kernels
from test_mla_preprocess_w8a8 import IntegerBlock

side = torch.npu.Stream()
for is_dynamic in (True, False):
    expected = None
    for turn in range(5):
        block = IntegerBlock(torch.bfloat16, 48, 7, is_dynamic)
        results = torch.ops.vllm_davinci.mla_preprocess_w8a8(
            *block.arguments(), 3, side_stream=side
        )
        found = [t.cpu() for t in (*results, *block.caches)]
        expected = expected or found
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
print("equal")
"""


@pytest.mark.parametrize("schedule", ["threads", "fuzz:1", "fuzz:2", "fuzz:3"])
def test_streams_of_the_stage_wait_for_each_other(schedule: str) -> None:
    """No order that the stage's events allow changes a result, and no access is unordered."""
    assert run(BESIDE, VNPU_SCHEDULE=schedule, VNPU_RACES="raise").endswith("equal\n")


@pytest.mark.parametrize("num_decode_tokens", [0, 3, 7])
def test_shapes_under_fake_tensors_are_those_of_the_device(num_decode_tokens: int) -> None:
    block = IntegerBlock(torch.bfloat16, 48, 7, is_dynamic=True)
    expected = ops.mla_preprocess_w8a8(*block.arguments(), num_decode_tokens)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in block.arguments()]
        found = ops.mla_preprocess_w8a8(*fake, num_decode_tokens)
    for ours, real in zip(found, expected, strict=True):
        assert (ours is None) == (real is None)
        if real is not None:
            assert (ours.shape, ours.dtype, ours.device) == (real.shape, real.dtype, real.device)


@pytest.mark.parametrize("is_fake", [False, True], ids=["device", "meta"])
@pytest.mark.parametrize(
    ("is_dynamic", "changed", "error", "message"),
    [
        (True, {0: "float"}, TypeError, r"hidden states of BFloat16: give int8 rows"),
        (True, {1: "shorter"}, ValueError, r"hidden_scale of sizes \[3\]: give one per row, \[4\]"),
        (True, {2: "float"}, TypeError, r"a_weight of BFloat16: give int8"),
        (True, {2: "shorter"}, ValueError, r"a_weight of sizes \[96, 623\].*\[hidden, 624\]"),
        (True, {3: "shorter"}, ValueError, r"a_scale of sizes \[623\].*\[624\]"),
        (False, {3: "bits"}, TypeError, r"a_scale of Long for results of BFloat16: give fp32"),
        (False, {4: "shorter"}, ValueError, r"a_bias of sizes \[623\].*\[624\], or None"),
        (False, {4: "float"}, TypeError, r"a_bias is added to the sums: give int32"),
        (False, {6: "float"}, ValueError, r"q_a_norm_bias of sizes \[1\]"),
        (False, {7: None}, ValueError, r"q_input_scale None, q_input_offset given: give both"),
        (False, {7: None, 8: None}, ValueError, r"give both .* when hidden_scale is None"),
        (True, {7: "float", 8: "float"}, ValueError, r"q_input_scale given.*else neither"),
        (True, {9: "shorter"}, ValueError, r"q_b_weight of sizes \[48, 383\]: give \[48, 384\]"),
        (True, {10: "shorter"}, ValueError, r"q_b_scale of sizes \[383\].*\[384\]"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    is_dynamic: bool,
    changed: dict[int, str | None],
    error: type[Exception],
    message: str,
    is_fake: bool,
) -> None:
    block = IntegerBlock(torch.bfloat16, 48, 4, is_dynamic)
    wrong = block.arguments()
    for index, change in changed.items():
        given = wrong[index]
        if not isinstance(given, Tensor):
            given = torch.ones(1, device="npu")
        wrong[index] = {
            None: None,
            "float": given.bfloat16(),
            "bits": given.long(),
            "shorter": given[..., :-1],
        }[change]
    if is_fake:
        wrong = [a.to("meta") if isinstance(a, Tensor) else a for a in wrong]
    with pytest.raises(error, match=message):
        ops.mla_preprocess_w8a8(*wrong, 4)


def test_an_fp16_model_gives_scales_of_static_products_as_bits() -> None:
    block = IntegerBlock(torch.float16, 48, 4, is_dynamic=False)
    wrong = block.arguments()
    wrong[3] = torch.ones_like(block.a.scale, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"a_scale of Float for results of Half.*bits of fp32"):
        ops.mla_preprocess_w8a8(*wrong, 4)
