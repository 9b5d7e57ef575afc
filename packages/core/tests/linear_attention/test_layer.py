"""The short convolution of recurrent layers over each request's tokens."""

import torch
from torch.nn.functional import conv1d, silu

from vllm_davinci.core.linear_attention.chunk_plan import plan_chunks
from vllm_davinci.core.linear_attention.layer import Conv, conv_of_decodes, conv_of_prefills

# The convolution of decodes and prefills equals torch's, request by request.

CHANNELS, WIDTH = 24, 4
LENGTHS = [2, 70, 1, 129]


def convolved(
    kept: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Convolves [tokens, channels] of one request. kept: [WIDTH - 1, channels], the inputs
    before x
    """
    seen = torch.cat([kept, x]).t().unsqueeze(0)
    return silu(conv1d(seen, weight.t().unsqueeze(1), bias, groups=CHANNELS))[0].t()


def test_every_request_convolves_its_state_and_its_own_tokens(device: torch.device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(LENGTHS), CHANNELS, generator=generator)
    kept = torch.randn(len(LENGTHS), WIDTH - 1, CHANNELS, generator=generator)
    weight = torch.randn(WIDTH, CHANNELS, generator=generator)
    plan = plan_chunks(LENGTHS, [False] * len(LENGTHS), WIDTH, device)
    in_order = kept.to(device).index_select(0, plan.order)
    found, kept_after = conv_of_prefills(
        x.to(device), in_order, Conv(weight.to(device), None), plan
    )
    padding = plan.tokens.eq(sum(LENGTHS))
    assert not found[padding].any()
    found = found.index_select(0, plan.places).cpu()
    kept_after = torch.empty_like(kept).index_copy_(0, plan.order.cpu(), kept_after.cpu())
    for row, of_request in enumerate(x.split(LENGTHS)):
        begin = sum(LENGTHS[:row])
        expected = convolved(kept[row], of_request, weight)
        torch.testing.assert_close(found[begin : begin + LENGTHS[row]], expected)
        newest = torch.cat([kept[row], of_request])[-(WIDTH - 1) :]
        assert torch.equal(kept_after[row], newest)


def test_silu_follows_only_where_it_is_asked_for(device: torch.device):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, CHANNELS, generator=generator)
    kept = torch.randn(1, WIDTH - 1, CHANNELS, generator=generator)
    weight = torch.randn(WIDTH, CHANNELS, generator=generator)
    conv = Conv(weight.to(device), None, ends_in_silu=False)
    plan = plan_chunks([1], [False], WIDTH, device)
    decoded, _ = conv_of_decodes(x.to(device), kept.to(device), conv)
    prefilled, _ = conv_of_prefills(x.to(device), kept.to(device), conv, plan)
    expected = (torch.cat([kept[0], x]) * weight).sum(dim=0, keepdim=True)
    torch.testing.assert_close(decoded.cpu(), expected)
    torch.testing.assert_close(prefilled.index_select(0, plan.places).cpu(), expected)


def test_a_decode_equals_a_prefill_of_one_token(device: torch.device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, CHANNELS, generator=generator)
    kept = torch.randn(3, WIDTH - 1, CHANNELS, generator=generator)
    weight = torch.randn(WIDTH, CHANNELS, generator=generator)
    conv = Conv(weight.to(device), torch.ones(CHANNELS, device=device))
    found, kept_after = conv_of_decodes(x.to(device), kept.to(device), conv)
    for row in range(3):
        expected = convolved(kept[row], x[row : row + 1], weight, torch.ones(CHANNELS))
        torch.testing.assert_close(found[row : row + 1].cpu(), expected)
        assert torch.equal(kept_after[row].cpu(), torch.cat([kept[row, 1:], x[row : row + 1]]))
