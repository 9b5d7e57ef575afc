"""int8 checkpoints through the whole stack: loaded as described, close to their float source."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.quantization.weight_only import unpacked_rows
from vllm_davinci_testing.engines.engine_process import ON_910C, EngineError
from vllm_davinci_testing.engines.fp8_checkpoint import (
    deepseek_of_blocks,
    dequantized,
    write_block_fp8,
)
from vllm_davinci_testing.engines.int8_checkpoint import (
    as_type,
    compressed_int8,
    rewrite,
    tensors_of,
)
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.likelihood import CLOSE, likelihood
from vllm_davinci_testing.engines.model_zoo import fill_with_normal_weights, write_tokenizer
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

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


# Norms with biases, and block-wise fp8 weights, equal transformers with the same numbers.

BIAS = 0.3  # standard deviation of the norms' biases


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param("tiny_llama", "W8A8", id="dense_static", marks=pytest.mark.thorough),
        pytest.param("tiny_llama", "W8A8_DYNAMIC", id="dense", marks=pytest.mark.thorough),
        pytest.param("tiny_deepseek", "W8A8_DYNAMIC", id="latent"),
    ],
)
def test_biases_of_norms_equal_transformers(model, kind, request, quantize, text, likelihood_of):
    source = request.getfixturevalue(model)
    directory = quantize(source, kind, name=f"biased-{model}")
    reference = TransformersReference(source)

    def expected() -> float:
        rows = reference.logprobs(text)[:-1]
        return float(rows.gather(1, torch.tensor(text[1:]).unsqueeze(1)).mean())

    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    generator = torch.Generator().manual_seed(0)

    def add_to(norm: torch.nn.Module, name: str) -> None:
        bias = (torch.randn(norm.weight.shape, generator=generator) * BIAS).bfloat16()
        tensors[f"{name}.bias"], description[f"{name}.bias"] = bias, kind
        norm.register_forward_hook(lambda module, inputs, output: output + bias.float())

    found = []
    for kinds in (("input_layernorm", "q_a_layernorm"), ("kv_a_layernorm", "post_attention")):
        found.append(expected())
        for name, module in reference.network.named_modules():
            if any(part in name for part in kinds):
                add_to(module, name)
    found.append(expected())
    # Each kind of bias has an effect.
    assert min(abs(one - other) for one, other in pairwise(found)) > 2 * CLOSE, found
    rewrite(directory, tensors, description)
    actual = likelihood_of(directory)
    assert abs(actual - found[-1]) < CLOSE


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes a small DeepSeek-V3 with block-wise fp8 weights, and the equivalent floats."""
    config = deepseek_of_blocks(vocab_size=512, scoring_func="sigmoid", max_position_embeddings=512)
    directory = tmp_path_factory.mktemp("fp8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config)
        fill_with_normal_weights(network)
    network.save_pretrained(directory / "source")
    blocks = write_block_fp8(directory / "source", directory / "blocks")
    floats = directory / "floats"
    shutil.copytree(directory / "source", floats)
    save_file(dequantized(blocks), floats / "model.safetensors", metadata={"format": "pt"})
    for checkpoint in (blocks, floats):
        write_tokenizer(checkpoint)
    return blocks, floats


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_fp8_in_blocks_gives_the_tokens_of_its_floats(ranks, fp8, start_engine, prompts):
    blocks, floats = fp8
    options = {"tensor_parallel_size": ranks, "enable_expert_parallel": ranks > 1}
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with start_engine(blocks, **options) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts[:16]], greedy)
        assert "which become floats of twice their size" in engine.log_text()
    assert_greedy(TransformersReference(floats), prompts[:16], outputs, 16)


@pytest.mark.thorough
def test_block_fp8_becomes_int8_with_the_option(fp8, likelihood_of, text):
    blocks, floats = fp8
    within = [token % 512 for token in text]
    rows = TransformersReference(floats).logprobs(within)[:-1]
    expected = float(rows.gather(1, torch.tensor(within[1:]).unsqueeze(1)).mean())
    with_int8 = likelihood_of(blocks, quantization="ascend", text=within)
    assert 0 < abs(with_int8 - expected) < CLOSE


# ModelSlim's types that our exporter does not write give the tokens of plain integers.

EXPERTS = "deepseek_v3_moe"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("model", "most_wrong"),
    [
        ("tiny_llama", 0),
        # In 16 bits, other experts win by a tiny margin.
        pytest.param("tiny_deepseek", 3, marks=pytest.mark.thorough),
    ],
)
def test_tokens_of_mixed_layers_equal_those_of_dynamic_ones(
    model, most_wrong, request, quantize, start_engine, prompts
):
    directory = as_type(quantize, request.getfixturevalue(model), "W8A8_MIX")
    assert check_checkpoint(directory).can_load
    given = prompts[6:14]
    with start_engine(directory, dtype="bfloat16") as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = IntegerReference(directory).differing_tokens(given, tokens)
    assert wrong <= most_wrong, (close, wrong)
    assert close <= 12  # of 128


@pytest.mark.thorough
def test_mixed_layers_of_an_engine_that_only_decodes_are_static_ones(
    tiny_llama, tmp_path, quantize, start_engine, prompts
):
    directory = as_type(quantize, tiny_llama, "W8A8_MIX")
    static = tmp_path / "static"
    shutil.copytree(directory, static)
    description = json.loads((directory / DESCRIPTION).read_text())
    kinds = {name: "W8A8" if kind == "W8A8_MIX" else kind for name, kind in description.items()}
    assert kinds != description
    (static / DESCRIPTION).write_text(json.dumps(kinds))
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    given = prompts[6:14]
    with start_engine(directory, dtype="bfloat16", kv_transfer_config=transfer) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in given], GREEDY)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    close, wrong = IntegerReference(static).differing_tokens(given, tokens)
    assert wrong == 0, close
    close_to_dynamic, wrong_of_dynamic = IntegerReference(directory).differing_tokens(given, tokens)
    assert close_to_dynamic + wrong_of_dynamic > close


def in_eight_bits(directory: Path, target: Path) -> Path:
    """Writes the same integers as a W8A8_DYNAMIC export."""
    shutil.copytree(directory, target)
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    for name in [name for name, kind in description.items() if kind == "W4A8_DYNAMIC"]:
        if name.endswith(".scale_bias"):
            del tensors[name], description[name]
            continue
        description[name] = "W8A8_DYNAMIC"
        if name.endswith(".weight"):
            tensors[name] = unpacked_rows(tensors[name])
    rewrite(target, tensors, description)
    return target


# at start, the engine asks the product about sizes that it may not support
@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        pytest.param({}, True, id="one_rank"),
        pytest.param(
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            True,
            id="two_ranks_of_experts",
            marks=pytest.mark.thorough,
        ),
        # Half an expert has 32 inputs, and the product requires a multiple of 64.
        pytest.param(
            {"tensor_parallel_size": 2}, False, id="halves_of_experts", marks=pytest.mark.thorough
        ),
    ],
)
def test_4_bit_weights_give_the_results_of_8_bit_ones(
    options, is_kept, zoo, quantize, start_engine, text, tmp_path
):
    directory = as_type(quantize, zoo(EXPERTS), "W4A8_DYNAMIC")
    assert check_checkpoint(directory).can_load
    read = [token % 256 for token in text[:200]]
    found = {}
    for model in (directory, in_eight_bits(directory, tmp_path / "eight")):
        with start_engine(model, dtype="bfloat16", **options) as engine:
            found[model] = likelihood(engine, read)
            is_unpacked = "weights are stored in 8 bits" in engine.log_text()
        assert is_unpacked == (model == directory and not is_kept)
    four, eight = found.values()
    rows = IntegerReference(directory).logprobs(read)[:-1]
    defined = float(rows.gather(1, torch.tensor(read[1:]).unsqueeze(1)).mean())
    assert abs(four - eight) < 0.002
    assert abs(four - defined) < CLOSE


EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("part", "change", "told"),
    [
        ("weight_scale", lambda scale: scale.repeat(1, 2), "[96, 2]"),
        ("weight", lambda weight: weight[1:], "[94, 1]"),
        ("weight", lambda weight: weight.float(), "float32"),
        ("scale_bias", lambda bias: bias.repeat(1, 3), "[96, 3]"),
    ],
    ids=["groups", "rows_short", "floats", "parts"],
)
def test_bad_weights_of_four_bits_are_named(part, change, told, tiny_deepseek, quantize):
    directory = as_type(quantize, tiny_deepseek, "W4A8_DYNAMIC", "experts")
    whole = tensors_of(directory)
    name = f"{EXPERT}.{part}"
    rewrite(directory, {**whole, name: change(whole[name]).contiguous()})
    report = check_checkpoint(directory)
    rewrite(directory, whole)
    assert not report.can_load
    said = [str(issue) for issue in report.issues if EXPERT in str(issue)]
    assert any(told in each for each in said), said


def test_experts_that_are_not_symmetric_end_the_start(tiny_deepseek, quantize, start_engine):
    directory = as_type(quantize, tiny_deepseek, "W4A8_DYNAMIC", "experts.")
    tensors = tensors_of(directory)
    tensors[f"{EXPERT}.weight_offset"] += 1
    rewrite(directory, tensors)
    with pytest.raises(EngineError, match=r"w13_weight_offset.* is not zero"):
        start_engine(directory, dtype="bfloat16")
