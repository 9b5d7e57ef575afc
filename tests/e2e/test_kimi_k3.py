"""Kimi-K3: tokens equal its equations in plain torch, on every path of a step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci_testing.engines import pictures
from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.encoder_worker import EncoderWorker
from vllm_davinci_testing.engines.engine_process import EngineError
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    TWO_STAGES,
    as_inputs,
    assert_generates,
    paths,
    random_prompts,
)
from vllm_davinci_testing.engines.int8_checkpoint import as_type
from vllm_davinci_testing.engines.kimi_k3_checkpoint import KimiK3Reference, write_kimi_k3
from vllm_davinci_testing.engines.kimi_k3_family import KimiK3ImageReference
from vllm_davinci_testing.engines.kimi_k3_tower import PLACEHOLDER
from vllm_davinci_testing.engines.multimodal_serving import difference_of
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=0)
EXPERTS_ON_TWO = {**TWO_RANKS, "enable_expert_parallel": True}
OF_TEXT = {"max_model_len": 256, "language_model_only": True}
LENGTHS = [1, 3, 4, 63, 65, 128, 150]  # around the convolution's width and the delta rule's chunk


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_k3(tmp_path_factory.mktemp("kimi_k3"))


@pytest.mark.parametrize(
    "options",
    paths(
        {
            "whole": {},
            "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
            "expert2": EXPERTS_ON_TWO,
            "pipeline2": TWO_STAGES,
            "shared_stream": {"additional_config": {"multistream_overlap_shared_expert": True}},
        }
    ),
)
def test_tokens_equal_those_of_the_equations_in_any_order_that_events_allow(
    options: dict[str, Any], checkpoint: Path, start_engine: StartEngine
):
    prompts = random_prompts(LENGTHS)
    with start_engine(checkpoint, environment=FUZZED, **OF_TEXT, **options) as engine:
        assert_generates(engine, KimiK3Reference(checkpoint), prompts, MAX_TOKENS)


WITH_IMAGES = {
    "max_model_len": 256,
    "limit_mm_per_prompt": {"image": 4},
    "worker_extension_cls": f"{EncoderWorker.__module__}.{EncoderWorker.__name__}",
}
# Width and height: as many patches as learned positions, fewer, padded, reduced; and no image.
SIZES = [[(84, 84)], [(56, 112), (60, 61), (28, 28)], [(200, 90)] * 4, []]


def image_requests() -> list[dict[str, Any]]:
    """Makes prompts with words before, between and after their images."""
    return [
        {
            "prompt": "see " + f"{PLACEHOLDER}and".join(["this "] * (len(sizes) + 1)),
            "multi_modal_data": {
                "image": [pictures.image(*size, seed=10 * n + i) for i, size in enumerate(sizes)]
            },
        }
        for n, sizes in enumerate(SIZES)
    ]


@pytest.mark.parametrize(
    "options",
    paths(
        {
            "whole": {},
            "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS},
            "encoder_on_every_rank": {**TWO_RANKS, "mm_encoder_tp_mode": "data"},
            "pipeline2": TWO_STAGES,
        }
    ),
)
def test_images_have_the_features_and_tokens_of_the_equations_without_a_wait(
    options: dict[str, Any], checkpoint: Path, start_engine: StartEngine
):
    reference, requests = KimiK3ImageReference(checkpoint), image_requests()
    with start_engine(checkpoint, environment=FUZZED, **WITH_IMAGES, **options) as engine:
        engine.generate([{"prompt": "words " * 20}], GREEDY)  # creates the masks
        engine.on_workers("watch_encoder")
        outputs = engine.generate(requests, GREEDY)
        forwards, *_ = engine.on_workers("encoder_forwards")
        steps, *_ = engine.on_workers("steps_of_encoder")
    differences = [
        difference_of(reference, request, output)
        for request, output in zip(requests, outputs, strict=True)
    ]
    assert differences == [None] * len(requests)
    images = [image for each in requests for image in each["multi_modal_data"]["image"]]
    with torch.inference_mode():
        expected = torch.cat([reference.network.features(image) for image in images])
    found = torch.cat([features for features, _ in forwards])
    error = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
    waits = {each.synchronizations + each.copies_to_host for _, each in forwards}
    in_steps = {each.synchronizations + each.copies_to_host for each in steps}
    print(f"error of features: {error:.1e}; waits of encoder and steps: {waits}, {in_steps}")
    assert error < 1e-5
    assert waits == in_steps == {0}


def test_a_prompt_with_bad_images_ends_and_the_engine_continues(
    checkpoint: Path, start_engine: StartEngine
):
    image, good = pictures.image(56, 56), image_requests()[:1]
    with start_engine(checkpoint, **WITH_IMAGES) as engine:
        [expected] = engine.generate(good, GREEDY)
        for data, message in (
            ({"image": [image] * 5}, "At most 4 image"),
            ({"image": [Image.new("RGB", (0, 10))]}, "size=0x10"),
            ({"video": [pictures.video(4, 56, 56)]}, "At most 0 video"),
        ):
            text = PLACEHOLDER * len(*data.values())
            with pytest.raises(EngineError, match=message):
                engine.generate([{"prompt": text, "multi_modal_data": data}], GREEDY)
            engine.abort_all()
        [output] = engine.generate(good, GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_files_are_complete_and_those_without_a_tower_serve_text_only(
    checkpoint: Path, tmp_path: Path, start_engine: StartEngine
):
    report = check_checkpoint(checkpoint)
    assert report.can_load, report.problems()
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    text = {name: each for name, each in load_file(file).items() if name.startswith("language")}
    save_file(text, file, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks vision_tower.*--language-model-only"):
        start_engine(tmp_path, **WITH_IMAGES)
    with start_engine(tmp_path, **OF_TEXT) as engine:
        assert_generates(engine, KimiK3Reference(checkpoint), random_prompts([5]), MAX_TOKENS)


@pytest.mark.thorough
def test_data_parallel_ranks_of_which_one_is_idle_give_the_same_tokens(
    checkpoint: Path, start_engine: StartEngine
):
    reference, prompts = KimiK3Reference(checkpoint), random_prompts(LENGTHS)
    options = {**IN_PARTS, **OF_TEXT, "enable_expert_parallel": True}
    with DPEngines(start_engine, checkpoint, 2, environment=FUZZED, **options) as engines:
        for given in (prompts, prompts[:1], prompts):
            assert_greedy(reference, given, engines.generate(given, GREEDY), MAX_TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W4A8_DYNAMIC"])
@pytest.mark.parametrize("options", [{}, EXPERTS_ON_TWO], ids=["one_rank", "expert2"])
def test_logprobs_of_integers_are_as_close_to_the_equations_as_16_bits_allow(
    kind: str,
    options: dict[str, Any],
    checkpoint: Path,
    quantize: Callable[..., Path],
    start_engine: StartEngine,
):
    """The tolerance is the effect of rounding to 16 bits between layers."""
    directory = quantize(checkpoint, "W8A8_DYNAMIC")
    if kind != "W8A8_DYNAMIC":
        directory = as_type(quantize, checkpoint, kind, ".experts.")
    report = check_checkpoint(directory)
    assert report.can_load, report.problems()
    requests = [*as_inputs(random_prompts(LENGTHS[1:])), *image_requests()]
    asked = {"dtype": "bfloat16", **IN_PARTS, **WITH_IMAGES, **options}
    environment = {**RACES, "VNPU_SOC": "Ascend910_9391"}
    with start_engine(directory, environment=environment, **asked) as engine:
        outputs = engine.generate(requests, SCORED)
    prompts = [list(output.prompt_token_ids) for output in outputs]
    ours = torch.tensor(
        [
            row[token].logprob
            for prompt, output in zip(prompts, outputs, strict=True)
            for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )
    exact, rounded, floats = (
        torch.cat(
            [
                reference.logits(prompt, request.get("multi_modal_data", {}).get("image", []))
                .log_softmax(dim=-1)[:-1]
                .gather(1, torch.tensor([prompt[1:]]).t())
                .flatten()
                for prompt, request in zip(prompts, requests, strict=True)
            ]
        )
        for reference in (
            KimiK3Reference(directory),
            KimiK3Reference(directory, torch.bfloat16),
            KimiK3Reference(checkpoint),
        )
    )
    error, allowed, of_floats = (
        float((each - exact).abs().mean()) for each in (ours, rounded, floats)
    )
    print(
        f"mean error of a logprob: {error:.4f}, of 16 bits {allowed:.4f}, of floats {of_floats:.4f}"
    )
    assert error <= 1.15 * allowed
    if kind == "W4A8_DYNAMIC":  # with 8-bit weights, floats lie within the rounding of 16 bits
        assert float((ours - floats).abs().mean()) > error


@pytest.mark.thorough
def test_integers_of_the_text_leave_the_features_of_images_as_they_are(
    checkpoint: Path, quantize: Callable[..., Path], start_engine: StartEngine
):
    found = []
    directory = as_type(quantize, checkpoint, "W4A8_DYNAMIC", ".experts.")  # others W8A8
    for model in (checkpoint, directory):
        with start_engine(model, environment=RACES, dtype="bfloat16", **WITH_IMAGES) as engine:
            engine.on_workers("watch_encoder")
            engine.generate(image_requests(), GREEDY)
            [forwards] = engine.on_workers("encoder_forwards")
            found.append(torch.cat([features for features, _ in forwards]))
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(*found)
