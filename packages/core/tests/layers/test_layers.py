"""Each replaced layer computes the result of vLLM's own definition."""

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_davinci.core.layers.embedding import NPUVocabParallelEmbedding
from vllm_davinci.core.layers.linear import NPUReplicatedLinear
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.rotary import NPURotaryEmbedding
from vllm_davinci.core.out_of_tree import LAYERS, register
from vllm_davinci_testing.processes.forked import output_of


@pytest.fixture(autouse=True)
def registered(vllm_config: VllmConfig) -> None:
    register()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # 16-bit results may be rounded differently; fp32 differs in the order of a sum.
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    return {"atol": bound, "rtol": bound}


def test_registering_twice_changes_nothing():
    before = dict(op_registry_oot)
    register()
    assert dict(op_registry_oot) == before
    assert set(LAYERS) <= set(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_its_definition(dtype, with_residual, device):
    norm = RMSNorm(96, eps=1e-5, dtype=dtype).to(device)
    assert isinstance(norm, NPURMSNorm)
    torch.nn.init.normal_(norm.weight.data)
    x, residual = torch.randn(2, 5, 96).to(dtype)
    total = (x.float() + residual.float()).to(dtype) if with_residual else x
    scale = total.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    expected = (total.float() * scale).to(dtype) * norm.weight.data.cpu()
    if with_residual:
        actual, kept = norm(x.to(device), residual.to(device))
        torch.testing.assert_close(kept.cpu(), total)
    else:
        actual = norm(x.to(device))
    torch.testing.assert_close(actual.cpu(), expected, **tolerance(dtype))


def test_a_norm_without_a_weight_is_one_launch_and_keeps_its_state(device: torch.device):
    norm = RMSNorm(64, has_weight=False, dtype=torch.bfloat16).to(device)
    assert not norm.state_dict() and "weight" in dict(norm.named_buffers())
    x = torch.randn(3, 2, 64)
    expected = x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    for dtype in (torch.float32, torch.bfloat16):  # the definition is in fp32
        actual = norm(x.to(dtype).to(device))
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.cpu().float(), expected, **tolerance(torch.bfloat16))


def test_a_norm_over_part_of_the_row_falls_back_to_the_definition(device: torch.device):
    norm = RMSNorm(64, var_hidden_size=32).to(device)
    x = torch.randn(3, 64)
    scale = x[:, :32].pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    torch.testing.assert_close(norm(x.to(device)).cpu(), x * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_and_mul_equals_its_definition(dtype: torch.dtype, device: torch.device):
    x = torch.randn(7, 48).to(dtype)
    gate, up = x.float().chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    actual = SiluAndMul()(x.to(device)).cpu()
    torch.testing.assert_close(actual, expected, **tolerance(dtype))


SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(
    ("head_size", "share"), [(64, 1.0), (80, 1.0), (128, 1.0), (64, 0.5), (48, 0.5)]
)
def test_rotary_embedding_equals_its_definition(scaling, is_neox_style, head_size, share, device):
    parameters = {"rope_theta": 10000.0, "partial_rotary_factor": share}
    parameters |= SCALINGS[scaling] or {"rope_type": "default"}
    rope = get_rope(
        head_size, 256, is_neox_style=is_neox_style, rope_parameters=parameters, dtype=torch.float32
    )
    assert isinstance(rope, NPURotaryEmbedding)
    positions = torch.tensor([0, 1, 17, 200, 3])
    query, key = torch.randn(5, 4 * head_size), torch.randn(5, 2 * head_size)
    expected = rope.forward_static(
        positions,
        query.clone(),
        key.clone(),
        rope.head_size,
        rope.rotary_dim,
        rope.cos_sin_cache.cpu(),
        rope.is_neox_style,
    )
    packed = torch.cat([query, key], -1).to(device)  # strided views, like a projection's output
    actual = rope.to(device)(
        positions.to(device), packed[:, : 4 * head_size], packed[:, 4 * head_size :]
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-6, rtol=1e-6)


PARTLY_ROTATED = """
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm_davinci.core.out_of_tree import register

register()
with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="npu"))):
    rope = get_rope(
        80, 256, dtype=torch.bfloat16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
    )
assert rope.rotary_dim == 32
query, key = torch.randn(5, 320).bfloat16(), torch.randn(5, 160).bfloat16()
positions = torch.tensor([0, 1, 17, 200, 3])
expected = rope.forward_native(positions, query.clone(), key.clone())
found = rope.to("npu")(positions.npu(), query.npu(), key.npu())
print([torch.allclose(a.cpu(), b, atol=0.05) for a, b in zip(found, expected)])
"""


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9391"])
def test_heads_of_sizes_that_the_operator_lacks_are_rotated(soc: str):
    """Rotates 32 of 80 entries, because the number of rotated entries alone would also pass."""
    assert output_of(PARTLY_ROTATED, VNPU_SOC=soc)[-1] == "[True, True]"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48)])
def test_linear_equals_its_definition(bias, shape, one_rank, device):
    layer = ReplicatedLinear(48, 32, bias=bias, return_bias=False).to(device)
    assert isinstance(layer, NPUReplicatedLinear)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter.data)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(shape)
    expected = torch.nn.functional.linear(
        x, layer.weight.data.cpu(), layer.bias.data.cpu() if bias else None
    )
    torch.testing.assert_close(layer(x.to(device)).cpu(), expected, atol=1e-5, rtol=1e-5)


def test_weights_written_after_preparation_are_the_ones_used(one_rank: None, device: torch.device):
    layer = ReplicatedLinear(8, 8, bias=False, return_bias=False).to(device)
    layer.weight.data.zero_()
    layer.quant_method.process_weights_after_loading(layer)
    layer.weight.data.copy_(torch.eye(8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x.to(device)).cpu(), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_embedding_looks_up_rows(dtype: torch.dtype, one_rank: None, device: torch.device):
    layer = VocabParallelEmbedding(100, 16).to(device)
    assert isinstance(layer, NPUVocabParallelEmbedding)
    torch.nn.init.normal_(layer.weight.data)
    tokens = torch.tensor([0, 99, 5, 5], dtype=dtype)
    assert torch.equal(layer(tokens.to(device)).cpu(), layer.weight.data.cpu()[tokens.long()])
