"""MLA's preprocessing equals its definition."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.strategies import shuffled, values

LATENT, ROPE, HEADS, SIZE, BLOCK = 64, 32, 4, 16, 16
MODES = ["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    limit = 2e-2 * float(expected.abs().max().clamp_min(1))
    torch.testing.assert_close(npu.cpu().double(), expected.double(), rtol=2e-2, atol=limit)


def norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma.double()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2].double(), x[..., 1::2].double()
    return torch.cat([even, odd], -1) * cos.double() + torch.cat([-odd, even], -1) * sin.double()


def rows_of(cache: torch.Tensor, mode: str) -> torch.Tensor:
    """Returns a cache on the device as [slots, size], with blocks in any order."""
    host = cache.cpu()
    if mode.endswith("NZ"):
        blocks, block, _, size = host.shape
        piece = 32 // host.element_size()
        host = host.view(blocks, size // piece, block, piece).transpose(1, 2)
    return host.reshape(-1, cache.shape[-1])


@pytest.mark.parametrize("mode", MODES)
@given(batch=st.integers(1, 3), tokens=st.integers(1, 20), quantized=st.booleans())
def test_latent_and_rotary_parts_go_to_their_caches(mode, batch, tokens, quantized):
    kv = values((batch, 1, tokens, LATENT + ROPE), torch.float16, 1)
    gamma = values((LATENT,), torch.float16, 2)
    cos, sin = (values((batch, 1, tokens, ROPE), torch.float16, n) for n in (3, 4))
    kind = torch.int8 if quantized else torch.float16
    scales = [values((n,), torch.float32, n, low=5, high=9) for n in (ROPE, LATENT)]
    width = -(-tokens // BLOCK)
    blocks = shuffled(batch * width)
    position = torch.arange(tokens)
    if mode == "Norm":
        shape: tuple[int, ...] = (batch, 1, 24)
        index = torch.stack([(position + b) % 24 for b in range(batch)])
        slots = (index + torch.arange(batch)[:, None] * 24).flatten()
    else:
        shape = (batch * width, BLOCK, 1)
        start = blocks.view(batch, width) * BLOCK
        slots = (start[:, position // BLOCK] + position % BLOCK).flatten()
        index = start.flatten() if "BLK" in mode else slots
    caches = [torch.zeros(*shape, size, dtype=kind).npu() for size in (ROPE, LATENT)]
    _, _, turned, compressed = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(), gamma.npu(), cos.npu(), sin.npu(), index.npu(), caches[0], caches[1],
        k_rope_scale=scales[0].npu() if quantized else None,
        c_kv_scale=scales[1].npu() if quantized else None, cache_mode=mode, is_output_kv=True,
    )  # fmt: skip
    expected = [rotated(kv[..., LATENT:], cos, sin), norm(kv[..., :LATENT], gamma)]
    near(turned, expected[0])
    near(compressed, expected[1])
    for cache, rows, scale in zip(caches, expected, scales, strict=True):
        found = rows_of(cache, mode)[slots]
        flat = rows.flatten(0, 2)
        if quantized:
            integers = (flat * scale).clamp(-128, 127)
            assert (found.double() - integers).abs().max() <= 1.1
        else:
            near(found.npu(), flat)
