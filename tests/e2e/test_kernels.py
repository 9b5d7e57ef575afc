"""Compiled operators change how work is launched and nothing else: tokens and their probabilities.

The other tests of this folder run with them, and compare with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from e2e.engine_process import EngineProcess
from vllm_davinci.core.moe.experts import FloatExperts
from vllm_davinci.core.moe.forward import RoutedForward
from vllm_davinci.core.moe.routing import RoutingRule
from vllm_davinci.core.ops.compiled import choose_operators
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
            {"mla_preprocess", "mla_decode_attention", "experts", "routed_experts"},
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


@pytest.fixture
def without_operators() -> Iterator[None]:
    """Leaves the process as it was: without compiled operators."""
    yield
    choose_operators(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_every_routing_rule_is_equal_with_and_without_compiled_operators(
    dtype: torch.dtype, scoring: str, without_operators: None
):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(kind).npu()

    x = normal(7, 64)
    experts = FloatExperts(
        gate_up=normal(16, 64, 96) / 8,
        down=normal(16, 48, 64) / 8,
        first=0,
        num_local=16,
        num_experts=16,
    )
    num_at_once = 0
    for renormalize, groups, bias, factor, logits in product(
        (True, False),
        ((1, 1), (4, 2)),
        (None, normal(16, kind=torch.float32)),
        (1.0, 2.5),
        (normal(7, 16), normal(7, 16, kind=torch.float32)),
    ):
        rule = RoutingRule(
            top_k=4,
            scoring=scoring,
            renormalize=renormalize,
            num_groups=groups[0],
            num_chosen_groups=groups[1],
            scaling_factor=factor,
            correction_bias=bias,
        )
        forward = RoutedForward(rule=rule, experts=experts, physical_experts=None)
        choose_operators(False)
        composed = forward(x, logits)
        choose_operators(True)
        num_at_once += rule.is_one_launch
        assert torch.equal(forward(x, logits), composed), rule
    assert 0 < num_at_once < 32
