"""Kimi-K3's tower for images in plain torch: its configuration, processor and equations.

The tower reads whole images, where vLLM's reads patches that a processor has cut.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import gelu, interpolate, pad

PATCH, MERGE = 14, 2
HIDDEN, HEADS, HEAD, INNER, NUM_BLOCKS = 80, 2, 48, 128, 2
PLACES = 6  # rows and columns of learned positions
MOST_PATCHES, MOST_ON_A_SIDE = 64, 8  # of an image that is not reduced
MEAN, DEVIATION = [0.5, 0.4, 0.3], [0.5, 0.6, 0.7]
EPS = 1e-5  # of the projector's norm
PLACEHOLDER, PAD = "<|kimi_image_placeholder|>", "<|media_pad|>"
SPECIAL = (PLACEHOLDER, PAD, "<|media_begin|>", "<|media_content|>", "<|media_end|>")

VISION: dict[str, Any] = {
    "patch_size": PATCH,
    "init_pos_emb_height": PLACES,
    "init_pos_emb_width": PLACES,
    "vt_num_attention_heads": HEADS,
    "vt_num_hidden_layers": NUM_BLOCKS,
    "vt_hidden_size": HIDDEN,
    "vt_intermediate_size": INNER,
    "qkv_hidden_size": HEADS * HEAD,
    "projector_ln_eps": EPS,
}
PROCESSOR: dict[str, Any] = {
    "media_proc_cfg": {
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": MOST_PATCHES,
        "patch_limit_on_one_side": MOST_ON_A_SIDE,
        "fixed_output_tokens": None,
        "image_mean": MEAN,
        "image_std": DEVIATION,
    }
}


def pixels_of(image: Image.Image) -> Tensor:
    """Returns [3, height, width]: reduced to the limits, with black up to whole merged patches."""
    width, height = image.size
    patches = (width // PATCH) * (height // PATCH)
    side = MOST_ON_A_SIDE * PATCH
    scale = min(1.0, math.sqrt(MOST_PATCHES / patches), side / width, side / height)
    size = int(width * scale), int(height * scale)
    pixels = torch.from_numpy(np.array(image.resize(size, Image.Resampling.BICUBIC)))
    right, below = (-each % (PATCH * MERGE) for each in size)
    padded = pad(pixels.permute(2, 0, 1), (0, right, 0, below)) / 255
    return (padded - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


def expanded(text: str, images: list[Image.Image]) -> str:
    """Replaces each image's placeholder by its size and one token per merged patch."""
    for image in images:
        _, height, width = pixels_of(image).shape
        width_in_text, height_in_text = image.size
        pads = PAD * (height * width // (PATCH * MERGE) ** 2)
        told = f"<|media_begin|>image {width_in_text}x{height_in_text}<|media_content|>"
        text = text.replace(PLACEHOLDER, f"{told}{pads}<|media_end|>", 1)
    return text


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PLACES, PLACES, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """x: [hidden, rows, columns]"""
        learned = self.weight.permute(2, 0, 1)[None]
        return x + interpolate(learned, x.shape[1:], mode="bilinear")[0]


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, HIDDEN, PATCH, PATCH, bias=False)
        self.pos_emb = Positions()

    def forward(self, pixels: Tensor) -> Tensor:
        embedded: Tensor = self.pos_emb(self.proj(pixels[None])[0])
        return embedded.permute(1, 2, 0)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc0, self.fc1 = linear(HIDDEN, INNER), linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc1(gelu(self.fc0(x), approximate="tanh"))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.wqkv, self.wo = linear(HIDDEN, 3 * HEADS * HEAD), linear(HEADS * HEAD, HIDDEN)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, columns, hidden]"""
        heads = self.wqkv(self.norm0(x)).unflatten(-1, (3, HEADS, HEAD))
        query, key, value = heads.unbind(-3)
        query, key = turned(query), turned(key)
        scores = torch.einsum("rchd,RChd->hrcRC", query, key) * HEAD**-0.5
        shares = scores.flatten(3).softmax(-1).view_as(scores)
        x = x + self.wo(torch.einsum("hrcRC,RChd->rchd", shares, value).flatten(2))
        result: Tensor = x + self.mlp(self.norm1(x))
        return result


def turned(heads: Tensor) -> Tensor:
    """Turns pairs of a head by its patch's column and row in turn. [rows, columns, heads, head]"""
    rows, columns = heads.shape[:2]
    pairs = torch.arange(HEAD // 2)
    speeds = 10000.0 ** -(pairs // 2 * 4 / HEAD)
    places = torch.arange(max(rows, columns))
    by_column = places[None, :columns, None].expand(rows, -1, HEAD // 2)
    by_row = places[:rows, None, None].expand(-1, columns, HEAD // 2)
    angles = torch.where(pairs % 2 == 0, by_column, by_row) * speeds
    values = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(values * turns[:, :, None]).flatten(-2).to(heads.dtype)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.final_layernorm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.final_layernorm(self.blocks(x))
        return result


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.encoder = Patches(), Encoder()

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels: [3, height, width]. Returns [merged patches, MERGE * MERGE * hidden]."""
        x = self.encoder(self.patch_embed(pixels))
        squares = x.unflatten(1, (-1, MERGE)).unflatten(0, (-1, MERGE))
        return squares.transpose(1, 2).flatten(0, 1).flatten(1)


class Projector(nn.Module):
    """text_size: hidden size of the text model"""

    def __init__(self, text_size: int) -> None:
        super().__init__()
        size = MERGE * MERGE * HIDDEN
        self.proj = nn.Sequential(linear(size, size), nn.GELU(), linear(size, text_size))
        self.post_norm = nn.RMSNorm(text_size, EPS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.post_norm(self.proj(x))
        return result
