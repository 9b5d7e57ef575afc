"""Pooling models: embeddings, classes and scores equal transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_davinci_testing.engines import pooling_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.pooling_zoo import BY_NAME, PAD_ID, PoolingReference

THOROUGH = pytest.mark.thorough
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
# Tolerances relative to fp32, for unit vectors and for probabilities.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}
DAILY = (("qwen3_embedding", "float32"), ("bge_m3", "float32"), ("bge_m3", "bfloat16"))


@pytest.fixture(scope="module")
def inputs(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of 1 to 150 tokens, without the padding token."""
    return [[token for token in prompt if token != PAD_ID] for prompt in prompts[1:25]]


def found_by(engine: EngineProcess, task: str, inputs: list[list[int]]) -> list[torch.Tensor]:
    outputs = getattr(engine, task)([{"prompt_token_ids": each} for each in inputs])
    name = {"embed": "embedding", "classify": "probs"}[task]
    return [torch.tensor(getattr(output.outputs, name)) for output in outputs]


def assert_refuses_what_it_cannot_answer(engine: EngineProcess, task: str) -> None:
    other = {"embed": engine.classify, "classify": engine.embed}[task]
    ask = getattr(engine, task)
    with pytest.raises(EngineError, match=r"not supported by (this|the) model"):
        other([{"prompt_token_ids": [7]}])
    with pytest.raises(EngineError, match=r"maximum model length|maximum context length"):
        ask([{"prompt_token_ids": [7] * 257}])
    with pytest.raises(EngineError, match=r"out of vocabulary"):
        ask([{"prompt_token_ids": [70000]}])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in DAILY else THOROUGH)
        for name in BY_NAME
        for dtype in TOLERANCES
    ],
)
def test_answers_equal_those_of_transformers(name, dtype, tmp_path, inputs, start_engine):
    """Runs in 16 bits on a chip that accepts only documented calls, and in fp32 on the reference
    chip.
    """
    model = BY_NAME[name]
    checkpoint = pooling_zoo.write_pooling(model, tmp_path / "model")
    environment = RACES if dtype == "float32" else {}
    with start_engine(
        checkpoint, dtype=dtype, runner="pooling", environment=environment, **model.engine
    ) as engine:
        assert_refuses_what_it_cannot_answer(engine, model.task)
        found = found_by(engine, model.task, inputs)
    reference = PoolingReference(model, checkpoint)
    expected = [reference.expected(each) for each in inputs]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCES[dtype], rtol=0)
    # The tolerance is smaller than the difference between two prompts.
    spread = max(float((each - expected[0]).abs().max()) for each in expected)
    assert spread > 4 * TOLERANCES[dtype]


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    "tensor2": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}


@pytest.mark.parametrize("setting", SETTINGS)
@THOROUGH
def test_token_wise_embeddings_of_a_decoder_equal_those_of_transformers(
    setting: str, tmp_path: Path, inputs: list[list[int]], start_engine: StartEngine
) -> None:
    model = BY_NAME["qwen3_embedding"]
    checkpoint = pooling_zoo.write_pooling(model, tmp_path / "model")
    token_wise = {"runner": "pooling", "pooler_config": {"task": "token_embed"}}
    with start_engine(checkpoint, environment=RACES, **token_wise, **SETTINGS[setting]) as engine:
        outputs = engine.encode(
            [{"prompt_token_ids": each} for each in inputs], pooling_task="token_embed"
        )
    reference = PoolingReference(model, checkpoint)
    for tokens, output in zip(inputs, outputs, strict=True):
        expected = reference.states(tokens)
        torch.testing.assert_close(output.outputs.data, expected, atol=2e-5, rtol=0)
