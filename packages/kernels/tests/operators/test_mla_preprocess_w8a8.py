"""The stage before MLA with int8 projections equals its definition bit for bit.

Core's test_mla_fused compares it with torch_npu's calls.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_davinci import operators
from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.operators.mla_stage import IntegerBlock, near
from vllm_davinci_testing.processes import programs

ops = torch.ops.vllm_davinci
THOROUGH = pytest.mark.thorough
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KINDS = pytest.mark.parametrize("is_dynamic", [True, False], ids=["dynamic", "static"])
RANKS = pytest.mark.parametrize("q_lora_rank", [None, 48])


def check_equal(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None:
            assert torch.equal(ours.cpu(), theirs.cpu())


@DTYPES
@KINDS
@RANKS
@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(1, 1), (5, 5), (7, 3), (6, 0)])
def test_it_equals_its_definition(num_tokens, num_decode_tokens, q_lora_rank, is_dynamic, dtype):
    made = (dtype, q_lora_rank, num_tokens, is_dynamic)
    block, host = (IntegerBlock(*made) for _ in range(2))
    found = ops.mla_preprocess_w8a8(*block.arguments(), num_decode_tokens)
    on_host = [a.cpu() if isinstance(a, Tensor) else a for a in host.arguments()]
    defined = operators.mla_preprocess_w8a8(*on_host, num_decode_tokens)
    assert [ours is None for ours in found] == [ours is None for ours in defined]
    if found[0] is not None:  # a float product, which the device may sum in another order
        near(found[0], defined[0])
    check_equal((*found[1:], *block.caches), (*defined[1:], *on_host[17:19]))
    assert all(bool(ours.any()) for ours in found if ours is not None)
    # A single token has slot -1.
    assert all(bool(cache.any()) for cache in block.caches) or num_tokens == 1


@KINDS
def test_a_bias_of_the_query_norm_is_added_before_quantization(is_dynamic: bool) -> None:
    made = (torch.bfloat16, 48, 7, is_dynamic)
    block, other = (IntegerBlock(*made, has_norm_bias=True) for _ in range(2))
    found = ops.mla_preprocess_w8a8(*block.arguments(), 3)
    without = ops.mla_preprocess_w8a8(*IntegerBlock(*made).arguments(), 3)
    assert not torch.equal(found[2], without[2])
    on_host = [a.cpu() if isinstance(a, Tensor) else a for a in other.arguments()]
    check_equal(found[1:], operators.mla_preprocess_w8a8(*on_host, 3)[1:])


TILES = """
from itertools import product
import torch
import torch_npu
import vllm_davinci.kernels
from vllm_davinci_testing.operators.mla_stage import FRACTAL_NZ, IntegerBlock

torch.npu.config.allow_internal_format = True
side = torch.npu.Stream()
for is_dynamic, q_lora_rank, stream in product((True, False), (None, 48), (None, side)):
    made = (torch.bfloat16, q_lora_rank, 7, is_dynamic)
    plain, tiles = IntegerBlock(*made), IntegerBlock(*made)
    for projection in (tiles.a, tiles.b):
        projection.weight = torch_npu.npu_format_cast(projection.weight.contiguous(), FRACTAL_NZ)
        assert torch_npu.get_npu_format(projection.weight) == FRACTAL_NZ
    found, wanted = (
        torch.ops.vllm_davinci.mla_preprocess_w8a8(*block.arguments(), 3, stream)
        for block in (tiles, plain)
    )
    for ours, expected in zip((*found, *tiles.caches), (*wanted, *plain.caches)):
        assert torch.equal(ours.cpu(), expected.cpu()), (made, stream)
print("equal")
"""


@pytest.mark.parametrize("schedule", ["threads", pytest.param("fuzz:1", marks=THOROUGH)])
def test_weights_may_be_in_the_nz_layout(schedule: str) -> None:
    """Uses a chip for which torch_npu converts weights through aclnn."""
    chip = VirtualDeviceConfig(soc="Ascend950PR_9599", races="raise", schedule=schedule)
    assert programs.output_of(TILES, chip)[-1] == "equal"


@KINDS
def test_inputs_may_be_views(is_dynamic: bool) -> None:
    block = IntegerBlock(torch.bfloat16, 48, 6, is_dynamic)
    expected = ops.mla_preprocess_w8a8(*block.arguments(), 2)

    def inside(tensor: Tensor) -> Tensor:
        """Returns a view with the same values: every second column of a larger tensor."""
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]

    viewed = [
        # Integer products do not support views, and caches are written in place.
        inside(a) if isinstance(a, Tensor) and a.dtype != torch.int8 and not 17 <= index < 19 else a
        for index, a in enumerate(block.arguments())
    ]
    check_equal(ops.mla_preprocess_w8a8(*viewed, 2), expected)


@KINDS
@RANKS
@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(5, 5), (7, 3)])
def test_a_side_stream_changes_no_bit(num_tokens, num_decode_tokens, q_lora_rank, is_dynamic):
    """Two integer products have the same sums as one."""
    made = (torch.bfloat16, q_lora_rank, num_tokens, is_dynamic)
    block, other = (IntegerBlock(*made) for _ in range(2))
    alone = ops.mla_preprocess_w8a8(*block.arguments(), num_decode_tokens)
    beside = ops.mla_preprocess_w8a8(
        *other.arguments(), num_decode_tokens, side_stream=torch.npu.Stream()
    )
    check_equal((*alone, *block.caches), (*beside, *other.caches))


@pytest.mark.parametrize("num_decode_tokens", [0, 3, 7])
def test_shapes_under_fake_tensors_equal_those_of_the_device(num_decode_tokens: int) -> None:
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
def test_mismatched_arguments_of_w8a8_are_refused(is_dynamic, changed, error, message, is_fake):
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
