"""Compiled operators change only how work is launched: tokens and probabilities stay the same.

The other tests of this folder run with them, and compare with transformers.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.components.fused_ops import FUSED_OPS, choose_fused_ops
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.fused_moe.forward import FusedMoEForward
from vllm_davinci.core.fused_moe.local_experts import Experts, FloatExperts
from vllm_davinci.core.fused_moe.router import RoutingRule
from vllm_davinci.core.quantization.schemes.w8a8_dynamic import DynamicExperts
from vllm_davinci.kernels import HOST_OPERATORS
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import as_inputs, tokens_and_logprobs
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.transformers_reference import assert_greedy
from vllm_davinci_testing.plugin import EXACT_SOC
from vllm_davinci_testing.processes.programs import run_to_end

GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=3)
TENSOR2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EVERYWHERE = {"add_rms_norm", "rms_norm"}
COUNTING = "vllm_davinci_testing.engines.counting_worker.CallCountingWorker"


def generated(engine: EngineProcess, prompts: list[list[int]]) -> list[Any]:
    """Returns each prompt's tokens, with the exact probabilities of the likeliest tokens."""
    return tokens_and_logprobs(engine.generate(as_inputs(prompts), GREEDY))


MLA_ATTENTION = {"mla_decode_attention", "prefill_attention"}
MLA = MLA_ATTENTION | {"mla_preprocess"}
MLA_INT8 = MLA_ATTENTION | {"mla_preprocess_w8a8"}
EXPERTS = {"routed_experts"}
DENSE = {"paged_attention", "rotary_embedding"}
INTEGER = {"add_rms_norm_dynamic_quant"}
STATIC = {"add_rms_norm_quant"}
CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 8}
BF16 = {"dtype": "bfloat16"}


def case(
    model: str,
    used: set[str],
    options: dict[str, Any],
    quantized: str | None = None,
    always: str | None = None,
) -> Any:
    """Makes a parameter set: a model, options, and the operators called in addition to EVERYWHERE.

    always: name of a daily case; None: the case is `thorough`
    """
    name = always or "_".join([model, quantized or options.get("dtype", "float32")])
    if options.get("tensor_parallel_size", 1) > 1:
        used = used | {"vocab_parallel_embedding"}
    if used & {"experts_w8a8", "routed_experts_w8a8"}:
        # The chip's gated activation needs more columns than small models' experts have.
        options = {**options, "environment": {"VNPU_SOC": EXACT_SOC}}
    marks = () if always else (pytest.mark.thorough,)
    return pytest.param(model, quantized, used, options, id=name, marks=marks)


CASES = [
    case("llama_head64_gqa4", DENSE, {**TENSOR2, "max_num_batched_tokens": 96}),
    case(
        "deepseek_r1_yarn_moe",
        MLA | EXPERTS,
        {**TENSOR2, **CHUNKED},
        always="mla_experts_chunked_tensor2",
    ),
    case(
        "tiny_deepseek",
        MLA_INT8 | INTEGER | {"routed_experts_w8a8"},
        BF16,
        "W8A8_DYNAMIC",
        always="int8_experts",
    ),
    case("qwen3_norm_head128_gqa2", DENSE, BF16),
    case("deepseek_v2_lite_dense", MLA, CHUNKED),
    case("deepseek_v2_lite_dense", MLA, BF16),
    case("deepseek_v3_dense", MLA, {**BF16, **CHUNKED}),
    case("deepseek_v2_moe", MLA | EXPERTS, CHUNKED),
    case("deepseek_v2_moe", MLA | EXPERTS, {**BF16, **TENSOR2}),
    case("deepseek_v3_moe", MLA | EXPERTS, {**BF16, **CHUNKED}),
    case("qwen3_moe_softmax_top2_of_8", DENSE | EXPERTS, CHUNKED),
    case("qwen3_moe_unnormalized_top3_of_16", DENSE | {"experts"}, BF16),
    case("tiny_deepseek", MLA | EXPERTS, {**BF16, **CHUNKED}),
    case("tiny_deepseek", MLA_INT8 | STATIC | {"routed_experts_w8a8"}, {**BF16, **TENSOR2}, "W8A8"),
    case("tiny_llama", DENSE | STATIC, BF16, "W8A8"),
    case("tiny_llama", DENSE | INTEGER, {**BF16, **TENSOR2}, "W8A8_DYNAMIC"),
    case(
        "qwen3_moe_unnormalized_top3_of_16",
        DENSE | INTEGER | {"experts_w8a8"},
        BF16,
        "W8A8_DYNAMIC",
    ),
]


@pytest.mark.parametrize(("model", "quantized", "used", "options"), CASES)
def test_results_are_equal_with_and_without_compiled_operators(
    model, quantized, used, options, zoo, repository, tmp_path, start_engine, prompts
):
    is_trained = model.startswith("tiny_")
    source = repository / "checkpoints" / model if is_trained else zoo(model)
    if quantized is not None:
        ranges = {}
        if quantized == "W8A8":
            ranges = input_ranges(source, [torch.tensor([prompts[5]])])
        exporter = Exporter(source, tmp_path, quantized, torch.bfloat16, ranges)
        exporter.run(lambda _: None)
        source = tmp_path
    results = []
    for is_enabled in (True, False):
        choice = {"enable_compiled_operators": is_enabled}
        with start_engine(
            source, additional_config=choice, worker_extension_cls=COUNTING, **options
        ) as engine:
            engine.on_workers("count_compiled_calls")
            results.append(generated(engine, prompts[:16]))
            for calls in engine.on_workers("compiled_calls"):
                assert set(calls) == (EVERYWHERE | used if is_enabled else set())
            if not is_enabled:
                assert "stages are composed of torch_npu's operators" in engine.log_text()
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens, _ in results[0]}) > 12


@pytest.mark.nightly("operators")
@pytest.mark.parametrize(
    ("model", "is_enabled"),
    [
        pytest.param("deepseek_v3_dense", True, id="mla_compiled"),
        pytest.param("deepseek_v3_dense", False, id="mla", marks=pytest.mark.thorough),
        pytest.param("llama_head64_gqa4", True, id="dense_compiled", marks=pytest.mark.thorough),
        pytest.param("llama_head64_gqa4", False, id="dense", marks=pytest.mark.thorough),
    ],
)
def test_requests_continue_from_copies_of_cached_blocks(
    model: str, is_enabled: bool, zoo: Zoo, reference: Reference, start_engine: StartEngine
):
    prefix = [*range(100), *range(30, 58)]  # one cache block
    prompts = [[*prefix, *range(n, n + 12)] for n in range(0, 160, 20)]
    with start_engine(
        zoo(model),
        additional_config={"enable_compiled_operators": is_enabled},
        async_scheduling=False,
        scheduler_cls="vllm_davinci_testing.engines.copying_scheduler.CopyingScheduler",
        worker_extension_cls=COUNTING,
    ) as engine:
        engine.on_workers("count_compiled_calls")
        as_inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        engine.generate(as_inputs[:1], GREEDY)
        outputs = engine.generate(as_inputs, GREEDY)
        (calls,) = engine.on_workers("compiled_calls")
    assert [output.num_cached_tokens for output in outputs] == [len(prefix)] * len(prompts)
    assert_greedy(reference(model), prompts, outputs, 48)
    assert calls.get("copy_kv_blocks", 0) == is_enabled


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
OF_SAMPLING = {"_penalties_kernel", "_gumbel_sample_kernel", "_bad_words_kernel", "_bias_kernel"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "launched"),
    [
        pytest.param({}, OF_SAMPLING, id="sampled"),
        pytest.param({"speculative_config": DRAFTS}, {"_rejection_kernel"}, id="ngram"),
    ],
)
def test_the_runner_gives_the_same_results_with_vllms_own_triton_kernels(
    options: dict[str, Any], launched: set[str], tiny_llama: Path, tmp_path: Path
):
    results = []
    for kernels in ("own", "vllm"):
        variables = {
            "DAVINCI_TRITON_KERNELS": kernels,
            "VNPU_TRITON": "1",
            "VNPU_SOC": EXACT_SOC,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        program = Path(__file__).with_name("with_vllms_kernels.py")
        done = run_to_end(
            [sys.executable, program, tiny_llama, json.dumps(options), tmp_path / kernels],
            300,
            env={**os.environ, **variables},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(json.loads((tmp_path / kernels).read_text(encoding="utf-8")))
    own, of_vllm = results
    assert not own["launches"] and launched <= set(of_vllm["launches"])
    assert own["tokens"] == of_vllm["tokens"] and own["ranked"] == of_vllm["ranked"]
    # The sums over a row of logits are rounded in another order.
    assert own["logprobs"] == pytest.approx(of_vllm["logprobs"], rel=1e-5, abs=1e-6)


def test_every_compiled_operator_is_called_by_an_engine_of_these_tests():
    # Other tests call these: the graphs' operator (test_graph_mode.py), loading of fp8 checkpoints
    # (test_quantization.py), DeepSeek-V4's streams and rows (test_launches.py).
    streams = {"collapse_streams", "expand_streams"}
    rows = {
        *("attend_to_rows", "choose_rows", "compress_tokens", "rotate_pairs", "row_numbers"),
    }
    elsewhere = {"copy_kv_blocks", "attention_groups", *streams, *rows, *HOST_OPERATORS}
    called = EVERYWHERE.union(*(case.values[2] for case in CASES), elsewhere)
    assert called == set(FUSED_OPS)


@pytest.fixture
def without_operators() -> Iterator[None]:
    """Turns compiled operators off again after the test."""
    yield
    choose_fused_ops(False)


@pytest.mark.nightly("operators")
@pytest.mark.parametrize(
    ("dtype", "is_int8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["fp32", "bf16", "int8"],
)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_every_routing_rule_is_equal_with_and_without_compiled_operators(
    dtype: torch.dtype, is_int8: bool, scoring: str, without_operators: None
):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(kind).npu()

    x = normal(7, 64)
    place = {"first": 0, "num_local": 16, "num_experts": 16}
    experts: Experts = FloatExperts(
        gate_up=normal(16, 64, 96) / 8, down=normal(16, 48, 64) / 8, **place
    )
    if is_int8:
        experts = DynamicExperts(
            gate_up=(16 * normal(16, 64, 96)).to(torch.int8),
            gate_up_scale=normal(16, 96, kind=torch.float32).abs() / 128,
            down=(16 * normal(16, 48, 64)).to(torch.int8),
            down_scale=normal(16, 64).abs() / 128,
            dtype=dtype,
            **place,
        )
    num_fused = 0
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
            num_expert_group=groups[0],
            topk_group=groups[1],
            scaling_factor=factor,
            correction_bias=bias,
        )
        forward = FusedMoEForward(rule, experts)
        choose_fused_ops(False)
        composed = forward(x, logits)
        choose_fused_ops(True)
        assert experts.has_fused_op(dtype) and composed.any()
        num_fused += rule.is_one_launch
        assert torch.equal(forward(x, logits), composed), rule
    assert 0 < num_fused < 32
