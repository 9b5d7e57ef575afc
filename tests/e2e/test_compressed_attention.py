"""DeepSeek-V4's attention over compressed rows: transformers' tokens on every path of a step."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from vllm import SamplingParams

from vllm_davinci_testing.engines.compressed_zoo import (
    NUM_CHOSEN,
    WINDOW,
    PredictingReference,
    in_transformers,
    with_int8_keys,
    with_mtp,
    write_native,
)
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.drafters import WRONG
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.fixture_types import Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import (
    COMPOSED,
    EVERY_PATH,
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    as_inputs,
    assert_generates,
    assert_same_on_every_path,
    random_prompts,
    tokens_and_logprobs,
)
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.preemption import COUNTED, assert_no_layer_waits, few_blocks
from vllm_davinci_testing.engines.speculating import speculation, told
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

MODEL, MAX_TOKENS = "deepseek_v4", 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
INT8_KEYS: dict[str, Any] = {"attention_config": {"indexer_kv_dtype": "int8"}}
LONG = {"max_model_len": 320}
# Lengths around groups of 4 and 128, the window, and the indexer's selection.
LENGTHS = [
    *(1, 3, 4, 5),
    *(WINDOW - 1, WINDOW, WINDOW + 1),
    *(4 * NUM_CHOSEN, 4 * NUM_CHOSEN + 5),
    *(127, 128, 129, 128 * 2 + 3),
]


@pytest.mark.parametrize("options", EVERY_PATH)
def test_tokens_equal_those_of_transformers_in_any_order_that_events_allow(
    options: dict[str, Any], zoo: Zoo, reference: Reference, start_engine: StartEngine
):
    with start_engine(zoo(MODEL), environment=FUZZED, **LONG, **options) as engine:
        assert_same_on_every_path(engine, reference(MODEL), LENGTHS, MAX_TOKENS, options)


@pytest.fixture(scope="module")
def int8_reference(zoo: Zoo) -> TransformersReference:
    rounded = TransformersReference(zoo(MODEL))
    with_int8_keys(rounded.network)
    return rounded


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(IN_PARTS, id="in_parts"),
        pytest.param({"max_num_batched_tokens": 96}, id="eager"),
        pytest.param({**IN_PARTS, **COMPOSED}, id="composed_in_parts"),
        pytest.param({**TWO_RANKS, **IN_PARTS}, id="tensor2_in_parts"),
        pytest.param({"block_size": 32, **IN_PARTS}, id="small_blocks"),
    ],
)
def test_int8_keys_choose_what_rounded_keys_of_transformers_choose(
    options: dict[str, Any],
    zoo: Zoo,
    reference: Reference,
    int8_reference: TransformersReference,
    start_engine: StartEngine,
):
    asked = {**INT8_KEYS, **LONG, **options}
    prompts = random_prompts(LENGTHS)
    with start_engine(zoo(MODEL), environment=FUZZED, **asked) as engine:
        assert_same_on_every_path(engine, int8_reference, LENGTHS, MAX_TOKENS, options)
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], GREEDY)
    with pytest.raises(AssertionError, match="differ"):  # float keys would select other rows
        assert_greedy(reference(MODEL), prompts, outputs, MAX_TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 96}, {"enforce_eager": False}])
def test_compiled_operators_change_no_probability(
    options: dict[str, Any], zoo: Zoo, start_engine: StartEngine
):
    prompts = random_prompts(LENGTHS, seed=4)
    ranked = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3)
    found = []
    for is_enabled in (True, False):
        choice = {"enable_compiled_operators": is_enabled}
        with start_engine(
            zoo(MODEL),
            dtype="bfloat16",
            environment=RACES,
            additional_config=choice,
            **LONG,
            **options,
        ) as engine:
            found.append(tokens_and_logprobs(engine.generate(as_inputs(prompts), ranked)))
    assert found[0] == found[1]


@pytest.mark.nightly("layouts")
def test_a_trained_model_completes_text_as_transformers_does(
    repository: Path, start_engine: StartEngine
):
    """Prompts have up to 300 compressed rows and attend to 64; an MTP layer drafts."""
    checkpoint = repository / "checkpoints" / "tiny_deepseek_v4"
    prompts = _text_prompts(checkpoint)
    asked = {**speculation("mtp", 3), **IN_PARTS, "max_model_len": 1024}
    with start_engine(checkpoint, environment=RACES, **asked) as engine:
        assert_generates(engine, TransformersReference(checkpoint), prompts, 24)
        drafted, accepted = told(engine)
    print(f"{accepted} of {drafted} drafts accepted")
    assert accepted > drafted / 10


def _text_prompts(checkpoint: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer(Path(random.__file__).read_text(encoding="utf-8"))["input_ids"]
    return [text[: length - 1] for length in (9, 64, 130, 400, 700)]


@pytest.fixture(scope="module")
def predicting(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp(zoo(MODEL), tmp_path_factory.mktemp("mtp") / "checkpoint")


# Draft rejections hit every position of a group, also after a draft has completed it.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "count", "options"),
    [
        pytest.param("mtp", 3, IN_PARTS, id="mtp_3"),
        pytest.param("mtp", 1, {"async_scheduling": False}, id="mtp_1_synchronous"),
        pytest.param("mtp", 2, {**TWO_RANKS, "enable_expert_parallel": True}, id="mtp_2_expert2"),
        pytest.param("mtp", 1, {**TWO_RANKS, **IN_PARTS}, id="mtp_1_tensor2_in_parts"),
        pytest.param("custom_class", 5, {}, id="wrong_5"),
    ],
)
def test_drafts_change_no_token(
    method: str,
    count: int,
    options: dict[str, Any],
    predicting: Path,
    reference: Reference,
    start_engine: StartEngine,
):
    drafter = {} if method == "mtp" else {"model": WRONG}
    asked = {**speculation(method, count, **drafter), **LONG, **options}
    with start_engine(predicting, environment=FUZZED, **asked) as engine:
        prompts = random_prompts([1, 3, WINDOW, 127])
        assert_generates(engine, reference(MODEL), prompts, MAX_TOKENS)
        drafted, accepted = told(engine)
        replays = [sum(each.values()) for each in engine.on_workers("draft_replays")]
    print(f"{method} {count}: {accepted} of {drafted} drafts accepted, {replays} passes replayed")
    assert all(replays) if "enforce_eager" in options else not any(replays)
    assert 0 <= accepted < drafted


@pytest.mark.thorough
def test_drafts_equal_those_of_transformers_modules(
    predicting: Path, reference: Reference, start_engine: StartEngine, tmp_path: Path
):
    """With one draft per step, the text determines which drafts are accepted."""
    drafting = PredictingReference(predicting, tmp_path / "layer")
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asked = {**speculation("mtp", 1), "async_scheduling": False, **LONG}
    counts, expected = [], []
    with start_engine(predicting, **asked) as engine:
        for prompt in random_prompts([1, 5, WINDOW, 129, 259]):
            before = told(engine)
            (output,) = engine.generate([{"prompt_token_ids": prompt}], greedy)
            counts.append(tuple(now - then for now, then in zip(told(engine), before, strict=True)))
            text = [*prompt, *output.outputs[0].token_ids]
            expected.append(_drafted_and_accepted(drafting.drafts(text), text, len(prompt)))
    assert counts == expected
    assert sum(accepted for _, accepted in counts) > 3


def _drafted_and_accepted(drafts: list[int], text: list[int], newest: int) -> tuple[int, int]:
    """Returns the numbers of drafted and accepted tokens. newest: position of the last sampled
    token; the first draft is for the third token
    """
    drafted = accepted = 0
    while newest + 1 < len(text):
        is_right = drafts[newest - 1] == text[newest + 1]
        drafted, accepted, newest = drafted + 1, accepted + is_right, newest + 1 + is_right
    return drafted, accepted


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [{}, INT8_KEYS], ids=["float_keys", "int8_keys"])
@pytest.mark.parametrize("kind", ["FLOAT", "W8A8_DYNAMIC"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["random", "trained"])
def test_logprobs_in_16_bits_stay_close_to_those_of_floats_or_of_exact_integers(
    is_trained: bool,
    kind: str,
    keys: dict[str, Any],
    predicting: Path,
    repository: Path,
    quantize: Callable[..., Path],
    start_engine: StartEngine,
):
    """Logprobs in 16 bits err at most 1.5 times as much as transformers' in 16 bits."""
    source = repository / "checkpoints" / "tiny_deepseek_v4" if is_trained else predicting
    prompts = _text_prompts(source) if is_trained else random_prompts(LENGTHS)
    floats = TransformersReference(source)
    model, expected = source, floats
    if kind != "FLOAT":
        model = quantize(source, kind)
        expected = IntegerReference(model, named=in_transformers)
    length = 1024 if is_trained else 320
    asked = {**speculation("mtp", 2), **IN_PARTS, "dtype": "bfloat16", "max_model_len": length}
    asked |= keys
    scored = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    with start_engine(model, environment=RACES, **asked) as engine:
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], scored)
        assert told(engine)[0] > 0
    ours = [
        row[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    in_16_bits = _logprobs(TransformersReference(source, torch.bfloat16), prompts)
    error = (torch.tensor(ours) - _logprobs(expected, prompts)).abs().mean()
    allowed = (in_16_bits - _logprobs(floats, prompts)).abs().mean()
    print(f"mean error of a logprob: {error:.4f}, of transformers in 16 bits: {allowed:.4f}")
    assert error <= 1.5 * allowed


def _logprobs(reference: TransformersReference, prompts: list[list[int]]) -> torch.Tensor:
    rows = [
        reference.logprobs(each)[:-1].gather(1, torch.tensor([each[1:]]).t()) for each in prompts
    ]
    return torch.cat(rows).flatten()


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", [None, "ascend"])
def test_released_types_become_floats_or_integers(
    quantization: str | None, predicting: Path, start_engine: StartEngine, tmp_path: Path
):
    native, floats = tmp_path / "native", tmp_path / "floats"
    write_native(predicting, native, floats)
    expected = TransformersReference(floats)
    asked = {**speculation("mtp", 1), **IN_PARTS, **LONG}
    if quantization is None:
        with start_engine(native, environment=RACES, **asked) as engine:
            assert_generates(engine, expected, random_prompts(LENGTHS), MAX_TOKENS)
        return
    prompts = random_prompts(LENGTHS)
    options = {"dtype": "bfloat16", "quantization": quantization, **asked}
    with start_engine(native, environment=RACES, **options) as engine:
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], GREEDY)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    close, wrong = expected.differing_tokens(prompts, tokens)
    print(f"differing tokens: {close} close, {wrong} others")
    assert wrong < MAX_TOKENS * len(prompts) / 10


@pytest.mark.thorough
@pytest.mark.parametrize("keys", [{}, INT8_KEYS], ids=["float_keys", "int8_keys"])
def test_data_parallel_ranks_of_which_one_is_idle_give_the_same_tokens(
    keys: dict[str, Any],
    zoo: Zoo,
    reference: Reference,
    int8_reference: TransformersReference,
    start_engine: StartEngine,
):
    expected = int8_reference if keys else reference(MODEL)
    prompts = random_prompts([259, 3, 10, 17])
    # Graphs are requested and turned off: with graphs, an idle rank would wait for steps that the
    # other rank does not run.
    options = {"enable_expert_parallel": True, **IN_PARTS, **LONG, **keys, "async_scheduling": True}
    with DPEngines(start_engine, zoo(MODEL), 2, environment=RACES, **options) as engines:
        # The second rank either ends before the other's first prompt, or has no request.
        for given in (prompts, prompts[:1]):
            outputs = engines.generate(given, GREEDY)
            assert_greedy(expected, given, outputs, MAX_TOKENS)
        assert not engines.engines[0].scheduler_settings()["async_scheduling"]


@pytest.mark.thorough
@pytest.mark.parametrize(("keys", "blocks"), [({}, 150), (INT8_KEYS, 115)], ids=["floats", "int8"])
def test_preempted_and_cached_prompts_give_the_same_tokens_and_no_layer_waits(
    keys: dict[str, Any],
    blocks: int,
    zoo: Zoo,
    reference: Reference,
    int8_reference: TransformersReference,
    start_engine: StartEngine,
):
    expected = int8_reference if keys else reference(MODEL)
    common = random_prompts([256], seed=1)[0]
    sharing = [[*common, *more] for more in random_prompts([1, 30, 7], seed=2)]
    with start_engine(
        zoo(MODEL),
        environment=RACES,
        **COUNTED,
        max_num_batched_tokens=32,  # a step's projections take blocks from later decodes
        max_num_seqs=16,
        **few_blocks(blocks),
        **LONG,
        **keys,
    ) as engine:
        crowd = random_prompts([60] * 8, seed=3)
        assert_no_layer_waits(engine, expected, crowd, 60)
        hits = engine.metrics()["vllm:prefix_cache_hits"]
        for each in sharing:
            assert_generates(engine, expected, [each], MAX_TOKENS)
        hits = engine.metrics()["vllm:prefix_cache_hits"] - hits
    # Each prompt may hit two blocks of 128 tokens; the second only if more tokens follow.
    assert hits >= 128 * (len(sharing) - 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "blocks"),
    [({}, 100), ({**TWO_RANKS, "enforce_eager": False}, 100), (INT8_KEYS, 140)],
)
def test_evicted_rows_of_all_kinds_come_back_from_the_host(
    options: dict[str, Any],
    blocks: int,
    zoo: Zoo,
    reference: Reference,
    int8_reference: TransformersReference,
    start_engine: StartEngine,
):
    expected = int8_reference if "attention_config" in options else reference(MODEL)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    asked = {**few_blocks(blocks), **LONG, **limits, "kv_offloading_size": 0.25, **options}
    prompts = random_prompts([259, 300, 140, 257], seed=4)
    with start_engine(zoo(MODEL), environment=RACES, **asked) as engine:
        for _ in range(2):
            before = engine.metrics()["vllm:external_prefix_cache_hits"]
            assert_generates(engine, expected, prompts, MAX_TOKENS)
        loaded = engine.metrics()["vllm:external_prefix_cache_hits"] - before
    assert loaded >= 2 * 128


def without_a_table(source: Path, destination: Path) -> Path:
    """Copies a checkpoint without the second layer's token-to-expert table."""
    shutil.copytree(source, destination)
    path = destination / "model.safetensors"
    tensors = load_file(path)
    del tensors["layers.1.ffn.gate.tid2eid"]
    save_file(tensors, path, metadata={"format": "pt"})
    return destination


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({}, r"lacks .*layers\.1\..*tid2eid", id="table"),
        pytest.param(
            {"kv_cache_memory_bytes": 1 << 20}, "one request of 320 tokens needs", id="context"
        ),
        pytest.param(
            TWO_RANKS | {"tensor_parallel_size": 8},
            "--tensor-parallel-size 8 .*there are 4 groups",
            id="groups_of_heads",
        ),
        pytest.param(
            {
                "kv_transfer_config": {
                    "kv_connector": "MooncakeHybridConnector",
                    "kv_role": "kv_both",
                }
            },
            "kv_connector 'MooncakeHybridConnector'.*Use .*NixlConnector or MooncakeConnector",
            id="connector",
        ),
    ],
)
def test_bad_input_ends_the_start_with_a_message(
    options: dict[str, Any], message: str, zoo: Zoo, start_engine: StartEngine, tmp_path: Path
):
    model = zoo(MODEL) if options else without_a_table(zoo(MODEL), tmp_path / "model")
    with pytest.raises(EngineError, match=message):
        start_engine(model, **LONG, **options)
