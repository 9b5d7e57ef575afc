"""MXFP4 weights as floats, and as integers."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights
from vllm_davinci.core.quantization.fp8 import INTEGERS, Block

OUT, IN = 6, 96
NAME = "layers.0.ffn.experts.0.w1"


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Draws packed numbers, and scales whose exponents fit bf16."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (OUT, IN // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(8, 240, (OUT, IN // 32), generator=generator, dtype=torch.uint8)
    return packed, exponents


def loaded(
    weight: torch.Tensor, scale: torch.Tensor | None, types: dict[str, str] | None = None
) -> dict[str, torch.Tensor]:
    tensors = {f"{NAME}.weight": weight} | ({} if scale is None else {f"{NAME}.scale": scale})
    own = Fp8Weights(types=types or {}, source="here", blocks=Block(128, 128))
    return dict(own.converted(tensors.items(), torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_packed_experts_become_the_floats_that_transformers_makes_of_them(dtype: torch.dtype):
    packed, exponents = drawn()
    made = loaded(packed.view(dtype), exponents.view(torch.float8_e8m0fnu))
    theirs = convert_moe_packed_tensors(packed.view(1, OUT, -1, 16), exponents.unsqueeze(0))
    assert torch.equal(made[f"{NAME}.weight"], theirs[0].t())


def test_packed_experts_become_integers_with_a_scale_per_row():
    packed, exponents = drawn()
    exponents.fill_(120)
    scale = exponents.view(torch.float8_e8m0fnu)
    floats = loaded(packed, scale)[f"{NAME}.weight"].float()
    made = loaded(packed, scale, {f"{NAME}.weight": INTEGERS})
    integers = made[f"{NAME}.weight"].float() * made[f"{NAME}.weight_scale"]
    assert (integers - floats).abs().max() <= floats.abs().max() / 127 / 2 * 1.001


def test_packed_experts_without_their_scales_are_an_error():
    packed, exponents = drawn()
    with pytest.raises(CheckpointError, match=r"w1\.weight holds MXFP4, and .* is in no file"):
        loaded(packed, None)
    with pytest.raises(CheckpointError, match=r"has shape \[6, 2\] .* needs shape \[6, 3\]"):
        loaded(packed, exponents[:, :2].view(torch.float8_e8m0fnu))
