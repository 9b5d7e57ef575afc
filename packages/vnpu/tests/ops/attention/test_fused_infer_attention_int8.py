"""int8 in fused attention: scaled keys and values, and scaled results."""

import pytest
import torch
import torch_npu

from vllm_davinci_testing.operators.attention_definition import attention, close
from vllm_davinci_testing.operators.strategies import values


@pytest.mark.parametrize("mode", [0, 1])
def test_int8_keys_and_values_are_scaled_per_channel_or_per_token(mode: int) -> None:
    query = values((2, 4, 1, 64), torch.float16, 1)
    key, value = (values((2, 2, 50, 64), torch.int8, n, low=-90, high=90) for n in (2, 3))
    shape = (1, 2, 1, 64) if mode == 0 else (1, 2, 50)
    kind = torch.float16 if mode == 0 else torch.float32
    scale, value_scale = (values(shape, kind, n, low=0.002, high=0.01) for n in (4, 5))
    offset = values(shape, kind, 6)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(), key.npu(), value.npu(), num_heads=4, num_key_value_heads=2, scale=0.2,
        input_layout="BNSD", key_antiquant_scale=scale.npu(), key_antiquant_offset=offset.npu(),
        value_antiquant_scale=value_scale.npu(), value_antiquant_offset=offset.npu(),
        key_antiquant_mode=mode, value_antiquant_mode=mode,
    )  # fmt: skip

    def number(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        over = (lambda t: t.float()) if mode == 0 else (lambda t: t.view(2, 1, 50, 1))
        return (x.float() + over(offset)) * over(s)

    for b in range(2):
        k, v = number(key, scale)[b], number(value, value_scale)[b]
        close(out[b], attention(query[b], k, v, 0.2)[0], torch.float16)


def test_int8_results_are_scaled_and_shifted() -> None:
    query = values((1, 2, 5, 32), torch.float32, 1)
    scale, offset = torch.tensor([31.0]), torch.tensor([3.0])
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(), query.npu(), query.npu(), num_heads=2, scale=0.2, input_layout="BNSD",
        quant_scale2=scale.npu(), quant_offset2=offset.npu(),
    )  # fmt: skip
    expected = attention(query[0], query[0], query[0], 0.2)[0] * 31 + 3
    assert out.dtype == torch.int8
    assert (out.cpu()[0].double() - expected.clamp(-128, 127)).abs().max() <= 0.501
