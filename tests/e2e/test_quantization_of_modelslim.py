"""Types of ModelSlim's that no exporter here writes, served and held against plain integers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci_testing.engines.engine_process import ON_910C, EngineError, EngineProcess
from vllm_davinci_testing.engines.int8_checkpoint import rewrite, tensors_of
from vllm_davinci_testing.engines.integer_reference import IntegerReference

EXPERTS = "deepseek_v3_moe"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
Quantize = Callable[..., Path]


def mixed(weight: Tensor) -> dict[str, Tensor]:
    """A layer for engines that prefill and for those that decode: scales of tokens, and one."""
    layer = FloatLayer(weight, torch.bfloat16, inputs=InputRange(-6, 6))
    made = [find_scheme(kind, "p").rounded(layer) for kind in ("W8A8", "W8A8_DYNAMIC")]
    return made[0] | made[1]


def of_four_bits(weight: Tensor) -> dict[str, Tensor]:
    """Integers of two rows in a byte, and what products of halves of int8 leave out."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 7).clamp_min(1e-8)
    integers = (wide / scale).round().to(torch.int8)
    return {
        "weight": (integers[0::2] & 15) | (integers[1::2] << 4),
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
        "scale_bias": 8 * integers.float().sum(1, keepdim=True) * scale,
    }


WRITERS: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "W8A8_MIX": mixed,
    "W4A8_DYNAMIC": of_four_bits,
}


def write(quantize: Quantize, source: Path, kind: str, only: str = "") -> Path:
    """The export of a float checkpoint, with layers whose names have `only` of another type."""
    directory = quantize(source, "W8A8_DYNAMIC", name=f"{source.name}-{kind}-{only}")
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    floats = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale") and only in name]:
        prefix = name.removesuffix(".weight_scale")
        for part in ("weight", "weight_scale", "weight_offset"):
            del tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"]
        for part, value in WRITERS[kind](floats[f"{prefix}.weight"]).items():
            tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"] = value, kind
    rewrite(directory, tensors, description)
    return directory


SPLIT = {"tensor_parallel_size": 2, "environment": ON_910C}


@pytest.mark.parametrize(
    ("model", "kind", "only", "options"),
    [
        pytest.param("qwen3_norm_head128_gqa2", "W8A8_MIX", "", {}, id="mix"),
        pytest.param(EXPERTS, "W4A8_DYNAMIC", "", {}, id="four_bits"),
        pytest.param(EXPERTS, "W8A8_MIX", "", {}, id="mix_of_experts", marks=pytest.mark.thorough),
        pytest.param(
            EXPERTS,
            "W4A8_DYNAMIC",
            "experts.",
            {**SPLIT, "enable_expert_parallel": True},
            id="four_bits_in_experts_of_two_ranks",
            marks=pytest.mark.thorough,
        ),
        # An expert's half has 32 inputs, which the product of 4-bit weights does not take.
        pytest.param(
            EXPERTS,
            "W4A8_DYNAMIC",
            "experts.",
            SPLIT,
            id="four_bits_in_halves_of_experts",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_tokens_are_those_of_the_integers(
    model: str,
    kind: str,
    only: str,
    options: dict[str, Any],
    zoo: Callable[[str], Path],
    quantize: Quantize,
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    directory = write(quantize, zoo(model), kind, only)
    report = check_checkpoint(directory)
    assert report.can_load, report
    given = prompts[6:14]
    with start_engine(directory, dtype="bfloat16", **options) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
        log = engine.log_text()
    assert ("weights are kept in 8 bits" in log) == (options is SPLIT)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = IntegerReference(directory).differing_tokens(given, tokens)
    assert wrong == 0, (close, wrong)
    assert close <= 12  # of 128


EXPERT = "model.layers.2.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("weight_scale", lambda scale: scale.repeat(1, 2), "[64, 2]"),
        ("weight", lambda weight: weight[1:], "[62, 1]"),
        ("weight", lambda weight: weight.float(), "float32"),
        ("scale_bias", lambda bias: bias.repeat(1, 3), "[64, 3]"),
    ],
    ids=["groups", "rows_short", "floats", "parts"],
)
def test_bad_weights_of_four_bits_are_named(
    part: str,
    change: Callable[[Tensor], Tensor],
    told: str,
    zoo: Callable[[str], Path],
    quantize: Quantize,
):
    directory = write(quantize, zoo(EXPERTS), "W4A8_DYNAMIC", "experts")
    whole = tensors_of(directory)
    name = f"{EXPERT}.{part}"
    rewrite(directory, {**whole, name: change(whole[name]).contiguous()})
    report = check_checkpoint(directory)
    rewrite(directory, whole)
    assert not report.can_load
    said = [str(issue) for issue in report.issues if EXPERT in str(issue)]
    assert any(told in each for each in said), said


def test_experts_that_are_not_symmetric_end_the_start(
    zoo: Callable[[str], Path], quantize: Quantize, start_engine: Callable[..., EngineProcess]
):
    directory = write(quantize, zoo(EXPERTS), "W4A8_DYNAMIC", "experts.")
    tensors = tensors_of(directory)
    tensors[f"{EXPERT}.weight_offset"] += 1
    rewrite(directory, tensors)
    with pytest.raises(EngineError, match=r"w13_weight_offset.* is not zero"):
        start_engine(directory, dtype="bfloat16")
