"""Residual streams of each family equal transformers' modules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4
from transformers.models.glm5_next import modeling_glm5_next as glm5_next
from transformers.models.hy_v4 import modeling_hy_v4 as hy_v4
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from vllm_davinci.core.layers.residual_streams import (
    StreamConnection,
    StreamHead,
    StreamMixing,
    StreamRule,
    connection,
    head,
)

# 8-bit mantissas are summed and rounded once; transformers also rounds weights and products.
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 6e-2, "rtol": 3e-2},
}
# model_type -> transformers' connection and head
MODULES = {
    "deepseek_v4": (deepseek_v4.DeepseekV4HyperConnection, deepseek_v4.DeepseekV4HyperHead),
    "glm5_next_text": (glm5_next.Glm5NextTextHyperConnection, None),
    "hy_v4": (hy_v4.HYV4HyperConnection, hy_v4.HYV4HyperHead),
}


def configuration(model_type: str) -> Any:
    return SimpleNamespace(
        model_type=model_type,
        hc_mult=4,
        hidden_size=48,
        hc_sinkhorn_iters=20,
        hc_eps=1e-3,  # large enough to detect a missing stream
        rms_norm_eps=1e-3,
        hc_magnitude=2.0,
    )


def fill(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(len(list(module.parameters())))
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator).mul_(0.3)


def streams_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    streams = torch.randn(9, 4, 48, generator=generator)
    return streams.to(dtype), torch.randn(9, 48, generator=generator).to(dtype)


def expanded(output: torch.Tensor, streams: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Writes a sublayer's output like transformers' decoder layers."""
    if len(weights) == 1:
        post = weights[0].unsqueeze(-1)
        return (streams.float() + post * output.float().unsqueeze(-2)).to(streams.dtype)
    post, comb = (each.to(streams.dtype) for each in weights)
    mixed = torch.matmul(comb.transpose(-1, -2), streams)
    return post.unsqueeze(-1) * output.unsqueeze(-2) + mixed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", MODULES)
def test_a_connection_equals_the_one_of_transformers(model_type, dtype, device):
    config = configuration(model_type)
    theirs = MODULES[model_type][0](config)
    fill(theirs)
    torch.set_default_dtype(dtype)  # like vLLM's models
    ours = StreamConnection(StreamRule.of_model(config))
    torch.set_default_dtype(torch.float32)
    assert {each.dtype for each in ours.buffers()} == {torch.float32, torch.int64}
    ours.load_state_dict(theirs.state_dict())
    ours = ours.to(device)
    streams, output = streams_of(dtype)
    *weights, expected = (each.squeeze(0) for each in theirs(streams.unsqueeze(0)))
    collapsed, mixing = ours.collapse(streams.to(device))
    assert collapsed.dtype == dtype
    torch.testing.assert_close(collapsed.cpu(), expected, **TOLERANCE[dtype])
    actual = ours.expand(output.to(device), streams.to(device), mixing)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.cpu(), expanded(output, streams, *weights), **TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", MODULES)
def test_a_head_equals_the_one_of_transformers(model_type, dtype, device):
    config = configuration(model_type)
    ours = StreamHead(StreamRule.of_model(config))
    streams, _ = streams_of(dtype)
    if MODULES[model_type][1] is None:
        expected = streams.mean(1)
    else:
        theirs = MODULES[model_type][1](config)
        fill(theirs)
        state = {name.removeprefix("hc_"): each for name, each in theirs.state_dict().items()}
        ours.load_state_dict(state)
        expected = theirs(streams.unsqueeze(0)).squeeze(0)
    actual = ours.to(device)(streams.to(device))
    torch.testing.assert_close(actual.cpu(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("writes", [True, False])
def test_gates_of_a_low_rank_equal_those_of_transformers(writes, dtype, device):
    config = SimpleNamespace(
        model_type="qwen4_exp_text", hc_count=4, hc_lowrank=24, hidden_size=48, rms_norm_eps=1e-3
    )
    theirs = qwen4_exp.Qwen4ExpTextGatedResidual(config, use_combine=writes)
    fill(theirs)
    rule = StreamRule.of_model(config)
    ours = (connection if writes else head)(rule)
    given = theirs.state_dict()
    down = [given[f"{name}.weight"] for name in ("input_mix_weight_down", "block_inject_weight")
            if f"{name}.weight" in given]  # fmt: skip
    ours.load_state_dict(
        {
            "hc_norm.weight": given["hc_norm.weight"],
            "down.weight": torch.cat(down),
            "up.weight": given["input_mix_weight_up.weight"],
        }
    )
    ours = ours.to(device, dtype)
    ours.hc_norm.ones = ours.hc_norm.ones.float()
    streams, output = streams_of(dtype)
    expected = theirs.to(dtype)(streams.flatten(1))
    if not writes:
        actual = ours(streams.to(device))
        torch.testing.assert_close(actual.cpu(), expected, **TOLERANCE[dtype])
        return
    collapsed, mixing = ours.collapse(streams.to(device))
    torch.testing.assert_close(collapsed.cpu(), expected[0], **TOLERANCE[dtype])
    actual = ours.expand(output.to(device), streams.to(device), mixing)
    torch.testing.assert_close(
        actual.cpu(), expanded(output, streams, expected[2]), **TOLERANCE[dtype]
    )


def test_rows_and_columns_sum_to_one_and_the_matrix_is_not_symmetric(device: torch.device):
    connection = StreamConnection(StreamRule.of_model(configuration("deepseek_v4")))
    fill(connection)
    _, mixing = connection.to(device).collapse(streams_of(torch.float32)[0].to(device))
    assert mixing.comb is not None
    comb = mixing.comb.cpu()
    for axis in (-1, -2):
        torch.testing.assert_close(comb.sum(axis), torch.ones(9, 4), atol=5e-3, rtol=0)
    assert not torch.allclose(comb, comb.transpose(1, 2), atol=1e-2)


def test_the_first_axis_of_the_matrix_is_summed(device: torch.device):
    """The matrix only moves stream 0 to stream 1, which shows the direction."""
    rule = StreamRule.of_model(configuration("deepseek_v4"))
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 1] = 1
    streams = torch.arange(4 * 48.0).view(1, 4, 48)
    connection = StreamConnection(rule)
    mixing = StreamMixing(torch.zeros(1, 4).to(device), comb.to(device))
    moved = connection.expand(torch.ones(1, 48).to(device), streams.to(device), mixing).cpu()
    assert torch.equal(moved[0, 1], streams[0, 0])
    assert not moved[0, (0, 2, 3)].any()
