"""gpt-oss: attention sinks, and experts with biases and clipped SwiGLU; transformers' tokens.

Logprobs in 16 bits are compared in test_strict_chip.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import COMPOSED, TWO_STAGES
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

MODEL = "gpt_oss_sinks_window32_top2_of_8"
MAX_TOKENS = 32
NUM_PROMPTS = 16
THOROUGH = pytest.mark.thorough

RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}
CHUNKS = {"max_num_batched_tokens": 48, "max_num_seqs": 16}
GRAPHS = decode_graphs(2, 8, 16)
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EP2 = {**TP2, "enable_expert_parallel": True}
SPLIT = {"additional_config": {"dbo": SPLIT_ALWAYS}}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        # Chunks of prompts run beside decodes from graphs.
        pytest.param({**GRAPHS, **CHUNKS}, RACES, id="graphs_chunks_races"),
        pytest.param({}, {}, id="plain", marks=THOROUGH),
        pytest.param({**TP2, **GRAPHS}, {}, id="tensor2_graphs", marks=THOROUGH),
        pytest.param({**EP2, **CHUNKS}, RACES, id="expert2_chunks_races", marks=THOROUGH),
        pytest.param({**TP2, **SPLIT}, RACES, id="tensor2_overlap_races", marks=THOROUGH),
        pytest.param({**GRAPHS, **COMPOSED}, {}, id="composed_graphs", marks=THOROUGH),
        pytest.param(TWO_STAGES, {}, id="pipeline2", marks=THOROUGH),
    ],
)
def test_every_path_gives_the_tokens_of_transformers(options, environment, exact_engine, prompts):
    asked = MODEL, prompts[:NUM_PROMPTS], MAX_TOKENS
    with exact_engine(*asked, environment=environment, **options):
        pass


@THOROUGH
def test_hits_of_the_prefix_cache_give_the_tokens_of_transformers(
    zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
) -> None:
    prefix = [*range(100), *range(30, 58)]  # one cache block
    extended = [prefix + prompt[:60] for prompt in prompts[:4]]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with start_engine(zoo(MODEL), enable_prefix_caching=True) as engine:
        for _ in range(2):
            inputs = [{"prompt_token_ids": prompt} for prompt in extended]
            outputs = engine.generate(inputs, sampling)
    assert {output.num_cached_tokens for output in outputs} == {len(prefix)}
    assert_greedy(reference(MODEL), extended, outputs, MAX_TOKENS)


@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"dtype": "float16", "environment": {"VNPU_SOC": "Ascend910B3"}},
            ("over a paged cache with attention sinks", "Start with --dtype bfloat16"),
            id="dtype",
        ),
        pytest.param(
            {**TP2, "additional_config": {"expert_tensor_parallel_size": 1}},
            ("experts shared by 1 of 2 ranks", "Add --enable-expert-parallel"),
            id="layout",
            marks=THOROUGH,
        ),
        pytest.param(
            {"hf_overrides": {"quantization_config": {"quant_method": "mxfp4"}}},
            ("mxfp4",),
            id="mxfp4",
            marks=THOROUGH,
        ),
    ],
)
def test_what_is_not_computed_ends_the_start_with_a_reason(options, said, zoo, tmp_path):
    assert_refused(zoo(MODEL), options, said, tmp_path / "log.txt")


@THOROUGH
def test_experts_in_another_order_end_the_start(zoo: Zoo, tmp_path: Path) -> None:
    placed = [{"device_id": 0, "device_expert": [7, 0, 2, 5]}]
    placed += [{"device_id": 1, "device_expert": [1, 3, 4, 6]}]
    layers = [{"layer_id": layer, "device_count": 2, "device_list": placed} for layer in range(2)]
    file = tmp_path / "experts.json"
    file.write_text(json.dumps({"moe_layer_count": 2, "layer_list": layers}))
    options = {**EP2, "additional_config": {"expert_map_path": str(file)}}
    said = ("gpt-oss's weights cannot be loaded into experts in another order", "expert_map_path")
    assert_refused(zoo(MODEL), options, said, tmp_path / "log.txt")


def assert_refused(
    checkpoint: Path, options: dict[str, Any], said: tuple[str, ...], log: Path
) -> None:
    with pytest.raises(EngineError) as raised:
        EngineProcess(checkpoint, log, **options).close()
    # messages of several ranks are in the log
    text = f"{raised.value}\n{log.read_text(errors='replace')}"
    assert all(each in text for each in said), text
