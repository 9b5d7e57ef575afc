"""Tokens that a grammar allows equal a definition that works token by token."""

import pytest
import torch

from vllm_davinci.core.triton_kernels.penalties import apply_grammar_bitmask, bits_of

VOCABULARY, STRIDE = 70, 4


def test_bits_are_read_from_the_lowest_of_each_word():
    words = torch.tensor([[1, -(2**31)], [6, 1]], dtype=torch.int32).npu()
    bits = bits_of(words, 40).cpu()
    assert bits[0].nonzero().view(-1).tolist() == [0]
    assert bits[1].nonzero().view(-1).tolist() == [1, 2, 32]
    assert bits_of(words, 64).cpu()[0].nonzero().view(-1).tolist() == [0, 63]


@pytest.mark.parametrize("rows", [[1, 1, 1], [3, 1, 2], [1, 4]])
def test_a_grammar_excludes_tokens_that_it_does_not_accept(rows: list[int]):
    generator = torch.Generator().manual_seed(len(rows))
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(rows).cumsum(0)
    # Every other request has a mask for each row, and one for an abandoned row.
    places = [
        (request, place) for request in range(0, len(rows), 2) for place in range(rows[request] + 1)
    ]
    places = [each for each in places if each[1] < STRIDE]
    masks = torch.randint(
        -(2**31), 2**31 - 1, (len(places), -(-VOCABULARY // 32)), generator=generator
    ).to(torch.int32)
    logits = torch.randn(sum(rows), VOCABULARY, generator=generator)
    expected = logits.clone()
    for (request, place), words in zip(places, masks.tolist(), strict=True):
        for token in range(VOCABULARY):
            is_taken = words[token // 32] >> (token % 32) & 1
            if place < rows[request] and not is_taken:
                expected[int(starts[request]) + place, token] = -torch.inf
    on_device = logits.npu()
    apply_grammar_bitmask(
        on_device,
        VOCABULARY,
        torch.tensor([r * STRIDE + p for r, p in places], dtype=torch.int32).npu(),
        starts.npu(),
        masks.npu(),
        masks.stride(0),
        VOCABULARY,
        MASK_STRIDE=STRIDE,
    )
    assert torch.equal(on_device.cpu(), expected)
