"""int8 checkpoints through the whole stack: loaded as they say, close to what they were made of."""

from __future__ import annotations

import json
import math
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
from vllm_davinci.core.export.calibration import input_ranges
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.rounding import FloatLayer, InputRange
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.weight_files.files import QUANTIZED_INDEX_NAME
from vllm_davinci_testing.engines.engine_process import ON_910C, EngineError, EngineProcess
from vllm_davinci_testing.engines.fp8_checkpoint import (
    deepseek_of_blocks,
    dequantized,
    write_block_fp8,
)
from vllm_davinci_testing.engines.model_zoo import (
    POISONED_EXPERT,
    POISONS,
    fill_with_normal_weights,
    write_poisoned,
    write_tokenizer,
)
from vllm_davinci_testing.engines.transformers_reference import (
    TransformersReference,
    assert_greedy,
)

BF16 = {"dtype": "bfloat16", "max_model_len": 512}
WEIGHTS = "model.safetensors"
WRITTEN = "quant_model_weights-*.safetensors"  # one for each file of the source
# How far the mean log-likelihood of a short text may move. Its perplexity moves by as many parts;
# the figures over long texts are those of benchmarks/quantization/perplexity.py.
CLOSE = 0.05
BIAS = 0.3  # the standard deviation of biases of norms

Quantize = Callable[..., Path]


@pytest.fixture(scope="module")
def text(tiny_llama: Path) -> list[int]:
    """Tokens of a source file that both trained checkpoints can read."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    source = Path(json.__file__).read_text(encoding="utf-8")[6000:]
    return [tokenizer.bos_token_id, *tokenizer(source, add_special_tokens=False).input_ids[:400]]


@pytest.fixture(scope="module")
def quantize(tmp_path_factory: pytest.TempPathFactory, text: list[int]) -> Quantize:
    """Writes an int8 checkpoint from a float one; its directory. Once per set of arguments."""

    @cache
    def write(
        source: Path, kind: str, dtype: torch.dtype = torch.bfloat16, name: str = "shared"
    ) -> Path:
        directory = tmp_path_factory.mktemp(name) / kind
        ranges = {}
        if kind == "W8A8":
            ranges = input_ranges(source, [torch.tensor([text])], lambda count: None)
        Exporter(source, directory, kind, dtype, ranges).run(lambda count: None)
        return directory

    return write


def likelihood(engine: EngineProcess, text: list[int]) -> float:
    """Mean log-likelihood per token; also generates, so that decoding runs."""
    (output,) = engine.generate(
        [{"prompt_token_ids": text}],
        SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=0, ignore_eos=True),
    )
    assert len(output.outputs[0].token_ids) == 16
    found = [
        candidates[token].logprob
        for token, candidates in zip(text[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert all(map(math.isfinite, found))
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def likelihood_of(
    start_engine: Callable[..., EngineProcess], text: list[int]
) -> Callable[..., float]:
    """Starts an engine and scores the text."""

    def score(model: Path, text: list[int] = text, **options: Any) -> float:
        with start_engine(model, **{**BF16, **options}) as engine:
            return likelihood(engine, text)

    return score


@pytest.fixture(scope="module")
def of_floats(likelihood_of: Callable[..., float]) -> Callable[[Path], float]:
    return cache(likelihood_of)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint that was exported."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob(WRITTEN)):
        found |= load_file(file)
    return found


def rewrite(
    directory: Path, tensors: dict[str, torch.Tensor], description: dict[str, Any] | None = None
) -> None:
    """Other tensors and another description for a checkpoint that was exported, in one file."""
    (directory / QUANTIZED_INDEX_NAME).unlink(missing_ok=True)
    for file in directory.glob(WRITTEN):
        file.unlink()
    save_file(tensors, directory / WRITTEN.replace("*", "of-one"), metadata={"format": "pt"})
    if description is not None:
        (directory / DESCRIPTION).write_text(json.dumps(description))


def test_the_description_alone_selects_the_method(
    quantize: Quantize,
    tiny_llama: Path,
    of_floats: Callable[[Path], float],
    start_engine: Callable[..., EngineProcess],
    text: list[int],
):
    with start_engine(quantize(tiny_llama, "W8A8_DYNAMIC"), **BF16) as engine:
        value = likelihood(engine, text)
        log = engine.log_text()
    assert "quantization: None -> ascend" in log
    assert "has no entry" not in log
    assert value != of_floats(tiny_llama)
    assert abs(value - of_floats(tiny_llama)) < CLOSE


@pytest.mark.parametrize(("dtype", "chip"), [("bfloat16", {}), ("float16", ON_910C)])
def test_static_layers_run_in_both_dtypes(
    dtype: str,
    chip: dict[str, str],
    quantize: Quantize,
    tiny_llama: Path,
    of_floats: Callable[[Path], float],
    likelihood_of: Callable[..., float],
):
    model = quantize(tiny_llama, "W8A8", getattr(torch, dtype))
    value = likelihood_of(model, dtype=dtype, quantization="ascend", environment=chip)
    assert abs(value - of_floats(tiny_llama)) < CLOSE


def test_ranks_add_a_static_bias_once(
    quantize: Quantize,
    tiny_llama: Path,
    of_floats: Callable[[Path], float],
    likelihood_of: Callable[..., float],
):
    # The bias holds the offset's share of every sum: twice of it leaves nothing of the text.
    value = likelihood_of(quantize(tiny_llama, "W8A8"), tensor_parallel_size=2)
    assert abs(value - of_floats(tiny_llama)) < CLOSE


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_the_nz_layout_changes_no_bit(
    kind: str,
    quantize: Quantize,
    tiny_deepseek: Path,
    likelihood_of: Callable[..., float],
):
    model, nz = quantize(tiny_deepseek, kind), {"enable_weight_nz_layout": True}
    plain = likelihood_of(model, environment=ON_910C)
    assert plain == likelihood_of(model, environment=ON_910C, additional_config=nz)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("W8A8_DYNAMIC", {}, id="dynamic"),
        pytest.param("W8A8", {"environment": ON_910C}, id="static"),
        pytest.param("W8A8_DYNAMIC", {"tensor_parallel_size": 2}, id="tensor2"),
        pytest.param(
            "W8A8_DYNAMIC",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "environment": ON_910C},
            id="expert2",
        ),
    ],
)
def test_latent_attention_and_experts_run_quantized(
    kind: str,
    options: dict[str, Any],
    quantize: Quantize,
    tiny_deepseek: Path,
    of_floats: Callable[[Path], float],
    likelihood_of: Callable[..., float],
):
    value = likelihood_of(quantize(tiny_deepseek, kind), **options)
    assert abs(value - of_floats(tiny_deepseek)) < CLOSE


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_with_input_scales_of_their_own_run(
    ranks: int,
    quantize: Quantize,
    tiny_deepseek: Path,
    of_floats: Callable[[Path], float],
    likelihood_of: Callable[..., float],
):
    directory = quantize(tiny_deepseek, "W8A8_DYNAMIC", name=f"static-experts-{ranks}")
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    for name, weight in load_file(tiny_deepseek / WEIGHTS).items():
        if ".experts." in name:
            prefix = name.removesuffix(".weight")
            for part in ("weight", "weight_scale", "weight_offset"):
                del tensors[f"{prefix}.{part}"], description[f"{prefix}.{part}"]
            # Ranges that hold all but a few of this model's activations.
            seen = InputRange(-4, 4) if "down_proj" in name else InputRange(-6, 6)
            static = find_scheme("W8A8", name)
            for part, value in static.rounded(
                FloatLayer(weight, torch.bfloat16, inputs=seen)
            ).items():
                tensors[f"{prefix}.{part}"] = value
                description[f"{prefix}.{part}"] = "W8A8"
    rewrite(directory, tensors, description)
    assert check_checkpoint(directory).can_load
    value = likelihood_of(directory, tensor_parallel_size=ranks)
    assert abs(value - of_floats(tiny_deepseek)) < CLOSE


def test_layers_that_stayed_floats_run_among_quantized_ones(
    quantize: Quantize,
    tiny_deepseek: Path,
    of_floats: Callable[[Path], float],
    start_engine: Callable[..., EngineProcess],
    text: list[int],
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
    """Rewrites an int8 checkpoint of ours in place; what is float for us may be int8 there."""
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
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    dynamic = {**int8, "strategy": "token", "dynamic": True}
    static = {**int8, "strategy": "tensor", "dynamic": False, "symmetric": False}
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**int8, "strategy": "channel", "dynamic": False},
                "input_activations": static if kind == "W8A8" else dynamic,
            }
        },
    }
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
def test_a_compressed_tensors_checkpoint_runs(
    model: str,
    kind: str,
    request: pytest.FixtureRequest,
    quantize: Quantize,
    of_floats: Callable[[Path], float],
    likelihood_of: Callable[..., float],
):
    source = request.getfixturevalue(model)
    directory = quantize(source, kind, name=f"compressed-{model}")
    as_compressed_tensors(directory, source, kind)
    assert check_checkpoint(directory).can_load
    assert abs(likelihood_of(directory) - of_floats(source)) < CLOSE


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param("tiny_llama", "W8A8", id="dense_static"),
        pytest.param("tiny_llama", "W8A8_DYNAMIC", id="dense", marks=pytest.mark.thorough),
        pytest.param("tiny_deepseek", "W8A8_DYNAMIC", id="latent"),
    ],
)
def test_biases_of_norms_do_what_they_do_in_transformers(
    model: str,
    kind: str,
    request: pytest.FixtureRequest,
    quantize: Quantize,
    text: list[int],
    likelihood_of: Callable[..., float],
):
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
    # Each kind of bias matters.
    assert min(abs(one - other) for one, other in pairwise(found)) > 2 * CLOSE, found
    rewrite(directory, tensors, description)
    actual = likelihood_of(directory)
    assert abs(actual - found[-1]) < CLOSE


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """DeepSeek-V3's shape with fp8 weights in blocks, and the floats that these stand for."""
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
    save_file(dequantized(blocks), floats / WEIGHTS, metadata={"format": "pt"})
    for checkpoint in (blocks, floats):
        write_tokenizer(checkpoint)
    return blocks, floats


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_in_blocks_gives_the_tokens_of_its_floats(
    ranks: int,
    fp8: tuple[Path, Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    blocks, floats = fp8
    options = {"tensor_parallel_size": ranks, "enable_expert_parallel": ranks > 1}
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with start_engine(blocks, **options) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts[:16]], greedy)
        assert "which become floats of twice their size" in engine.log_text()
    assert_greedy(TransformersReference(floats), prompts[:16], outputs, 16)


def test_fp8_in_blocks_becomes_int8_where_the_option_says_so(
    fp8: tuple[Path, Path], likelihood_of: Callable[..., float], text: list[int]
):
    blocks, floats = fp8
    within = [token % 512 for token in text]
    rows = TransformersReference(floats).logprobs(within)[:-1]
    expected = float(rows.gather(1, torch.tensor(within[1:]).unsqueeze(1)).mean())
    with_int8 = likelihood_of(blocks, quantization="ascend", text=within)
    assert 0 < abs(with_int8 - expected) < CLOSE


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8"])
def test_requests_beside_poisoned_ones_get_the_tokens_that_they_get_alone(
    kind: str,
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
    tmp_path: Path,
):
    source = write_poisoned(zoo("qwen3_moe_softmax_top2_of_8"), tmp_path / "source")
    clean = [[token for token in prompt if token not in POISONS] for prompt in prompts[:12]]
    ranges = {}
    if kind == "W8A8":
        ranges = input_ranges(source, [torch.tensor([clean[5]])], lambda count: None)
    model = tmp_path / kind
    # A scale that is not a number does not load. One of the largest makes every product of the
    # expert infinite.
    floats = load_file(source / WEIGHTS)
    expert = f"layers.0.mlp.experts.{POISONED_EXPERT}.down_proj"
    for name in [name for name in floats if expert in name]:
        assert floats[name].isnan().all()
        floats[name] = torch.ones_like(floats[name])
    save_file(floats, source / WEIGHTS, metadata={"format": "pt"})
    Exporter(source, model, kind, torch.bfloat16, ranges).run(lambda count: None)
    tensors = tensors_of(model)
    for name in [name for name in tensors if name.endswith(f"{expert}.weight_scale")]:
        tensors[name].fill_(torch.finfo(torch.float32).max)
    rewrite(model, tensors)
    poisoned = [[*prompt, POISONS[number % 3]] for number, prompt in enumerate(clean)]
    mixed = [prompt for pair in zip(clean, poisoned, strict=True) for prompt in pair]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens(engine: EngineProcess, batch: list[list[int]]) -> list[list[int]]:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in batch], greedy)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with start_engine(model, **BF16) as engine:
        alone = tokens(engine, clean)
        beside = tokens(engine, mixed)[::2]
        again = tokens(engine, clean)  # in cache blocks that held the poison before
    assert len({tuple(each) for each in alone}) > len(alone) // 2
    for expected, *seen in zip(alone, beside, again, strict=True):
        if not set(expected) & set(POISONS):  # else it has made a poison of its own
            assert seen == [expected, expected]


def spoilt(directory: Path, tensor: str, type_name: str | None) -> Path:
    """Takes a tensor out of a checkpoint, or gives its entry another type."""
    tensors = tensors_of(directory)
    description = json.loads((directory / DESCRIPTION).read_text())
    if type_name is None:
        del tensors[tensor]
    else:
        description[tensor] = type_name
    rewrite(directory, tensors, description)
    return directory


EXPERT = "model.layers.2.mlp.experts.5"


@pytest.mark.parametrize(
    ("tensor", "type_name", "told"),
    [
        (
            "model.layers.0.mlp.down_proj.weight_scale",
            None,
            "model.layers.0.mlp.down_proj.weight_scale: is missing: W8A8_DYNAMIC needs it",
        ),
        (f"{EXPERT}.up_proj.weight_scale", None, f"{EXPERT}.up_proj.weight_scale: is missing"),
        (f"{EXPERT}.up_proj.weight", "FLOAT", f"{EXPERT}.up_proj FLOAT"),
        (f"{EXPERT}.up_proj.weight", "W4A4_DYNAMIC", "'W4A4_DYNAMIC', and FLOAT, W4A16"),
        ("model.layers.0.mlp.up_proj.weight", "W8A8", "model.layers.0.mlp.up_proj W8A8"),
        (
            "model.layers.0.self_attn.o_proj.weight",
            "FLOAT",
            "model.layers.0.self_attn.o_proj.weight: holds int8 and would be loaded as FLOAT",
        ),
        (
            "model.layers.1.input_layernorm.bias",
            "W8A8_DYNAMIC",
            "model.layers.1.input_layernorm.bias: 1 tensors have an entry in the description and",
        ),
    ],
)
def test_a_bad_checkpoint_ends_the_start_with_its_tensor_named(
    tensor: str,
    type_name: str | None,
    told: str,
    quantize: Quantize,
    tiny_deepseek: Path,
    start_engine: Callable[..., EngineProcess],
):
    # The name keeps this one's directory apart from all others.
    name = f"bad-{tensor.replace('.', '-')}-{type_name}"
    model = spoilt(quantize(tiny_deepseek, "W8A8_DYNAMIC", name=name), tensor, type_name)
    with pytest.raises(EngineError) as error:
        start_engine(model, **BF16)
    assert told in str(error.value)


def test_the_option_on_a_float_checkpoint_says_how_to_make_one(
    tiny_llama: Path, start_engine: Callable[..., EngineProcess]
):
    with pytest.raises(
        EngineError, match=r"needs quant_model_description\.json beside the weights"
    ):
        start_engine(tiny_llama, quantization="ascend", **BF16)
