"""GLM-5.3-Flash and Qwen3.8-Flash-Next: delta rules, and attention to selected groups of tokens.

Tokens equal transformers'.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci_testing.engines import glm5_next_model, qwen4_exp_model
from vllm_davinci_testing.engines.compressed_zoo import in_transformers
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.drafters import WRONG
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.fp8_checkpoint import EXPERTS, dequantized, write_block_fp8
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    TWO_RANKS,
    assert_generates,
    greedy_tokens,
    paths,
    random_prompts,
)
from vllm_davinci_testing.engines.glm5_next_model import CHOSEN, POOL
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.model_zoo import EOS_ID
from vllm_davinci_testing.engines.preemption import COUNTED, assert_no_layer_waits, few_blocks
from vllm_davinci_testing.engines.speculating import speculation, told
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy
from vllm_davinci_testing.engines.vision_zoo import write_vision_checkpoint

MAX_TOKENS = 12
OF_TEXT = {"max_model_len": 640, "limit_mm_per_prompt": {"image": 0, "video": 0}}
# With graphs, an operator reads the keys of groups in pages of 16.
GRAPHS = {**IN_PARTS, "block_size": 16 * POOL}
FOUR_RANKS = {**TWO_RANKS, "tensor_parallel_size": 4}
INDEXER = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
# A part of the released list.
KEPT = ["lm_head", "model.visual", "model.language_model.layers.0.ple.key_proj", "mtp.fc_hidden"]
# Prompt lengths around the size of a group, of CHOSEN groups, and of a block.
LENGTHS = [
    *(1, POOL - 1, POOL, POOL + 1),
    *(CHOSEN * POOL - 3, (CHOSEN + 1) * POOL - 1, (CHOSEN + 1) * POOL + 5, CHOSEN * POOL * 2 + 7),
    *(127, 128, 129, 255, 256 + 45, 512 + 3),
]


def change_section(checkpoint: Path, section: str, changed: dict[str, Any]) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config[section] |= changed
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Makes random prompts with two end-of-text tokens, which end n-grams."""
    prompts = random_prompts(lengths, seed)
    for prompt in prompts:
        prompt[-2:-1] = prompt[len(prompt) // 3 : len(prompt) // 3 + 1] = [EOS_ID]
    return [prompt[-length:] for prompt, length in zip(prompts, lengths, strict=True)]


@pytest.fixture(scope="module", params=["glm5_next", "qwen4_exp"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> TransformersReference:
    return TransformersReference(checkpoint)


@pytest.mark.parametrize(
    "options",
    paths(
        {
            "whole": {},
            "synchronous": {"async_scheduling": False},
            "blocks_of_128_in_parts": IN_PARTS,
            "tensor2_in_parts": {**TWO_RANKS, **GRAPHS},
            "tensor4": FOUR_RANKS,
            "expert2": {**TWO_RANKS, "enable_expert_parallel": True},
        },
        nightly=GRAPHS,
    ),
)
def test_tokens_equal_those_of_transformers_in_any_order_that_events_allow(
    options: dict[str, Any],
    checkpoint: Path,
    expected: TransformersReference,
    start_engine: StartEngine,
):
    with start_engine(checkpoint, environment=FUZZED, **OF_TEXT, **options) as engine:
        assert_generates(engine, expected, prompts_of(LENGTHS), MAX_TOKENS)
        replays = [sum(each.values()) for each in engine.on_workers("graph_replays")]
    assert all(replays) if "block_size" in options else not any(replays)


@pytest.mark.thorough
def test_preempted_prompts_give_the_same_tokens_and_no_layer_waits(
    checkpoint: Path, expected: TransformersReference, start_engine: StartEngine
):
    with start_engine(
        checkpoint,
        environment=FUZZED,
        **COUNTED,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        **few_blocks(40),
        **OF_TEXT,
    ) as engine:
        assert_no_layer_waits(engine, expected, prompts_of([120] * 10, seed=3), 40)


@pytest.mark.thorough
def test_data_parallel_ranks_of_which_one_is_idle_give_the_same_tokens(
    checkpoint: Path, expected: TransformersReference, start_engine: StartEngine
):
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = prompts_of([259, 3, 10, 17])
    options = {"enable_expert_parallel": True, **GRAPHS, **OF_TEXT}
    with DPEngines(start_engine, checkpoint, 2, environment=FUZZED, **options) as engines:
        # The second rank either ends before the other's first prompt, or has no request.
        for given in (prompts, prompts[:1]):
            outputs = engines.generate(given, greedy)
            assert_greedy(expected, given, outputs, MAX_TOKENS)


@pytest.fixture(scope="module")
def predicting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_glm = checkpoint.name.startswith("glm")
    with_mtp = glm5_next_model.with_mtp if is_glm else qwen4_exp_model.with_mtp
    return with_mtp(checkpoint, tmp_path_factory.mktemp("mtp") / "checkpoint")


# Draft rejections hit every position of a group, also after a draft has completed it.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "count", "options"),
    [
        pytest.param("mtp", 3, GRAPHS, id="mtp_3"),
        pytest.param("mtp", 1, {}, id="mtp_1_whole"),
        pytest.param("mtp", 2, {**TWO_RANKS, "enable_expert_parallel": True}, id="mtp_2_expert2"),
        pytest.param("custom_class", 5, {}, id="wrong_5"),
        pytest.param(
            "custom_class",
            3,
            {**TWO_RANKS, **GRAPHS, "async_scheduling": False},
            id="wrong_3_tensor2",
        ),
    ],
)
def test_drafts_change_no_token(
    method: str,
    count: int,
    options: dict[str, Any],
    predicting: Path,
    expected: TransformersReference,
    start_engine: StartEngine,
):
    if method != "mtp" and expected.network.config.model_type.startswith("qwen4_exp"):
        pytest.skip("vLLM takes drafts of this model's MTP layer and of n-grams alone")
    drafter = {} if method == "mtp" else {"model": WRONG}
    asked = {**speculation(method, count, **drafter), **OF_TEXT, **options}
    with start_engine(predicting, environment=FUZZED, **asked) as engine:
        assert_generates(engine, expected, prompts_of([1, POOL - 2, POOL * 5, 127]), 3 * MAX_TOKENS)
        drafted, accepted = told(engine)
    print(f"{method} {count}: {accepted} of {drafted} drafts accepted")
    assert (0 if method == "mtp" else -1) < accepted < drafted


@pytest.fixture(scope="module")
def fp8(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes Qwen3.8-Flash-Next as its fp8 files are released, and the equivalent floats."""
    if not checkpoint.name.startswith("qwen4"):
        pytest.skip("released in fp8 are only Qwen3.8-Flash-Next's experts and tables")
    directory = tmp_path_factory.mktemp("fp8")
    source = qwen4_exp_model.with_mtp(checkpoint, directory / "source")
    blocks = write_block_fp8(source, directory / "qwen4_exp_fp8", rounded=EXPERTS)
    change_section(blocks, "quantization_config", {"modules_to_not_convert": KEPT})
    floats = directory / "floats"
    shutil.copytree(checkpoint, floats)
    tensors = {name: each for name, each in dequantized(blocks).items() if name[:4] != "mtp."}
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    return blocks, floats


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole"),
        pytest.param({**TWO_RANKS, **GRAPHS, "enable_expert_parallel": True}, id="expert2_graphs"),
        pytest.param({**speculation("mtp", 3), **GRAPHS}, id="mtp_3"),
    ],
)
def test_released_fp8_gives_the_tokens_of_its_floats(
    options: dict[str, Any], fp8: tuple[Path, Path], start_engine: StartEngine
):
    blocks, floats = fp8
    report = check_checkpoint(blocks)
    assert report.can_load, report.problems()
    with start_engine(blocks, environment=FUZZED, **OF_TEXT, **options) as engine:
        assert_generates(engine, TransformersReference(floats), prompts_of(LENGTHS), MAX_TOKENS)
        drafted, accepted = told(engine) if "speculative_config" in options else (2, 1)
    print(f"{accepted} of {drafted} drafts accepted")
    assert 0 < accepted < drafted


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["ngram_embedding.weight_scale", "5.up_proj.weight_scale_inv"])
def test_a_missing_scale_is_named(
    part: str, fp8: tuple[Path, Path], start_engine: StartEngine, tmp_path: Path
):
    copy = tmp_path / "model"
    shutil.copytree(fp8[0], copy)
    for path in copy.glob("*.safetensors"):
        kept = {name: each for name, each in load_file(path).items() if not name.endswith(part)}
        save_file(kept, path, metadata={"format": "pt"})
    assert any(part in problem for problem in check_checkpoint(copy).problems())
    for options in ({}, {"quantization": "ascend", "dtype": "bfloat16"}):
        with pytest.raises(EngineError, match=rf"{part}\b"):
            start_engine(copy, **OF_TEXT, **options)


def without_images(name: str) -> str:
    """Translates a tensor's name to the name in the text-only model."""
    return name.replace(".language_model.", ".")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [GRAPHS, {**TWO_RANKS, "enable_expert_parallel": True}])
def test_an_int8_export_gives_the_tokens_of_its_integers(
    options: dict[str, Any],
    checkpoint: Path,
    expected: TransformersReference,
    quantize: Callable[..., Path],
    start_engine: StartEngine,
):
    assert_exact_integers(quantize(checkpoint, "W8A8_DYNAMIC"), expected, options, start_engine)


@pytest.mark.thorough
def test_an_int8_export_of_released_fp8_keeps_tables_in_8_bits(
    fp8: tuple[Path, Path], quantize: Callable[..., Path], start_engine: StartEngine
):
    blocks, floats = fp8
    directory = quantize(blocks, "W8A8_DYNAMIC")
    kinds = check_checkpoint(directory).kinds
    assert {kind.dtype for kind in kinds if "ngram" in kind.name} == {"float8_e4m3fn"}
    assert_exact_integers(directory, TransformersReference(floats), GRAPHS, start_engine)


def assert_exact_integers(
    directory: Path,
    expected: TransformersReference,
    options: dict[str, Any],
    start_engine: StartEngine,
) -> None:
    """expected: the floats before rounding, in which convolutions and tables are whole"""
    report = check_checkpoint(directory)
    assert report.can_load, report.problems()
    prompts = prompts_of(LENGTHS)
    asked = {"dtype": "bfloat16", **options, **OF_TEXT}
    with start_engine(directory, environment=FUZZED, **asked) as engine:
        tokens = greedy_tokens(engine, prompts, MAX_TOKENS)
    auto_class: Any = transformers.AutoModelForCausalLM
    named: Callable[[str], str] = without_images
    if expected.network.config.model_type == "glm5_next":
        auto_class = transformers.AutoModelForImageTextToText
        named = partial(in_transformers, model_type="glm5_next")
    exact, rounded = (
        IntegerReference(directory, auto_class, named=named, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for name, module in expected.network.named_modules():
        if name.endswith(("conv1d", "ngram_embedding")):  # files store these in parts
            for integers in (exact, rounded):
                own = integers.network.get_submodule(name).weight
                own.data.copy_(module.weight.bfloat16())
    # An input rounded to 16 bits may become another integer.
    in_16_bits = [rounded.greedy(each, MAX_TOKENS) for each in prompts]
    ours = sum(exact.differing_tokens(prompts, tokens))
    allowed = sum(exact.differing_tokens(prompts, in_16_bits))
    print(f"differing tokens: {ours} of {MAX_TOKENS * len(prompts)}, of 16 bits {allowed}")
    assert ours <= 1.25 * allowed


def _other(checkpoint: str, changed: dict[str, Any], message: str, **options: Any) -> Any:
    return pytest.param(checkpoint, changed, message, options, id=message)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("checkpoint", "changed", "message", "options"),
    [
        _other("glm5_next", {"indexer_types": ["full"] * 3 + ["shared"]}, "indexer_types"),
        _other(
            "glm5_next",
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail",
        ),
        _other("qwen4_exp", {f"indexer_{name}": None for name in INDEXER}, "indexer_n_heads"),
        _other("qwen4_exp", {"heads_per_ngram": 1}, "tensor-parallel-size 4", **FOUR_RANKS),
    ],
    indirect=["checkpoint"],
)
def test_other_kinds_of_choices_are_refused(
    changed: dict[str, Any],
    message: str,
    options: dict[str, Any],
    checkpoint: Path,
    start_engine: StartEngine,
    tmp_path: Path,
):
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    change_section(copy, "text_config", changed)
    with pytest.raises(EngineError, match=message):
        start_engine(copy, **{**OF_TEXT, **options})
