"""DSpark of DeepSeek-V4: drafts change no token, and equal its equations' drafts."""

import random
from pathlib import Path

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.compressed_zoo import WINDOW
from vllm_davinci_testing.engines.dspark_zoo import DRAFTS_TOLD, DSparkReference, with_dspark
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.fixture_types import StartEngine, Zoo
from vllm_davinci_testing.engines.generating import FUZZED, IN_PARTS, TWO_RANKS, assert_generates
from vllm_davinci_testing.engines.speculating import speculation, told

MODEL, MAX_TOKENS = "deepseek_v4", 12
LONG = {"max_model_len": 320}
# Two drafts a step, right or wrong.
ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
LENGTHS = [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 127, 259]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def drafting(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_dspark(zoo(MODEL), tmp_path_factory.mktemp("dspark") / "checkpoint")


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(5, IN_PARTS, id="5_in_parts", marks=pytest.mark.nightly("layouts")),
        *(
            pytest.param(count, options, id=name, marks=pytest.mark.thorough)
            for name, (count, options) in {
                "7_in_parts": (7, IN_PARTS),
                "5_synchronous": (5, {"async_scheduling": False}),
                "7_expert2": (7, {**TWO_RANKS, **IN_PARTS, "enable_expert_parallel": True}),
            }.items()
        ),
    ],
)
def test_blocks_of_drafts_change_no_token(count, options, drafting, reference, start_engine):
    asked = {**speculation("dspark", count), **LONG, **options}
    with start_engine(drafting, environment=FUZZED, **asked) as engine:
        assert_generates(engine, reference(MODEL), prompts_of(LENGTHS), MAX_TOKENS)
        drafted, accepted = told(engine)
        replays = [sum(each.values()) for each in engine.on_workers("graph_replays")]
    print(f"{accepted} of {drafted} drafts accepted")
    assert 0 <= accepted < drafted
    assert all(replays) if "enforce_eager" in options else not any(replays)


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "accepted"), [(5, {}), (7, ACCEPTED)])
def test_drafts_are_those_of_the_equations(count, accepted, drafting, start_engine, tmp_path):
    """Checks drafts after a prompt, and after steps with rejected or accepted drafts."""
    equations = DSparkReference(drafting, tmp_path / "layers")
    drafts = speculation("dspark", count, **accepted)
    asked = {**drafts, "async_scheduling": False, **LONG, **DRAFTS_TOLD}
    found, expected = [], []
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with start_engine(drafting, **asked) as engine:
        engine.on_workers("record_drafts")
        for prompt in prompts_of(LENGTHS):
            (output,) = engine.generate([{"prompt_token_ids": prompt}], greedy)
            (steps,) = engine.on_workers("recorded_drafts")
            text = [*prompt, *output.outputs[0].token_ids]
            for place, drafted in steps:
                found.append(drafted)
                expected.append(equations.drafts(text[: place + 1], count))
        assert told(engine)[1] > 50 or not accepted
    assert len(found) > 4 * len(LENGTHS)
    assert found == expected


@pytest.mark.thorough
def test_a_checkpoint_without_such_layers_is_refused(zoo: Zoo, start_engine: StartEngine):
    message = "has no DSpark layers, because its config.json lacks dspark_target_layer_ids"
    with pytest.raises(EngineError, match=message):
        start_engine(zoo(MODEL), **speculation("dspark", 5), **LONG)
