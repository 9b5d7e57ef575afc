"""The gated delta rule on the device equals transformers and its definition."""

from functools import partial

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from vllm_davinci.core.linear_attention.delta_rule import (
    Heads,
    chunked_delta_rule,
    l2_normalized,
    recurrent_delta_rule,
)
from vllm_davinci_testing.layers.chunked_recurrence import (
    assert_chunks_are_defined,
    assert_parts_are_the_whole,
    assert_steps_are_a_chunk,
    computed_in_chunks,
)

KEY_HEADS, REPEATS, KEY_SIZE, VALUE_SIZE = 2, 2, 32, 48


def random_heads(num_tokens: int, seed: int, alike: float = 0.0, channels: int = 1) -> Heads:
    """alike: share of a common direction in all keys; makes the rule ill-conditioned
    channels: number of a key's entries that decay separately
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, KEY_HEADS, *shape, generator=generator)

    key = l2_normalized((1 - alike) * normal(KEY_SIZE) + alike)
    return Heads(
        l2_normalized(normal(KEY_SIZE)) * KEY_SIZE**-0.5,
        key,
        normal(REPEATS, VALUE_SIZE),
        -0.05 * normal(REPEATS, channels).exp(),
        normal(REPEATS).sigmoid(),
    )


def random_states(num_requests: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(num_requests, KEY_HEADS, REPEATS, VALUE_SIZE, KEY_SIZE, generator=generator)


def defined(heads: Heads, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the rule for one request by the equation, in fp64. state: the request's state"""
    query, key, value, decay, rate = (each.double() for each in heads)
    state, outputs = state.double(), []
    for q, k, v, g, beta in zip(query, key, value, decay, rate, strict=True):
        state = state * g.exp().unsqueeze(-2)
        remembered = torch.einsum("hrvk,hk->hrv", state, k)
        state = state + torch.einsum("hrv,hk->hrvk", (v - remembered) * beta[..., None], k)
        outputs.append(torch.einsum("hrvk,hk->hrv", state, q))
    return torch.stack(outputs), state


in_chunks = partial(computed_in_chunks, chunked_delta_rule)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [200], [3, 130, 64, 1, 200]])
@pytest.mark.parametrize(("alike", "channels"), [(0.0, 1), (0.9, 1), (0.0, KEY_SIZE)])
def test_chunks_are_the_rule_token_by_token(lengths, alike, channels, device):
    heads = random_heads(sum(lengths), 0, alike, channels)
    states = random_states(len(lengths))
    assert_chunks_are_defined(heads, states, lengths, in_chunks, defined, device, 2e-5)


def test_equal_keys_lose_no_digits(device: torch.device):
    """A power series would have entries of 1e17 here, which cancel."""
    heads = random_heads(64, 1)
    heads = heads._replace(
        key=heads.key[:1].expand_as(heads.key),
        decay=torch.zeros_like(heads.decay),
        rate=torch.full_like(heads.rate, 0.99),
    )
    states = random_states(1)
    outputs, _ = in_chunks(heads, states, [64], device)
    expected, _ = defined(heads, states[0])
    torch.testing.assert_close(outputs.double(), expected, atol=2e-5, rtol=1e-4)


def test_channels_that_forget_at_once_stay_finite(device: torch.device):
    """States decay by exp(-1280), whose inverse overflows fp32."""
    heads = random_heads(70, 5, channels=KEY_SIZE)
    decay = heads.decay.clone()
    decay[..., ::2] = -20.0
    heads, states = heads._replace(decay=decay), random_states(1)
    outputs, after = in_chunks(heads, states, [70], device)
    expected, state = defined(heads, states[0])
    torch.testing.assert_close(outputs.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after[0].double(), state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("channels", [1, KEY_SIZE])
def test_tokens_one_by_one_are_a_chunk_of_them(channels: int, device: torch.device):
    each = [random_heads(70, seed, channels=channels) for seed in range(3)]
    assert_steps_are_a_chunk(each, random_states(3), in_chunks, recurrent_delta_rule, device, 2e-5)


def test_a_prompt_in_parts_is_the_whole_prompt(device: torch.device):
    assert_parts_are_the_whole(random_heads(150, 3), random_states(1), in_chunks, device, 2e-5)


@pytest.mark.parametrize("num_tokens", [5, 130])
def test_chunked_scan_equals_transformers(num_tokens: int, device: torch.device):
    heads = random_heads(num_tokens, 4)
    outputs, state = in_chunks(heads, torch.zeros_like(random_states(1)), [num_tokens], device)

    def of_value_heads(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(REPEATS, dim=1).unsqueeze(0)

    expected, last_state = modeling_qwen3_next.torch_chunk_gated_delta_rule(
        of_value_heads(heads.query * KEY_SIZE**0.5),
        of_value_heads(heads.key),
        heads.value.flatten(1, 2).unsqueeze(0),
        g=heads.decay.flatten(1).unsqueeze(0),
        beta=heads.rate.flatten(1).unsqueeze(0),
        output_final_state=True,
    )
    torch.testing.assert_close(outputs.flatten(1, 2), expected[0], atol=2e-5, rtol=1e-4)
    transposed = last_state[0].transpose(-1, -2)
    torch.testing.assert_close(state[0].flatten(0, 1), transposed, atol=2e-5, rtol=1e-4)


def test_decays_of_channels_equal_those_of_transformers(device: torch.device):
    num_tokens, repeats = 70, 1
    heads = random_heads(num_tokens, 6, channels=KEY_SIZE)
    heads = heads._replace(
        value=heads.value[:, :, :repeats],
        decay=heads.decay[:, :, :repeats],
        rate=heads.rate[:, :, :repeats],
    )
    states = torch.zeros_like(random_states(1)[:, :, :repeats])
    outputs, state = in_chunks(heads, states, [num_tokens], device)
    expected, last_state = modeling_kimi_linear.chunk_kimi_delta_attention(
        (heads.query * KEY_SIZE**0.5).unsqueeze(0),
        heads.key.unsqueeze(0),
        heads.value.squeeze(2).unsqueeze(0),
        g=heads.decay.squeeze(2).unsqueeze(0),
        beta=heads.rate.squeeze(2).unsqueeze(0),
        output_final_state=True,
    )
    torch.testing.assert_close(outputs.squeeze(2), expected[0], atol=2e-5, rtol=1e-4)
    transposed = last_state[0].transpose(-1, -2)
    torch.testing.assert_close(state[0].squeeze(1), transposed, atol=2e-5, rtol=1e-4)
