"""Models with an encoder of images: transformers' tokens and features, and a host that never waits.

A layer's own cases are in packages/core/tests/attention/test_encoder.py.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci_testing.engines import adapters, vision_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.rounding import first_wrong_token
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer, ServerProcess
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.engines.transformers_reference import CLOSE

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# Width and height: alone, several at once, an edge of one merged patch, smaller windows at edges.
SIZES = [[(112, 84)], [(56, 140), (28, 28), (196, 56)], [(84, 84)] * 4, []]
# Images, then videos: frames, width, height. An odd number of frames is filled up by one. Positions
# in time stay below those in space: after more, vLLM goes on, as the model's authors do, and
# transformers has text at the positions of late frames.
VIDEOS = [([], [(5, 112, 56)]), ([(56, 84)], [(4, 56, 112), (7, 140, 56)])]
FPS = [3.0, 2.5]
FAMILIES = sorted(vision_zoo.MODELS)

Request = dict[str, Any]
AUTO_CLASS = transformers.AutoModelForImageTextToText


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a checkpoint of vision_zoo at its first use; its directory."""
    directory = tmp_path_factory.mktemp("vision")
    return cache(lambda name: vision_zoo.write_vision_checkpoint(name, directory / name))


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
    """As vLLM takes them: images of several sizes, none, and where the family can, videos."""
    cases: list[Any] = [(sizes, []) for sizes in SIZES]
    if vision_zoo.MODELS[family].takes_videos:
        cases += VIDEOS
    every = []
    for number, (sizes, clips) in enumerate(cases):
        data: dict[str, Any] = {}
        if sizes:
            data["image"] = [
                vision_zoo.image(*size, seed=10 * number + i) for i, size in enumerate(sizes)
            ]
        if clips:
            clips = [vision_zoo.video(*clip, seed=number + i) for i, clip in enumerate(clips)]
            data["video"] = [
                (frames, vision_zoo.video_metadata(frames, fps))
                for frames, fps in zip(clips, FPS, strict=False)
            ]
        prompt = vision_zoo.prompt(len(sizes), f"case {number}", videos=len(clips))
        every.append({"prompt": prompt, **({"multi_modal_data": data} if data else {})})
    return every


class Reference:
    """transformers' results on the CPU in fp32."""

    def __init__(
        self, checkpoint: Path, needs_metadata: bool, network: torch.nn.Module | None = None
    ) -> None:
        self.network: Any = (
            network
            or AUTO_CLASS.from_pretrained(
                checkpoint, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        )
        self.processor = transformers.AutoProcessor.from_pretrained(checkpoint)
        self._needs_metadata = needs_metadata

    def _inputs(self, request: Request) -> dict[str, torch.Tensor]:
        data = request.get("multi_modal_data", {})
        videos: dict[str, Any] = {}
        if "video" in data:
            videos = {"videos": [frames for frames, _ in data["video"]], "do_sample_frames": False}
            if self._needs_metadata:
                told = [dict(metadata) for _, metadata in data["video"]]
                for each in told:
                    del each["do_sample_frames"]
                videos["video_metadata"] = told
        inputs = self.processor(
            text=[request["prompt"]], images=data.get("image"), return_tensors="pt", **videos
        )
        return {name: value for name, value in inputs.items() if name != "video_metadata"}

    @torch.inference_mode()
    def logits(self, request: Request, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary]: what each token is chosen from, after those before it."""
        inputs = self._inputs(request)
        prompt = inputs["input_ids"].shape[1]
        following = torch.tensor([tokens])
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            if name not in inputs:  # of families that mark places by tokens alone
                continue
            added = {"input_ids": following, "attention_mask": following * 0 + 1}
            inputs[name] = torch.cat([inputs[name], added.get(name, following * 0)], dim=1)
        logits: torch.Tensor = self.network(**inputs).logits[0, prompt - 1 : -1]
        return logits

    def assert_chosen(self, request: Request, answer: tuple[list[int], list[int]]) -> None:
        """The answer has the prompt with places for images and videos, and the greedy tokens."""
        prompt, tokens = answer
        assert prompt == self._inputs(request)["input_ids"][0].tolist()
        assert len(tokens) == MAX_TOKENS
        wrong = first_wrong_token(self.network, lambda: self.logits(request, tokens), tokens)
        assert wrong is None, wrong

    def gaps(self, request: Request, tokens: list[int]) -> torch.Tensor:
        """[tokens]: how far each one's logit is below the best after those before it, in standard
        deviations of all logits."""
        rows = self.logits(request, tokens)
        chosen = rows.gather(1, torch.tensor([tokens]).T)[:, 0]
        gaps: torch.Tensor = (rows.max(dim=1).values - chosen) / rows.std(dim=1)
        return gaps

    @torch.inference_mode()
    def features(self, request: Request) -> list[torch.Tensor]:
        """[tokens, hidden_size] of each image, then of each video."""
        inputs = self._inputs(request)
        found: list[torch.Tensor] = []
        if "pixel_values" in inputs:
            names = ("pixel_values", "image_grid_thw")
            given = {name: inputs[name] for name in names if name in inputs}
            found += self.network.model.get_image_features(**given).pooler_output
        if "pixel_values_videos" in inputs:
            found += self.network.model.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"]
            ).pooler_output
        return found


@pytest.fixture(scope="module")
def reference(vision: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(vision(name), vision_zoo.MODELS[name].needs_metadata))


def generated(engine: EngineProcess, asked: list[Request]) -> list[tuple[list[int], list[int]]]:
    """Prompt with places for images and videos, and tokens, of each request."""
    return [
        (list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for output in engine.generate(asked, GREEDY)
    ]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.thorough if family == "glm4v" else ())
        for family in FAMILIES
    ],
)
def test_tokens_and_features_are_those_of_transformers_and_the_encoder_waits_for_nothing(
    family: str,
    vision: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    reference: Callable[[str], Reference],
):
    asked = requests(family)
    limits = {"image": 4, "video": 2} if vision_zoo.MODELS[family].takes_videos else {"image": 4}
    with start(vision(family), limit_mm_per_prompt=limits) as engine:
        # All steps share a mask, which the first one makes.
        generated(engine, [request for request in asked if "multi_modal_data" not in request])
        engine.on_workers("watch_encoder")
        answers = generated(engine, asked)
        [forwards] = engine.on_workers("encoder_forwards")
        [steps] = engine.on_workers("steps_of_encoder")
    for request, answer in zip(asked, answers, strict=True):
        reference(family).assert_chosen(request, answer)

    expected = [each for request in asked for each in reference(family).features(request)]
    # Columns after these are those of deeper blocks (DeepStack).
    found = torch.cat([output for output, _ in forwards])[:, : expected[0].shape[1]]
    # vLLM encodes the images of a step before its videos.
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
    """Where rows begin that are these features, to fp32's accuracy."""
    windows = rows.unfold(0, len(features), 1).transpose(1, 2)  # [starts, tokens, hidden_size]
    errors = (windows - features).norm(dim=2) / features.norm(dim=1)
    return (errors.amax(dim=1) < 1e-4).nonzero().flatten().tolist()


def test_adapters_change_the_text_model_and_those_of_the_encoder_are_refused(
    vision: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    reference: Callable[[str], Reference],
    tmp_path: Path,
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


def test_torchvision_of_the_package_index_is_imported_by_whoever_comes_first():
    """Built for CUDA, beside a torch without; by transformers, before vLLM is there."""
    subprocess.run([sys.executable, "-c", TORCHVISION_FIRST], check=True, timeout=240)


RACES = {"environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}}
TWO_RANKS = {"tensor_parallel_size": 2}
UBATCHES = {"additional_config": {"dbo": {**SPLIT_ALWAYS, "split": "token"}}}
# Fewer tokens than the prompts have: images and videos arrive in parts.
CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 4}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "chunked_prefill": ("qwen2_5_vl", CHUNKS),
    "graph_mode": ("qwen2_5_vl", {"enforce_eager": False}),
    "tensor_parallel": ("qwen2_5_vl", TWO_RANKS),
    "encoder_on_every_rank": ("qwen2_5_vl", {**TWO_RANKS, "mm_encoder_tp_mode": "data"}),
    "races": ("qwen2_5_vl", RACES),
    "ubatches_m_rope": ("qwen2_5_vl", {**TWO_RANKS, **UBATCHES, **CHUNKS, **RACES}),
    "ubatches_deepstack": ("qwen3_vl", {**TWO_RANKS, **UBATCHES, **RACES}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_the_same_under(
    setting: str,
    vision: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    reference: Callable[[str], Reference],
):
    family, options = SETTINGS[setting]
    asked = requests(family)
    with start(vision(family), **options) as engine:
        answers = generated(engine, asked)
        decisions = Counter(engine.on_workers("overlap_decisions")[0])
    for request, answer in zip(asked, answers, strict=True):
        reference(family).assert_chosen(request, answer)
    if UBATCHES.items() <= options.items():
        assert decisions["split"] > 5
        assert decisions["unsupported"] == 0


@pytest.fixture(scope="module")
def int8(vision: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model in int8, the encoder in bf16."""
    directory = tmp_path_factory.mktemp("int8") / "qwen2_5_vl"
    kind = "W8A8_DYNAMIC"
    Exporter(vision("qwen2_5_vl"), directory, kind, torch.bfloat16, {}).run(lambda _: None)
    types = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
    quantized = {name for name, value in types.items() if value == kind}
    assert quantized and not any(".visual." in name for name in quantized)
    return directory


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
    assert gaps.max() <= CLOSE
    assert (gaps > 0).float().mean() < 0.1


def test_an_int8_text_model_answers_the_same_in_ubatches_and_from_graphs(
    int8: Path, start: Callable[..., EngineProcess]
):
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


def test_what_cannot_be_answered_ends_its_request_and_the_engine_goes_on(
    vision: Callable[[str], Path], start: Callable[..., EngineProcess]
):
    image = vision_zoo.image(56, 56)
    with start(vision("qwen2_5_vl")) as engine:
        [expected] = generated(engine, requests()[:1])
        for bad, message in (
            ([image] * 5, "At most 4 image"),
            ([Image.new("RGB", (0, 10))], "0"),
            ([vision_zoo.image(2000, 5)], "aspect ratio"),
        ):
            with pytest.raises(EngineError, match=message):
                generated(
                    engine,
                    [
                        {
                            "prompt": vision_zoo.prompt(len(bad)),
                            "multi_modal_data": {"image": bad},
                        }
                    ],
                )
            engine.abort_all()
        assert generated(engine, requests()[:1]) == [expected]


# --- a server ----------------------------------------------------------------------------------

VIDEO_FPS = 2


@pytest.fixture(scope="module")
def server(
    vision: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("vision_server")
    server = ForkedServer(
        vision("qwen2_5_vl"),
        directory / "log.txt",
        *SMALL,
        "--max-model-len=512",
        "--served-model-name=vision",
        '--limit-mm-per-prompt={"image": 2, "video": 1}',
        f'--media-io-kwargs={{"video": {{"fps": {VIDEO_FPS}}}}}',
        f"--allowed-local-media-path={directory}",
        environment={"VLLM_MAX_IMAGE_PIXELS": str(MOST_PIXELS)},
    )
    vision_zoo.image(112, 84).save(directory / "image.png")
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def chat(client: openai.OpenAI, urls: Sequence[str]) -> Any:
    kinds = ["video_url" if url.startswith("data:video/") else "image_url" for url in urls]
    parts: list[Any] = [
        {"type": kind, kind: {"url": url}} for kind, url in zip(kinds, urls, strict=True)
    ]
    return client.chat.completions.create(
        model="vision",
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )


def answer(client: openai.OpenAI, *urls: str) -> tuple[list[int], list[int]]:
    """Prompt with places for images and videos, and tokens."""
    completion = chat(client, urls)
    return completion.prompt_token_ids, completion.choices[0].token_ids


def test_an_image_comes_as_data_or_from_a_file_and_makes_a_difference(
    client: openai.OpenAI, server: ServerProcess, reference: Callable[[str], Reference]
):
    image = vision_zoo.image(112, 84)
    from_data = answer(client, data_url(encoded(image)))
    request = {"prompt": vision_zoo.prompt(1, "\nwhat"), "multi_modal_data": {"image": [image]}}
    reference("qwen2_5_vl").assert_chosen(request, from_data)
    assert from_data == answer(client, f"file://{server.log.parent}/image.png")
    assert from_data != answer(client, data_url(encoded(vision_zoo.image(112, 84, seed=7))))


def videos(directory: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Frames as they are decoded, and the address of each form in which they can come."""
    frames = vision_zoo.video(8, 196, 56, seed=3)
    file = directory / "video.mp4"
    content = vision_zoo.mp4(file, frames, fps=VIDEO_FPS)
    pictures = [encoded(Image.fromarray(frame), "jpeg") for frame in frames]
    joined = ",".join(base64.b64encode(picture).decode() for picture in pictures)
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(picture))) for picture in pictures])
    return {
        "mp4": (vision_zoo.decoded(file), data_url(content, "video/mp4")),
        "frames": (decoded, f"data:video/jpeg;base64,{joined}"),
    }


@pytest.mark.parametrize("form", ["mp4", "frames"])
def test_a_video_comes_as_a_file_or_as_frames(
    form: str, client: openai.OpenAI, tmp_path: Path, reference: Callable[[str], Reference]
):
    frames, url = videos(tmp_path)[form]
    assert len(frames) == 8
    request = {
        "prompt": vision_zoo.prompt(0, "\nwhat", videos=1),
        "multi_modal_data": {"video": [(frames, vision_zoo.video_metadata(frames, VIDEO_FPS))]},
    }
    reference("qwen2_5_vl").assert_chosen(request, answer(client, url))


# --- bad images and videos -----------------------------------------------------------------------

MOST_PIXELS = 300_000  # of an image of the server
MOST_GROWTH = 16 << 20  # bytes that its processes may gain, all together
NO_PIXELS = bytes.fromhex("89504e470d0a1a0a0000000d49484452") + struct.pack(">II", 0, 10) + bytes(9)


def broken(directory: Path, seed: int = 0) -> dict[str, tuple[list[str], str]]:
    """Addresses of images and videos, and what the answer says; `seed` makes others of them."""
    image = encoded(vision_zoo.image(56, 56, seed))
    video = vision_zoo.mp4(directory / "whole.mp4", vision_zoo.video(4, 56, 56, seed), fps=2.0)
    large = vision_zoo.mp4(directory / "large.mp4", np.zeros((2, 600, 600, 3), np.uint8), fps=2.0)
    return {
        "cut_short": ([data_url(image[: 60 + seed % 7])], "image"),
        "no_image": ([data_url(b"nothing of the kind %d" % seed)], "image"),
        "no_pixels": ([data_url(NO_PIXELS)], "image"),
        "not_base64": (["data:image/png;base64,?!"], ""),
        "other_mime": ([data_url(b"a text", "text/plain")], ""),
        "too_many": ([data_url(image)] * 3, "At most 2 image"),
        "too_narrow": ([data_url(encoded(vision_zoo.image(2000 + seed % 7, 5)))], "size="),
        "too_large": ([data_url(encoded(Image.new("L", (600, 600 + seed % 7))))], "pixels"),
        "elsewhere": (["file:///etc/hostname"], "allowed"),
        "not_there": (["file:///no/such/file.png"], ""),
        "video_cut_short": ([data_url(video[: len(video) // 2], "video/mp4")], "video"),
        "no_video": ([data_url(b"nothing of the kind", "video/mp4")], "video"),
        "video_of_broken_frames": ([data_url(image[:60], "video/jpeg")], "image"),
        "video_too_large": ([data_url(large, "video/mp4")], "pixels"),
        "too_many_videos": ([data_url(video, "video/mp4")] * 2, "At most 1 video"),
    }


@pytest.mark.parametrize("case", [
    "cut_short", "no_image", "no_pixels", "not_base64", "other_mime", "too_many", "too_narrow",
    "too_large", "elsewhere", "not_there", "video_cut_short", "no_video",
    "video_of_broken_frames", "video_too_large", "too_many_videos",
])  # fmt: skip
def test_a_bad_image_or_video_is_the_askers_error_and_the_server_goes_on(
    case: str, client: openai.OpenAI, tmp_path: Path
):
    urls, said = broken(tmp_path)[case]
    good = data_url(encoded(vision_zoo.image(56, 56)))
    expected = answer(client, good)
    with pytest.raises(openai.APIStatusError) as raised:
        answer(client, *urls)
    assert 400 <= raised.value.status_code < 500
    assert said in str(raised.value)
    assert answer(client, good) == expected


@pytest.mark.parametrize(
    ("first", "requests"),
    [pytest.param(30, 90, id="90"),
     pytest.param(200, 1000, id="1000", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_bad_requests_leave_no_memory_behind(
    first: int, requests: int, client: openai.OpenAI, server: ServerProcess, tmp_path: Path
):
    """The server's processes hold no more memory after all of them than after the `first`."""

    def resident() -> int:
        return sum(process.memory_info().rss for process in server.processes())

    held = 0
    cases: list[list[str]] = []
    for number in range(requests):
        if number == first:
            held = resident()
        if not cases:
            cases = [urls for urls, _ in broken(tmp_path, seed=number).values()]
        with pytest.raises(openai.APIStatusError) as raised:
            answer(client, *cases.pop())
        assert 400 <= raised.value.status_code < 500
    assert resident() - held < MOST_GROWTH


# As if it was not installed, in every process that finds this file on its path.
WITHOUT_TORCHVISION = """
import sys


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *arguments):
        if name.partition(".")[0] == "torchvision":
            return None
        return self.finder.find_spec(name, *arguments)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.mark.thorough
def test_without_torchvision_the_start_says_what_is_missing(
    vision: Callable[[str], Path], tmp_path: Path
):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCHVISION)
    # Of an empty cache: vLLM keeps what it has once found out about a model's class.
    environment = {"PYTHONPATH": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    server = ServerProcess(
        vision("qwen2_5_vl"), tmp_path / "log.txt", *SMALL, environment=environment
    )
    try:
        with pytest.raises(RuntimeError, match="vllm serve ended with"):
            server.wait_until_ready()
    finally:
        server.kill()
    assert "No module named 'torchvision'" in server.log_text()
