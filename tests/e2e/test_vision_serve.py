"""A server of models with image encoders: data URLs, files, and broken input."""

import base64
import io
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from vllm_davinci_testing.engines import pictures, vision_zoo
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer, ServerProcess
from vllm_davinci_testing.engines.vision_reference import MAX_TOKENS, Reference


@pytest.fixture(scope="module")
def reference(vision: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(vision(name), vision_zoo.MODELS[name].needs_metadata))


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
    pictures.image(112, 84).save(directory / "image.png")
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


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
    """Returns the prompt, with placeholders for images and videos, and the answer's tokens."""
    completion = chat(client, urls)
    return completion.prompt_token_ids, completion.choices[0].token_ids


def test_an_image_comes_as_data_or_from_a_file_and_makes_a_difference(client, server, reference):
    image = pictures.image(112, 84)
    from_data = answer(client, data_url(encoded(image)))
    request = {"prompt": vision_zoo.prompt(1, "\nwhat"), "multi_modal_data": {"image": [image]}}
    reference("qwen2_5_vl").assert_chosen(request, from_data)
    assert from_data == answer(client, f"file://{server.log.parent}/image.png")
    assert from_data != answer(client, data_url(encoded(pictures.image(112, 84, seed=7))))


def videos(directory: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Returns each video's decoded frames, and the URL to send."""
    frames = pictures.video(8, 196, 56, seed=3)
    file = directory / "video.mp4"
    content = pictures.mp4(file, frames, fps=VIDEO_FPS)
    stills = [encoded(Image.fromarray(frame), "jpeg") for frame in frames]
    joined = ",".join(base64.b64encode(picture).decode() for picture in stills)
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(picture))) for picture in stills])
    return {
        "mp4": (pictures.decoded(file), data_url(content, "video/mp4")),
        "frames": (decoded, f"data:video/jpeg;base64,{joined}"),
    }


@pytest.mark.parametrize("form", ["mp4", "frames"])
def test_a_video_comes_as_a_file_or_as_frames(form, client, tmp_path, reference):
    frames, url = videos(tmp_path)[form]
    assert len(frames) == 8
    request = {
        "prompt": vision_zoo.prompt(0, "\nwhat", videos=1),
        "multi_modal_data": {"video": [(frames, pictures.video_metadata(frames, VIDEO_FPS))]},
    }
    reference("qwen2_5_vl").assert_chosen(request, answer(client, url))


# --- bad images and videos -----------------------------------------------------------------------

MOST_PIXELS = 300_000  # per image, a limit of the server
MOST_GROWTH = 16 << 20  # bytes that all its processes may gain
NO_PIXELS = bytes.fromhex("89504e470d0a1a0a0000000d49484452") + struct.pack(">II", 0, 10) + bytes(9)


def broken(directory: Path, seed: int = 0) -> dict[str, tuple[list[str], str]]:
    """Returns URLs of invalid inputs with a word of the expected error; `seed` varies them."""
    image = encoded(pictures.image(56, 56, seed))
    video = pictures.mp4(directory / "whole.mp4", pictures.video(4, 56, 56, seed), fps=2.0)
    large = pictures.mp4(directory / "large.mp4", np.zeros((2, 600, 600, 3), np.uint8), fps=2.0)
    return {
        "cut_short": ([data_url(image[: 60 + seed % 7])], "image"),
        "no_image": ([data_url(b"nothing of the kind %d" % seed)], "image"),
        "no_pixels": ([data_url(NO_PIXELS)], "image"),
        "not_base64": (["data:image/png;base64,?!"], ""),
        "other_mime": ([data_url(b"a text", "text/plain")], ""),
        "too_many": ([data_url(image)] * 3, "At most 2 image"),
        "too_narrow": ([data_url(encoded(pictures.image(2000 + seed % 7, 5)))], "size="),
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
def test_a_bad_image_or_video_is_a_client_error_and_the_server_continues(case, client, tmp_path):
    urls, said = broken(tmp_path)[case]
    good = data_url(encoded(pictures.image(56, 56)))
    expected = answer(client, good)
    with pytest.raises(openai.APIStatusError) as raised:
        answer(client, *urls)
    assert 400 <= raised.value.status_code < 500
    assert said in str(raised.value)
    assert answer(client, good) == expected


@pytest.mark.parametrize(
    ("first", "requests"),
    [pytest.param(30, 90, id="90", marks=pytest.mark.nightly("refusals")),
     pytest.param(200, 1000, id="1000", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_bad_requests_leave_no_memory_behind(first, requests, client, server, tmp_path):
    """The server's processes use no more memory at the end than after the `first` requests."""

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


# Hides torchvision in every process that finds this file on its path.
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
def test_without_torchvision_the_start_says_what_is_missing(vision, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCHVISION)
    # Use an empty cache, because vLLM stores what it found about a model's class.
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
