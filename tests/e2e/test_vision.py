"""Models with image encoders: transformers' tokens and features, and the host never waits.

packages/core/tests/attention/test_encoder.py tests the layer.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci_testing.engines import adapters, pictures, vision_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import CLOSE
from vllm_davinci_testing.engines.vision_reference import AUTO_CLASS, MAX_TOKENS, Reference, Request

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# Width and height: one image, several, an edge of one merged patch, smaller windows at edges.
SIZES = [[(112, 84)], [(56, 140), (28, 28), (196, 56)], [(84, 84)] * 4, []]
# Images, then videos (frames, width, height). An odd number of frames is padded by one. Videos are
# short enough that no frame's position in time exceeds its positions in space: for longer videos
# vLLM and transformers number the text after them differently.
VIDEOS = [([], [(5, 112, 56)]), ([(56, 84)], [(4, 56, 112), (7, 140, 56)])]
FPS = [3.0, 2.5]
FAMILIES = sorted(
    name
    for name in vision_zoo.MODELS
    if not name.startswith(  # in test_vision_families and the zoo
        ("exaone", "glm5_next", "glm_ocr", "qwen3_5", "qwen3_vl_moe")
    )
)
OTHER_FAMILIES = ("glm4v", "glm4v_moe", "internvl", "qwen2_vl")  # the others share their parts


@pytest.fixture(scope="module")
def start(start_engine: Callable[..., EngineProcess]) -> Callable[..., EngineProcess]:
    def started(model: Path, **options: Any) -> EngineProcess:
        return start_engine(
            model,
            **{
                "max_model_len": 512,
                "limit_mm_per_prompt": {"image": 4, "video": 2},
                "worker_extension_cls": (
                    "vllm_davinci_testing.engines.encoder_worker.EncoderWorker"
                ),
                **options,
            },
        )

    return started


def requests(family: str = "qwen2_5_vl") -> list[Request]:
    """Makes requests with images of several sizes, none, and videos if the family has them."""
    cases: list[Any] = [(sizes, []) for sizes in SIZES]
    if vision_zoo.MODELS[family].takes_videos:
        cases += VIDEOS
    every = []
    for number, (sizes, clips) in enumerate(cases):
        data: dict[str, Any] = {}
        if sizes:
            data["image"] = [
                pictures.image(*size, seed=10 * number + i) for i, size in enumerate(sizes)
            ]
        if clips:
            clips = [pictures.video(*clip, seed=number + i) for i, clip in enumerate(clips)]
            data["video"] = [
                (frames, pictures.video_metadata(frames, fps))
                for frames, fps in zip(clips, FPS, strict=False)
            ]
        prompt = vision_zoo.prompt(len(sizes), f"case {number}", videos=len(clips))
        every.append({"prompt": prompt, **({"multi_modal_data": data} if data else {})})
    return every


@pytest.fixture(scope="module")
def reference(vision: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(vision(name), vision_zoo.MODELS[name].needs_metadata))


def generated(engine: EngineProcess, asked: list[Request]) -> list[tuple[list[int], list[int]]]:
    """Returns each request's prompt, with placeholders for images and videos, and its tokens."""
    return [
        (list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for output in engine.generate(asked, GREEDY)
    ]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.thorough if family in OTHER_FAMILIES else ())
        for family in FAMILIES
    ],
)
def test_tokens_and_features_equal_those_of_transformers_and_the_encoder_waits_for_nothing(
    family, vision, start, reference
):
    asked = requests(family)
    limits = {"image": 4, "video": 2} if vision_zoo.MODELS[family].takes_videos else {"image": 4}
    with start(vision(family), limit_mm_per_prompt=limits) as engine:
        # The first step creates a mask and the largest workspace, which later steps share.
        generated(engine, [{"prompt": "words " * 70}])
        engine.on_workers("watch_encoder")
        answers = generated(engine, asked)
        [forwards] = engine.on_workers("encoder_forwards")
        [steps] = engine.on_workers("steps_of_encoder")
    for request, answer in zip(asked, answers, strict=True):
        reference(family).assert_chosen(request, answer)

    expected = [each for request in asked for each in reference(family).features(request)]
    # Later columns belong to deeper blocks (DeepStack).
    found = torch.cat([output for output, _ in forwards])[:, : expected[0].shape[1]]
    # In each step vLLM encodes images before videos.
    starts = {start for features in expected for start in places_of(features, found)}
    assert len(starts) == len(expected)
    assert len(found) == sum(map(len, expected))
    for _, counts in forwards:
        assert counts.launches > 0
        assert (counts.copies_to_host, counts.synchronizations) == (0, 0)
    assert steps
    for counts in steps:
        assert (counts.copies_to_host, counts.synchronizations) == (0, 0)


def places_of(features: torch.Tensor, rows: torch.Tensor) -> list[int]:
    """Returns the rows at which `features` occur, to fp32's accuracy."""
    windows = rows.unfold(0, len(features), 1).transpose(1, 2)  # [starts, tokens, hidden_size]
    errors = (windows - features).norm(dim=2) / features.norm(dim=1)
    return (errors.amax(dim=1) < 1e-4).nonzero().flatten().tolist()


@pytest.mark.nightly("weights")
def test_adapters_change_the_text_model_and_those_of_the_encoder_are_refused(
    vision, start, reference, tmp_path
):
    model = reference("qwen2_5_vl")
    text, encoder = (
        adapters.write_adapter(model.network, tmp_path / name, 8, seed=5, targets=targets)
        for name, targets in (("text", r"language_model\..*_proj$"), ("encoder", r"attn\.qkv$"))
    )
    asked = requests("qwen2_5_vl")[:2]
    chosen = [None, LoRARequest("text", 1, str(text))]
    options = {"enable_lora": True, "max_lora_rank": 8, **RACES}
    with start(vision("qwen2_5_vl"), **options) as engine:
        outputs = engine.generate(
            [request for request in asked for _ in chosen], GREEDY, lora_request=chosen * len(asked)
        )
        with pytest.raises(EngineError, match=r"does not fit: .*visual\.blocks\.0\.attn\.qkv"):
            engine.add_lora(LoRARequest("encoder", 2, str(encoder)))
    answers = [(list(o.prompt_token_ids), list(o.outputs[0].token_ids)) for o in outputs]
    for request, base, adapted in zip(asked, answers[::2], answers[1::2], strict=True):
        model.assert_chosen(request, base)
        with adapters.adapted(model.network, text):
            model.assert_chosen(request, adapted)
        assert base != adapted


TORCHVISION_FIRST = """
from transformers import LlamaConfig
from torchvision.transforms.v2 import functional
import torch
assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
"""


@pytest.mark.nightly("planning")
def test_torchvision_for_cuda_can_be_imported_before_vllm():
    """transformers may import torchvision built for CUDA, beside a CPU torch, before vLLM."""
    subprocess.run([sys.executable, "-c", TORCHVISION_FIRST], check=True, timeout=240)


RACES = {"environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}}
TWO_RANKS = {"tensor_parallel_size": 2}
UBATCHES = {"additional_config": {"dbo": {**SPLIT_ALWAYS, "split": "token"}}}
# Prompts have more tokens, so images and videos are chunked.
CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 4}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunked_prefill": ("qwen2_5_vl", CHUNKS),
    "graph_mode": ("qwen2_5_vl", {"enforce_eager": False}),
    "tensor_parallel": ("qwen2_5_vl", TWO_RANKS),
    "encoder_on_every_rank": ("qwen2_5_vl", {**TWO_RANKS, "mm_encoder_tp_mode": "data"}),
    "races": ("qwen2_5_vl", RACES),
    "ubatches_m_rope": ("qwen2_5_vl", {**TWO_RANKS, **UBATCHES, **CHUNKS, **RACES}),
    "graphs_of_chosen_groups": (
        "qwen4_exp",
        {**TWO_RANKS, **CHUNKS, **RACES, "enforce_eager": False, "block_size": 256},
    ),
    "ubatches_deepstack": ("qwen3_vl", {**TWO_RANKS, **UBATCHES, **RACES}),
}
DAILY = ("graph_mode", "ubatches_m_rope")


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.thorough) for name in SETTINGS],
)
def test_tokens_are_the_same_under(setting, vision, start, reference):
    family, options = SETTINGS[setting]
    asked = requests(family)
    with start(vision(family), **options) as engine:
        answers = generated(engine, asked)
        decisions = Counter(engine.on_workers("overlap_decisions")[0])
        replays = engine.on_workers("graph_replays")
    for request, answer in zip(asked, answers, strict=True):
        reference(family).assert_chosen(request, answer)
    assert options.get("enforce_eager", True) or all(sum(each.values()) > 5 for each in replays)
    if UBATCHES.items() <= options.items():
        assert decisions["split"] > 5
        assert decisions["unsupported"] == 0


@pytest.fixture(scope="module")
def int8(vision: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint with the text model in int8 and the encoder in bf16."""
    directory = tmp_path_factory.mktemp("int8") / "qwen2_5_vl"
    kind = "W8A8_DYNAMIC"
    Exporter(vision("qwen2_5_vl"), directory, kind, torch.bfloat16, {}).run(lambda _: None)
    types = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
    quantized = {name for name, value in types.items() if value == kind}
    assert quantized and not any(".visual." in name for name in quantized)
    return directory


@pytest.mark.nightly("layouts")
def test_an_int8_text_model_answers_as_its_integers_do(int8: Path, start: Callable[..., Any]):
    asked = requests()
    with start(int8, dtype="bfloat16", enforce_eager=False) as engine:
        answers = generated(engine, asked)
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    network = IntegerReference(int8, AUTO_CLASS, names).network
    expected = Reference(int8, needs_metadata=False, network=network)
    gaps = torch.cat(
        [
            expected.gaps(request, tokens)
            for request, (_, tokens) in zip(asked, answers, strict=True)
        ]
    )
    # Processors differ in how they round bf16.
    assert (gaps > CLOSE).sum() <= 1 and gaps.max() < 2 * CLOSE
    assert (gaps > 0).float().mean() < 0.1


@pytest.mark.nightly("layouts")
def test_an_int8_text_model_answers_the_same_in_ubatches_and_from_graphs(int8, start):
    asked = requests()
    found = []
    prefills = {**SPLIT_ALWAYS, "split": "token", "decode": False}
    together = {"additional_config": {"dbo": prefills}, **RACES, "enforce_eager": False}
    for options in ({}, together):
        with start(int8, dtype="bfloat16", **TWO_RANKS, **options) as engine:
            found.append(generated(engine, asked))
            decisions = Counter(engine.on_workers("overlap_decisions")[0])
            replays = engine.on_workers("graph_replays")
    assert found[0] == found[1]
    assert decisions["split"] > 0
    assert all(sum(of_worker.values()) > 5 for of_worker in replays)


def test_an_unanswerable_request_ends_and_the_engine_continues(vision, start):
    image = pictures.image(56, 56)
    with start(vision("qwen2_5_vl")) as engine:
        [expected] = generated(engine, requests()[:1])
        for bad, message in (
            ([image] * 5, "At most 4 image"),
            ([Image.new("RGB", (0, 10))], "0"),
            ([pictures.image(2000, 5)], "aspect ratio"),
        ):
            with pytest.raises(EngineError, match=message):
                generated(
                    engine,
                    [{"prompt": vision_zoo.prompt(len(bad)), "multi_modal_data": {"image": bad}}],
                )
            engine.abort_all()
        assert generated(engine, requests()[:1]) == [expected]
