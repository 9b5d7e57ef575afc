"""16-bit models on a chip that accepts only documented calls, compared with transformers.

Two computations in 16 bits round differently, so the whole vocabulary's logprobs after every prompt
token are compared instead of tokens.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines import deepseek_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.fixture_types import Prompts, StartEngine, Zoo
from vllm_davinci_testing.engines.int8_checkpoint import compressed_int8
from vllm_davinci_testing.engines.pooling_zoo import BY_NAME, write_pooling
from vllm_davinci_testing.engines.routing_worker import RoutingWorker, routed_by
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

THOROUGH, NIGHTLY = pytest.mark.thorough, pytest.mark.nightly("refusals")
A2, A3 = "Ascend910B3", "Ascend910_9391"

# Limits of a model's logprob differences, root mean square and maximum: twice the worst model's.
BOUNDS = {torch.bfloat16: (0.05, 0.35), torch.float16: (0.0065, 0.05)}
# Limits of a perplexity's relative difference. Worst measured: 0.0012 and 0.0005.
PERPLEXITY = {torch.bfloat16: 0.01, torch.float16: 0.002}

# Heads of 64 and 128 with and without groups, windows, biases; heads of 80, padded to 128; MLA with
# 4, 6 (padded to 8) and 128 heads of 32, also padded; routed experts; sinks.
MODELS = (
    ("llama_head64_gqa4", torch.bfloat16, A3),
    ("llama_head64_gqa4", torch.float16, A2),
    ("llama_head128_mha_tied", torch.bfloat16, A2),
    ("llama_head128_mha_tied", torch.float16, A2),
    ("qwen3_norm_head128_gqa2", torch.bfloat16, A2),
    ("qwen2_bias_head64_gqa8_tied", torch.bfloat16, A2),
    ("mistral_window48_head64_gqa4_tied", torch.bfloat16, A2),
    ("mistral_window32_head80_gqa2", torch.bfloat16, A2),
    ("deepseek_v3_dense", torch.bfloat16, A2),
    ("deepseek_v3_dense", torch.float16, A2),
    (deepseek_zoo.HEADS128.name, torch.bfloat16, A2),
    (deepseek_zoo.HEADS6.name, torch.bfloat16, A3),
    ("deepseek_v3_moe", torch.bfloat16, A3),
    ("deepseek_v3_moe", torch.float16, A3),
    ("qwen3_moe_softmax_top2_of_8", torch.bfloat16, A2),
    ("gpt_oss_sinks_window32_top2_of_8", torch.bfloat16, A2),
)
MIXTURES = ("deepseek_v3_moe", "qwen3_moe_softmax_top2_of_8", "gpt_oss_sinks_window32_top2_of_8")
ALL_LOGPROBS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=-1)


# vLLM logs this when the weights are loaded.
LOADED = "Loading weights took"


def options_of(dtype: torch.dtype, soc: str) -> dict[str, Any]:
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "environment": {"VNPU_SOC": soc},
        "max_logprobs": -1,
        "enforce_eager": False,
    }


def logprobs_of(output: Any, vocabulary: int) -> torch.Tensor:
    """Returns [prompt - 1, vocabulary]: row i has the logprobs of token i + 1."""
    rows = [
        [each[token].logprob for token in range(vocabulary)] for each in output.prompt_logprobs[1:]
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("name", "dtype", "soc"),
    [
        pytest.param(*case, marks=() if number < 1 else NIGHTLY if number < 2 else THOROUGH)
        for number, case in enumerate(MODELS)
    ],
)
def test_logprobs_equal_those_of_transformers_in_the_same_dtype(
    name: str, dtype: torch.dtype, soc: str, zoo: Zoo, start_engine: StartEngine, prompts: Prompts
) -> None:
    chosen = prompts[2:10]  # lengths around a block, where cache errors occur, and others
    extension = f"{RoutingWorker.__module__}.{RoutingWorker.__name__}"
    outputs, answers = [], []
    with start_engine(
        zoo(name), **options_of(dtype, soc), worker_extension_cls=extension
    ) as engine:
        (num_routers,) = engine.on_workers("record_routers")
        # Models with routers run one prompt at a time, so that each router row has a known token.
        for batch in [[prompt] for prompt in chosen] if num_routers else [chosen]:
            inputs = [{"prompt_token_ids": prompt} for prompt in batch]
            outputs += engine.generate(inputs, ALL_LOGPROBS)
            answers += engine.on_workers("router_answers", len(batch[0])) * len(batch)
        assert LOADED in engine.log_text()
    assert (num_routers > 0) == (name in MIXTURES)
    network = TransformersReference(zoo(name), dtype)
    differences = []
    for prompt, output, scores in zip(chosen, outputs, answers, strict=True):
        assert len(output.outputs[0].token_ids) == ALL_LOGPROBS.max_tokens
        assert len(scores) == num_routers
        # Rounding may change which experts nearly equal scores select: transformers uses the
        # engine's choice.
        with routed_by(network.network, scores):
            expected = network.logprobs(prompt)[:-1]
        differences.append(logprobs_of(output, expected.shape[-1]) - expected)
    difference = torch.cat(differences)
    mean, largest = BOUNDS[dtype]
    found = difference.square().mean().sqrt(), difference.abs().max()
    assert found[0] < mean and found[1] < largest, found


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "soc"),
    [
        pytest.param("tiny_llama", torch.bfloat16, A2, marks=NIGHTLY),
        pytest.param("tiny_deepseek", torch.bfloat16, A3, marks=NIGHTLY),
        pytest.param("tiny_llama", torch.float16, A2, marks=THOROUGH),
        pytest.param("tiny_deepseek", torch.float16, A3, marks=THOROUGH),
    ],
)
def test_the_shipped_checkpoints_have_the_perplexity_that_transformers_finds(
    checkpoint: str, dtype: torch.dtype, soc: str, repository: Path, start_engine: StartEngine
) -> None:
    """Scores text that neither model was trained on."""
    directory = repository / "checkpoints" / checkpoint
    text = (repository / "docs" / "architecture.md").read_text()[4000:4240]
    network = TransformersReference(directory, dtype)
    with start_engine(directory, **options_of(dtype, soc)) as engine:
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = engine.generate([text], sampling)
    tokens = output.prompt_token_ids
    found = [output.prompt_logprobs[i][tokens[i]].logprob for i in range(1, len(tokens))]
    rows = network.logprobs(tokens)[:-1]
    expected = rows.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    perplexity = math.exp(-sum(found) / len(found))
    assert perplexity == pytest.approx(math.exp(-expected.mean()), rel=PERPLEXITY[dtype])


# The unchanged model, with other entries in its config.json.
def with_numbers(**numbers: Any) -> dict[str, Any]:
    return {**options_of(torch.bfloat16, A2), "hf_overrides": numbers}


@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        pytest.param(
            "llama_head64_gqa4",
            {"environment": {"VNPU_SOC": A2}},
            (
                "does not take 8 query heads over 2 key-value heads of 64 entries in float32",
                "Start with --dtype bfloat16",
            ),
            id="dtype",
        ),
        pytest.param(
            "llama_head64_gqa4",
            {
                **options_of(torch.bfloat16, A2),
                "max_num_seqs": 4097,
                "max_num_batched_tokens": 4097,
            },
            ("does not take 4097 requests in one step. Start with a smaller --max-num-seqs",),
            id="requests",
            marks=NIGHTLY,
        ),
        pytest.param(
            "qwen3_moe_softmax_top2_of_8",
            with_numbers(num_experts=1032),
            (
                "model.layers.0.mlp.experts",
                "has 1032 experts on each rank",
                "Divide them among more ranks: --enable-expert-parallel",
                "at most 1024 groups",
            ),
            id="experts",
            marks=NIGHTLY,
        ),
        pytest.param(
            "deepseek_v3_moe",
            with_numbers(n_routed_experts=2304, n_group=1, topk_group=1),
            ("top-4 of 2304 experts is not supported", "Choose another model"),
            id="choice",
            marks=NIGHTLY,
        ),
        pytest.param(
            "deepseek_v3_moe",
            with_numbers(n_group=16, topk_group=8),
            ("top-4 of 16 experts in 16 groups is not supported", "Choose another model"),
            id="groups",
            marks=NIGHTLY,
        ),
        pytest.param(
            "llama_head64_gqa4",
            with_numbers(intermediate_size=33024, quantization_config=compressed_int8()),
            (
                "gate_up_proj has an int8 weight of 256 x 66048 on each rank",
                "Start with a larger --tensor-parallel-size",
            ),
            id="compressed-tensors",
            marks=NIGHTLY,
        ),
    ],
)
def test_what_operators_do_not_take_ends_the_start_before_weights_load(
    model: str, options: dict[str, Any], said: tuple[str, ...], zoo: Zoo, tmp_path: Path
) -> None:
    assert_refused_before_weights_load(zoo(model), options, said, tmp_path / "log.txt")


@NIGHTLY
@pytest.mark.refused_calls
def test_more_requests_than_attention_over_the_batch_takes_end_the_start(tmp_path: Path) -> None:
    options = {**options_of(torch.bfloat16, A2), "max_num_seqs": 4097, "runner": "pooling"}
    assert_refused_before_weights_load(
        write_pooling(BY_NAME["bert_first"], tmp_path / "bert"),
        {**options, "max_num_batched_tokens": 4097},
        ("does not take 4097 requests in one step. Start with a smaller --max-num-seqs",),
        tmp_path / "log.txt",
    )


@NIGHTLY
@pytest.mark.refused_calls
def test_an_int8_layer_that_its_product_does_not_take_ends_the_start(zoo, tmp_path):
    quantized, kind = tmp_path / "int8", "W8A8_DYNAMIC"
    Exporter(zoo("llama_head64_gqa4"), quantized, kind, torch.bfloat16, None).run(lambda _: None)
    assert_refused_before_weights_load(
        quantized,
        with_numbers(intermediate_size=33024),
        (
            "gate_up_proj has an int8 weight of 256 x 66048 on each rank",
            "Start with a larger --tensor-parallel-size",
            "a size of 1 to 65535",
        ),
        tmp_path / "log.txt",
    )


def assert_refused_before_weights_load(
    model: Path, options: dict[str, Any], said: tuple[str, ...], log: Path
) -> None:
    with pytest.raises(EngineError) as raised:
        EngineProcess(model, log, **options).close()
    text = str(raised.value)
    assert all(each in text for each in said), text
    logged = log.read_text(errors="replace")
    assert re.search("Starting to load model|Loading model from scratch", logged)
    assert LOADED not in logged
