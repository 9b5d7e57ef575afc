"""Attention to selected rows equals transformers' eager attention of DeepSeek-V4."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

from vllm_davinci.core.attention.gathered import SCORES, attend_to_rows, queries_at_once

TOKENS, HEADS, SIZE, WIDTH, NUM_ROWS = 7, 4, 32, 19, 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_sinks", [True, False])
def test_rows_that_are_visible_and_a_sink_share_the_softmax(dtype, has_sinks, device):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, SIZE, generator=generator).to(dtype)
    rows = torch.randn(NUM_ROWS, SIZE, generator=generator).to(dtype)
    numbers = torch.randint(NUM_ROWS, (TOKENS, WIDTH), generator=generator)
    is_visible = torch.rand(TOKENS, WIDTH, generator=generator) < 0.6
    is_visible[:, 0] = True
    is_visible[0, 1:] = False
    sinks = torch.randn(HEADS, generator=generator) + 1 if has_sinks else None
    actual = attend_to_rows(
        query.to(device),
        rows.to(device),
        lambda part: (numbers[part].to(device), ~is_visible[part].to(device)),
        WIDTH,
        SIZE**-0.5,
        None if sinks is None else sinks.to(device),
    )
    assert actual.dtype == dtype
    own = torch.full((HEADS,), float("-inf")) if sinks is None else sinks
    module = SimpleNamespace(num_key_value_groups=HEADS, sinks=own, training=False)
    keys = rows[numbers].float().unsqueeze(1)
    mask = torch.zeros(TOKENS, 1, 1, WIDTH).masked_fill(~is_visible[:, None, None], float("-inf"))
    # A batch with one query each, in fp32.
    expected, _ = eager_attention_forward(
        module, query.float().unsqueeze(2), keys, keys, mask, SIZE**-0.5
    )
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual.cpu().float(), expected[:, 0], atol=bound, rtol=bound)


def test_a_single_query_is_one_call_for_any_number_of_rows():
    assert queries_at_once(64, 512, 2 * SCORES) == 1
    assert queries_at_once(64, 512, 640) == 102
