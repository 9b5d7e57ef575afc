"""Compiled operators change how work is launched and nothing else: tokens and their probabilities.

The other tests of this folder run with them, and compare with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from e2e.engine_process import EngineProcess
from vllm_davinci.core.quantization.description import QuantType
from vllm_davinci.core.quantization.export import Exporter

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=3)
TENSOR2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EVERYWHERE = {"add_rms_norm", "rms_norm"}


def generated(engine: EngineProcess, prompts: list[list[int]]) -> list[Any]:
    """Tokens of each prompt with the probabilities of the likeliest ones, exactly."""
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    return [
        (
            list(output.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in step.items()}
                for step in output.outputs[0].logprobs
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    ("model", "used", "options"),
    [
        pytest.param(
            "llama_head64_gqa4",
            {"paged_attention", "rotary_embedding", "vocab_parallel_embedding"},
            {**TENSOR2, "max_num_batched_tokens": 96},
            id="dense_chunked_tensor2",
        ),
        pytest.param(
            "deepseek_r1_yarn_moe",
            {"mla_preprocess", "mla_decode_attention", "experts"},
            {**TENSOR2, "max_num_batched_tokens": 96, "max_num_seqs": 8},
            id="latent_experts_chunked_tensor2",
        ),
    ],
)
def test_results_are_equal_with_and_without_compiled_operators(
    model: str,
    used: set[str],
    options: dict[str, Any],
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    with start_engine(zoo(model), **options) as engine:
        for names in engine.on_workers("compiled_operators"):
            assert EVERYWHERE | used <= set(names)
        compiled = generated(engine, prompts[:16])
    without = {"enable_compiled_operators": False}
    with start_engine(zoo(model), additional_config=without, **options) as engine:
        assert not any(engine.on_workers("compiled_operators"))
        composed = generated(engine, prompts[:16])
        assert "torch_npu's own operators are composed" in engine.log_text()
    assert compiled == composed
    assert len({tuple(tokens) for tokens, _ in compiled}) > 12


def test_int8_experts_are_equal_with_and_without_compiled_operators(
    tiny_deepseek: Path,
    tmp_path: Path,
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    model = tmp_path / "int8"
    Exporter(tiny_deepseek, model, QuantType.W8A8_DYNAMIC, torch.bfloat16, {}).run(lambda _: None)
    results = []
    for is_enabled in (True, False):
        options = {"enable_compiled_operators": is_enabled}
        with start_engine(model, dtype="bfloat16", additional_config=options) as engine:
            assert is_enabled == ("experts_w8a8" in engine.on_workers("compiled_operators")[0])
            results.append(generated(engine, prompts[:8]))
    assert results[0] == results[1]
