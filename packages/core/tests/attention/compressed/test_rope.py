"""Rotation by pairs equals transformers', with and without YaRN's scaling."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
)

from vllm_davinci.core.attention.compressed.rope import RopeTable, inverse_frequencies

SIZE, HEAD, POSITIONS = 16, 64, 300
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("scaling", [None, YARN])
def test_frequencies_have_the_bits_of_transformers(scaling: dict[str, Any] | None):
    config = DeepseekV4Config(head_dim=HEAD, qk_rope_head_dim=SIZE, rope_parameters=scaling)
    theirs = DeepseekV4RotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(10000.0, SIZE, None), theirs.main_inv_freq)
    ours = inverse_frequencies(160000.0, SIZE, scaling)
    assert torch.equal(ours, theirs.compress_inv_freq)
    assert theirs.compress_attention_scaling == 1.0


def test_released_names_of_the_scaling_are_read():
    released = {"type": "yarn", **{name: each for name, each in YARN.items() if "type" not in name}}
    expected = inverse_frequencies(160000.0, SIZE, YARN)
    assert torch.equal(inverse_frequencies(160000.0, SIZE, released), expected)
    assert not torch.equal(inverse_frequencies(160000.0, SIZE, None), expected)


def test_the_last_entries_rotate_and_rotate_back(device: torch.device):
    frequencies = inverse_frequencies(10000.0, SIZE, None)
    with device:
        table = RopeTable(frequencies, POSITIONS)
    x = torch.randn(5, 3, HEAD, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 128, POSITIONS - 1])
    angles = positions[:, None].float() * frequencies
    expected = apply_rotary_pos_emb(x, angles.cos(), angles.sin())
    by = table.at(positions.to(device))
    turned = table.rotate(x.to(device, copy=True), by)
    torch.testing.assert_close(turned.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(turned[..., :-SIZE].cpu(), x[..., :-SIZE])
    back = table.rotate(turned, by.backwards())
    assert back.data_ptr() == turned.data_ptr()
    torch.testing.assert_close(back.cpu(), x, atol=1e-5, rtol=1e-5)
