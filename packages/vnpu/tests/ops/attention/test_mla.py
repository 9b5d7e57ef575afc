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
    """[slots, size] of a cache on the device, in any order of blocks."""
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


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("quantized", ["nothing", "up projection", "projections"])
@pytest.mark.parametrize("lead", [(6,), (2, 3)])
def test_queries_and_keys_of_latent_attention(version, quantized, lead):
    hidden, compressed, tokens = 48, 40, 6
    int8 = {"nothing": (), "up projection": ("up",), "projections": ("down", "up", "key")}[
        quantized
    ]

    def weight(name: str, rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        if name in int8:
            scale = values((1, columns), torch.float32, seed + 20, low=1e-3, high=3e-3)
            return values((rows, columns), torch.int8, seed, low=-128, high=128), scale
        return values((rows, columns), torch.bfloat16, seed, low=-0.5, high=0.5), torch.ones(1)

    down, down_scale = weight("down", hidden, compressed, 1)
    up, up_scale = weight("up", compressed, HEADS * (SIZE + ROPE), 2)
    key, key_scale = weight("key", hidden, LATENT + ROPE, 3)
    absorbed = values((HEADS, SIZE, LATENT), torch.bfloat16, 4, low=-0.5, high=0.5)
    gammas = [values((n,), torch.bfloat16, n) for n in (compressed, LATENT)]
    cos, sin = (values((*lead, ROPE), torch.bfloat16, n) for n in (5, 6))
    x_scale = values((tokens, 1), torch.float32, 7, low=0.01, high=0.02)
    if "down" in int8:
        x = values((*lead, hidden), torch.int8, 8, low=-128, high=128)
    else:
        x, x_scale = values((*lead, hidden), torch.bfloat16, 8), torch.ones(1)
    slots = shuffled(32)[:tokens].view(lead)
    caches = [torch.zeros(2, 16, 1, n, dtype=torch.bfloat16).npu() for n in (LATENT, ROPE)]
    scales = {}
    if "up" in int8:
        scales = {"dequant_scale_w_uq_qr": up_scale.npu()}
    if "down" in int8:
        scales |= {
            "dequant_scale_x": x_scale.npu(),
            "dequant_scale_w_dq": down_scale.npu(),
            "dequant_scale_w_dkv_kr": key_scale.npu(),
        }
    inputs = [t.npu() for t in (x, down, up, absorbed, key, *gammas, sin, cos)]
    if version == 2:
        query, query_rope, *_ = torch_npu.npu_mla_prolog_v2(
            *inputs, slots.npu(), *caches, cache_mode="PA_BSND", **scales
        )
    else:
        query, query_rope, *_ = torch_npu.npu_mla_prolog_v3(
            *inputs, *caches, cache_index=slots.npu(), cache_mode="PA_BSND", **scales,
            weight_quant_mode=("nothing", "up projection", "projections").index(quantized),
        )  # fmt: skip

    flat = x.view(tokens, hidden).double()
    normed = norm((flat @ down.double()) * x_scale * down_scale, gammas[0])
    q = ((normed @ up.double()) * up_scale).view(tokens, HEADS, SIZE + ROPE)
    k = (flat @ key.double()) * x_scale * key_scale
    angles = cos.view(tokens, ROPE), sin.view(tokens, ROPE)
    near(query, torch.einsum("thd,hdl->thl", q[..., :SIZE], absorbed.double()).view(query.shape))
    turned = rotated(q[..., SIZE:], *(a[:, None] for a in angles))
    near(query_rope, turned.view(query_rope.shape))
    near(caches[0].view(32, LATENT)[slots.flatten().npu()], norm(k[:, :LATENT], gammas[1]))
    near(caches[1].view(32, ROPE)[slots.flatten().npu()], rotated(k[:, LATENT:], *angles))


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_of_latent_attention_go_to_blocks_that_an_index_names(packed, pieces):
    """One entry per block of a sequence; packed sequences have their own lengths."""
    hidden, compressed, block_size = 48, 40, 4
    lengths = [5, 1, 4] if packed else [5, 5]
    tokens = sum(lengths)
    lead = (tokens,) if packed else (2, 5)
    shapes = [
        (*lead, hidden), (hidden, compressed), (compressed, HEADS * (SIZE + ROPE)),
        (HEADS, SIZE, LATENT), (hidden, LATENT + ROPE), (compressed,), (LATENT,),
        (*lead, ROPE), (*lead, ROPE),
    ]  # fmt: skip
    inputs = [values(shape, torch.bfloat16, seed) for seed, shape in enumerate(shapes)]
    blocks = [[6, 2], [5], [3]] if packed else [[6, 2], [5, 3]]
    index = torch.tensor([block for own in blocks for block in own]).view(
        (4,) if packed else (2, 2)
    )
    ends = torch.tensor(lengths).cumsum(0).int().npu() if packed else None
    outputs = {}
    for mode in ("PA_BSND", "PA_BLK_NZ" if pieces else "PA_BLK_BSND"):
        caches = [
            torch.zeros(8, block_size, 1, n, dtype=torch.bfloat16).npu() for n in (LATENT, ROPE)
        ]
        slots = torch.tensor(
            [
                blocks[sequence][token // block_size] * block_size + token % block_size
                for sequence, length in enumerate(lengths)
                for token in range(length)
            ]
        )
        torch_npu.npu_mla_prolog_v3(
            *(t.npu() for t in inputs), *caches, cache_mode=mode,
            cache_index=(slots.view(lead) if mode == "PA_BSND" else index).npu(),
            actual_seq_len=None if mode == "PA_BSND" else ends,
        )  # fmt: skip
        outputs[mode] = [cache.cpu() for cache in caches]
    there, by_blocks = outputs.values()
    for expected, found in zip(there, by_blocks, strict=True):
        assert expected.any()
        if pieces:  # a block lies in memory as [size / 16, block_size, 16]
            size = found.shape[-1]
            found = (
                found.view(8, size // 16, block_size, 16).transpose(1, 2).reshape(expected.shape)
            )
        assert torch.equal(found, expected)
