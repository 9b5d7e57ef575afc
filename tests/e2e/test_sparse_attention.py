"""MLA over tokens that an indexer selects: transformers' tokens on every path of a step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.fixture_types import Engines, Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    TWO_STAGES,
    assert_generates,
)
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.preemption import COUNTED, assert_no_layer_waits, few_blocks
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

DEEPSEEK, SHARED, SINKS = "deepseek_v32", "glm_dsa_shared", "hy_v4"
PADDED = "deepseek_v32_heads6"  # to 8
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(SHARED, IN_PARTS, id="shared_in_parts"),
        pytest.param(SINKS, IN_PARTS, id="sinks_in_parts"),
        *(
            pytest.param(model, options, id=f"{model}_{name}", marks=pytest.mark.thorough)
            for name, options in {
                "whole": {},
                "in_parts": IN_PARTS,
                "synchronous": {"async_scheduling": False, "enforce_eager": False},
                "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
                "expert2": {**TWO_RANKS, "enable_expert_parallel": True},
                "tensor4": {**TWO_RANKS, "tensor_parallel_size": 4},
            }.items()
            for model in (DEEPSEEK, SHARED, SINKS)
        ),
        pytest.param(DEEPSEEK, TWO_STAGES, id="pipeline2", marks=pytest.mark.thorough),
        pytest.param(PADDED, IN_PARTS, id="padded_heads_in_parts", marks=pytest.mark.thorough),
    ],
)
def test_tokens_equal_those_of_transformers_in_any_order_that_events_allow(
    model: str, options: dict[str, Any], exact_engine: Engines, prompts: Prompts
):
    with exact_engine(model, prompts[:16], MAX_TOKENS, environment=FUZZED, **options):
        pass


@pytest.mark.parametrize("model", [DEEPSEEK, pytest.param(SINKS, marks=pytest.mark.thorough)])
def test_preempted_and_offloaded_requests_give_the_same_tokens_and_no_layer_waits(
    model: str, zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    # Requests outgrow their first block at different times, and the cache has half of the needed
    # blocks.
    chosen = [prompt for prompt in prompts if 105 <= len(prompt) <= 128][:8]
    assert len(chosen) == 8
    with start_engine(
        zoo(model), environment=RACES, kv_offloading_size=0.1, **COUNTED, **few_blocks(10)
    ) as engine:
        assert_no_layer_waits(engine, reference(model), chosen, MAX_TOKENS)
        longer = [[*prompts[4], *prompts[i][:70]] for i in (3, 5)]  # they share a full block
        for _ in range(2):
            assert_generates(engine, reference(model), longer, MAX_TOKENS)
            assert_generates(engine, reference(model), prompts[:8], MAX_TOKENS)
        loaded = engine.metrics()
    hits = {name: value for name, value in loaded.items() if "external_prefix_cache_hits" in name}
    assert sum(hits.values()) > 0


@pytest.mark.thorough
def test_data_parallel_ranks_of_which_one_is_idle_give_the_same_tokens(
    zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    options = {"enable_expert_parallel": True, **IN_PARTS}
    with DPEngines(start_engine, zoo(SINKS), 2, environment=FUZZED, **options) as engines:
        for given in (prompts[4:8], prompts[4:5]):
            outputs = engines.generate(given, GREEDY)
            assert_greedy(reference(SINKS), given, outputs, MAX_TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", [None, "W8A8_DYNAMIC", "W8A8"])
def test_where_all_tokens_are_chosen_attention_is_dense(
    scheme, zoo, reference, start_engine, prompts, tmp_path
):
    """fp32 gives dense MLA's tokens; int8 weights in 16 bits change about as many tokens as dense
    MLA does.
    """
    name = "deepseek_v32_all"
    sparse, options = zoo(name), {}
    if scheme is not None:
        sparse, options = int8(sparse, scheme, tmp_path, prompts), {"dtype": "bfloat16"}
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:16]]
    tokens = []
    for model in (sparse, as_dense(sparse, tmp_path / "dense")):
        with start_engine(model, **options) as engine:
            outputs = engine.generate(inputs, GREEDY)
        tokens.append([list(each.outputs[0].token_ids) for each in outputs])
    if scheme is None:
        assert tokens[0] == tokens[1]
    else:
        others = [sum(reference(name).differing_tokens(prompts[:16], each)) for each in tokens]
        assert others[0] <= 1.5 * others[1], others


def int8(floats: Path, scheme: str, place: Path, prompts: list[list[int]]) -> Path:
    windows = [torch.tensor([prompt]) for prompt in prompts[6:14]]
    ranges = input_ranges(floats, windows) if scheme == "W8A8" else {}
    Exporter(floats, place / scheme, scheme, torch.bfloat16, ranges).run(lambda _: None)
    return place / scheme


def as_dense(sparse: Path, directory: Path) -> Path:
    """Copies a checkpoint as DeepSeek-V3, without the indexer's tensors."""

    def without_indexer(entries: dict[str, Any]) -> dict[str, Any]:
        return {name: each for name, each in entries.items() if ".indexer." not in name}

    directory.mkdir()
    for path in sparse.iterdir():
        if path.suffix == ".safetensors":
            tensors = without_indexer(load_file(path))
            save_file(tensors, directory / path.name, metadata={"format": "pt"})
        elif path.name.startswith("quant_model_description"):
            described = without_indexer(json.loads(path.read_text(encoding="utf-8")))
            (directory / path.name).write_text(json.dumps(described), encoding="utf-8")
        elif not path.name.endswith(".index.json"):
            shutil.copy(path, directory)
    config = json.loads((sparse / "config.json").read_text(encoding="utf-8"))
    left_out = ("layer_types", "mlp_layer_types")
    kept = {
        name: each
        for name, each in config.items()
        if not name.startswith("index") and name not in left_out
    }
    kept |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return directory


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        (DEEPSEEK, None),
        (SHARED, None),
        (SINKS, None),
        (PADDED, None),
        (DEEPSEEK, "W8A8_DYNAMIC"),
        (DEEPSEEK, "W8A8"),
    ],
)
def test_in_16_bits_on_a_chip_tokens_stay_close(
    model, scheme, zoo, reference, start_engine, prompts, tmp_path
):
    """Tokens are about as close to fp32 as transformers' in bfloat16, where the indexer also
    selects other tokens.
    """
    floats = zoo(model)
    checkpoint = floats if scheme is None else int8(floats, scheme, tmp_path, prompts)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:16]]
    environment = {**RACES, "VNPU_SOC": "Ascend910B3"}
    with start_engine(checkpoint, environment=environment, dtype="bfloat16", **IN_PARTS) as engine:
        outputs = [list(each.outputs[0].token_ids) for each in engine.generate(inputs, GREEDY)]
    in_16_bits = TransformersReference(floats, torch.bfloat16)
    others = [in_16_bits.greedy(prompt, MAX_TOKENS) for prompt in prompts[:16]]
    ours = sum(reference(model).differing_tokens(prompts[:16], outputs))
    assert ours <= 1.5 * sum(reference(model).differing_tokens(prompts[:16], others))
