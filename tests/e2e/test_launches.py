"""Operators that the host calls per layer and decode, with and without compiled operators.

docs/measurements/launches.md has the figures.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.plugin import EXACT_SOC

CROSSINGS = {"aten::_to_copy", "aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


THOROUGH = pytest.mark.thorough


# Per kind of layer: calls without compiled operators, calls with them, launches of the latter.
@THOROUGH
@pytest.mark.parametrize(
    ("model", "layer", "expected"),
    [
        pytest.param("qwen3_next_moe", 2, (105, 100, 6), id="gated_delta_net_and_experts"),
        pytest.param("nemotron_h", 0, (42, 42, 1), id="mamba2"),
        pytest.param("deepseek_v4", 0, (141, 63, 92), id="window_and_streams"),
        pytest.param("deepseek_v4", 2, (159, 66, 100), id="rows_of_128"),
        pytest.param("deepseek_v4", 3, (179, 75, 124), id="chosen_rows"),
        pytest.param("qwen4_exp", 2, (197, 182, 19), id="gated_streams_and_n_grams"),
        pytest.param("qwen4_exp", 3, (212, 188, 28), id="chosen_groups"),
    ],
)
def test_launches_of_layers_with_states_stay_in_the_budget(
    model, layer, expected, zoo, vision, start_engine, prompts
):
    checkpoint = vision(model) if model == "qwen4_exp" else zoo(model)
    calls, launched, composed = launches(checkpoint, layer, start_engine, prompts)
    assert (len(composed), len(calls), launched) == expected, (composed, calls)


@pytest.mark.parametrize(
    ("model", "layer", "kind", "expected"),
    [
        pytest.param("tiny_llama", 1, "bf16", (11, 9, 6), id="dense", marks=THOROUGH),
        pytest.param(
            "tiny_llama", 1, "W8A8_DYNAMIC", (14, 10, 8), id="dense_dynamic", marks=THOROUGH
        ),
        pytest.param("tiny_llama", 1, "W8A8", (15, 11, 8), id="dense_static"),
        pytest.param("tiny_deepseek", 2, "bf16", (24, 11, 18), id="experts", marks=THOROUGH),
        pytest.param("tiny_deepseek", 2, "W8A8_DYNAMIC", (28, 13, 20), id="experts_dynamic"),
        # This export keeps the experts W8A8_DYNAMIC.
        pytest.param("tiny_deepseek", 2, "W8A8", (29, 14, 20), id="experts_static", marks=THOROUGH),
    ],
)
def test_launches_per_layer_stay_in_the_budget(
    model, layer, kind, expected, repository, tmp_path, start_engine, prompts
):
    source = repository / "checkpoints" / model
    if kind != "bf16":
        ranges = {}
        if kind == "W8A8":
            ranges = input_ranges(source, [torch.tensor([prompts[5]])])
        Exporter(source, tmp_path / kind, kind, torch.bfloat16, ranges).run(lambda _: None)
        source = tmp_path / kind
    calls, launched, composed = launches(source, layer, start_engine, prompts)
    assert not CROSSINGS & {*calls, *composed}, "a copy between host and device"
    assert (len(composed), len(calls), launched) == expected, (composed, calls)


def launches(
    checkpoint: Path,
    layer: int,
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
) -> tuple[list[str], int, list[str]]:
    """Returns a layer's calls in one decode: names, number of compiled launches, and names without
    compiled operators.
    """
    found = {}
    with start_engine(
        checkpoint,
        dtype="bfloat16",
        # Real chips' operators do not support the sizes of small models.
        environment={"VNPU_SOC": EXACT_SOC},
        worker_extension_cls="vllm_davinci_testing.engines.counting_worker.LaunchCountingWorker",
    ) as engine:
        for is_enabled in (True, False):
            engine.on_workers("count_launches", is_enabled)
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts[:2]]
            engine.generate(inputs, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
            (found[is_enabled],) = engine.on_workers("launches")
    calls, launched = found[True][layer]
    return calls, launched, found[False][layer][0]
