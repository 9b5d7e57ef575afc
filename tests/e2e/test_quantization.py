"""int8 checkpoints through the whole stack: loaded as described, close to their float source."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci_testing.engines.engine_process import ON_910C
from vllm_davinci_testing.engines.int8_checkpoint import compressed_int8, rewrite, tensors_of
from vllm_davinci_testing.engines.likelihood import CLOSE, likelihood

BF16 = {"dtype": "bfloat16", "max_model_len": 512}
WEIGHTS = "model.safetensors"
Quantize = Callable[..., Path]


@pytest.fixture(scope="module")
def of_floats(likelihood_of: Callable[..., float]) -> Callable[[Path], float]:
    return cache(likelihood_of)


@pytest.fixture(scope="module")
def assert_close(
    of_floats: Callable[[Path], float], likelihood_of: Callable[..., float]
) -> Callable[..., None]:
    """Returns a function that compares the text's likelihood with the float source's."""

    def compare(model: Path, source: Path, **options: Any) -> None:
        assert abs(likelihood_of(model, **options) - of_floats(source)) < CLOSE

    return compare


def test_the_description_alone_selects_the_method(
    quantize, tiny_llama, of_floats, start_engine, text
):
    with start_engine(quantize(tiny_llama, "W8A8_DYNAMIC"), **BF16) as engine:
        value = likelihood(engine, text)
        log = engine.log_text()
    assert "quantization: None -> ascend" in log
    assert "has no entry" not in log
    assert value != of_floats(tiny_llama)
    assert abs(value - of_floats(tiny_llama)) < CLOSE


@pytest.mark.parametrize(
    ("dtype", "chip"),
    [
        pytest.param("bfloat16", {}, marks=pytest.mark.thorough),
        pytest.param("float16", ON_910C, marks=pytest.mark.thorough),
    ],
)
def test_static_layers_run_in_both_dtypes(dtype, chip, quantize, tiny_llama, assert_close):
    model = quantize(tiny_llama, "W8A8", getattr(torch, dtype))
    assert_close(model, tiny_llama, dtype=dtype, quantization="ascend", environment=chip)


def test_ranks_add_a_static_bias_once(quantize, tiny_llama, assert_close):
    # The bias includes the offset's share of each sum: adding it on each rank destroys the text.
    assert_close(quantize(tiny_llama, "W8A8"), tiny_llama, tensor_parallel_size=2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_the_nz_layout_changes_no_bit(kind, quantize, tiny_deepseek, likelihood_of):
    model, nz = quantize(tiny_deepseek, kind), {"enable_weight_nz_layout": True}
    plain = likelihood_of(model, environment=ON_910C)
    assert plain == likelihood_of(model, environment=ON_910C, additional_config=nz)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("W8A8_DYNAMIC", {}, id="dynamic", marks=pytest.mark.thorough),
        pytest.param("W8A8", {"environment": ON_910C}, id="static", marks=pytest.mark.thorough),
        pytest.param(
            "W8A8_DYNAMIC", {"tensor_parallel_size": 2}, id="tensor2", marks=pytest.mark.thorough
        ),
        pytest.param(
            "W8A8_DYNAMIC",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "environment": ON_910C},
            id="expert2",
        ),
    ],
)
def test_latent_attention_and_experts_run_quantized(
    kind, options, quantize, tiny_deepseek, assert_close
):
    assert_close(quantize(tiny_deepseek, kind), tiny_deepseek, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_with_input_scales_of_their_own_run(ranks, quantize, tiny_deepseek, assert_close):
    directory = quantize(tiny_deepseek, "W8A8_DYNAMIC", name=f"static-experts-{ranks}")
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    for name, weight in load_file(tiny_deepseek / WEIGHTS).items():
        if ".experts." in name:
            prefix = name.removesuffix(".weight")
            for part in ("weight", "weight_scale", "weight_offset"):
                del tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"]
            # Input ranges that cover almost all of this model's activations.
            seen = InputRange(-4, 4) if "down_proj" in name else InputRange(-6, 6)
            static = find_scheme("W8A8", name)
            for part, value in static.rounded(
                FloatLayer(weight, torch.bfloat16, inputs=seen)
            ).items():
                tensors[f"{prefix}.{part}"] = value
                description[f"{prefix}.{part}"] = "W8A8"
    rewrite(directory, tensors, description)
    assert check_checkpoint(directory).can_load
    assert_close(directory, tiny_deepseek, tensor_parallel_size=ranks)


def test_layers_that_stayed_floats_run_among_quantized_ones(
    quantize, tiny_deepseek, of_floats, start_engine, text
):
    directory = quantize(tiny_deepseek, "W8A8_DYNAMIC", name="mixed")
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    without_entry = "model.layers.3.mlp.shared_experts."
    for name, weight in load_file(tiny_deepseek / WEIGHTS).items():
        if name.startswith(
            ("model.layers.1.mlp.experts.", "model.layers.2.self_attn.o_proj", without_entry)
        ):
            prefix = name.removesuffix(".weight")
            for part in ("weight", "weight_scale", "weight_offset"):
                del tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"]
            tensors[name] = weight
            if not name.startswith(without_entry):
                description[name] = "FLOAT"
    rewrite(directory, tensors, description)
    assert check_checkpoint(directory).can_load
    with start_engine(directory, **BF16) as engine:
        value = likelihood(engine, text)
        log = engine.log_text()
    assert abs(value - of_floats(tiny_deepseek)) < CLOSE
    told = [line for line in log.splitlines() if "has no entry for" in line]
    assert len(told) == 1
    assert all(f"{without_entry}{name}" in told[0] for name in ("gate_up_proj", "down_proj"))
    assert "model.layers.1" not in told[0]
    assert "model.layers.2" not in told[0]


def as_compressed_tensors(directory: Path, source: Path, kind: str) -> Path:
    """Rewrites an int8 checkpoint in place, with int8 in layers that our exporter leaves float."""
    (directory / DESCRIPTION).unlink()
    tensors = tensors_of(directory)
    for name in [name for name in tensors if name.endswith(".deq_scale")]:
        prefix = name.removesuffix(".deq_scale")
        weight_scale = tensors[name] / tensors[f"{prefix}.input_scale"]
        tensors[f"{prefix}.weight_scale"] = weight_scale.unsqueeze(1)
        offset = f"{prefix}.input_offset"
        tensors[offset] = tensors[offset].to(torch.int8)
    for name, weight in load_file(source / WEIGHTS).items():
        if name.endswith("kv_b_proj.weight"):
            prefix = name.removesuffix(".weight")
            made = find_scheme("W8A8_DYNAMIC", "p").rounded(FloatLayer(weight, torch.bfloat16))
            tensors |= {f"{prefix}.{part}": tensor for part, tensor in made.items()}
    renamed = {
        name.replace("input_offset", "input_zero_point"): tensor
        for name, tensor in tensors.items()
        if not name.endswith(("weight_offset", "deq_scale", "quant_bias"))
    }
    rewrite(directory, renamed)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = compressed_int8(is_static=kind == "W8A8")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param("tiny_llama", "W8A8_DYNAMIC", id="dynamic", marks=pytest.mark.thorough),
        pytest.param("tiny_llama", "W8A8", id="static", marks=pytest.mark.thorough),
        pytest.param("tiny_deepseek", "W8A8_DYNAMIC", id="experts"),
    ],
)
def test_a_compressed_tensors_checkpoint_runs(model, kind, request, quantize, assert_close):
    source = request.getfixturevalue(model)
    directory = quantize(source, kind, name=f"compressed-{model}")
    as_compressed_tensors(directory, source, kind)
    assert check_checkpoint(directory).can_load
    assert_close(directory, source)
