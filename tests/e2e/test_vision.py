"""Models with an encoder of images: transformers' tokens and features, and a host that never waits.

A layer's own cases are in packages/core/tests/attention/test_encoder.py.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from PIL import Image
from vllm import SamplingParams

from vllm_davinci_testing.engines import vision_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.server_process import SMALL, ServerProcess

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
# Width and height: alone, several at once, an edge of one merged patch, smaller windows at edges.
SIZES = [[(112, 84)], [(56, 140), (28, 28), (196, 56)], [(84, 84)] * 4, []]
FAMILIES = sorted(vision_zoo.MODELS)


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
                "limit_mm_per_prompt": {"image": 4, "video": 0},
                "worker_extension_cls": (
                    "vllm_davinci_testing.engines.encoder_worker.EncoderWorker"
                ),
                **options,
            },
        )

    return started


def requests() -> list[dict[str, Any]]:
    every = []
    for number, sizes in enumerate(SIZES):
        images = [vision_zoo.image(*size, seed=10 * number + i) for i, size in enumerate(sizes)]
        data = {"multi_modal_data": {"image": images}} if images else {}
        every.append({"prompt": vision_zoo.prompt(len(images), f"case {number}"), **data})
    return every


class Reference:
    """transformers' results on the CPU in fp32."""

    def __init__(self, checkpoint: Path) -> None:
        self.network = transformers.AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.processor = transformers.Qwen2VLImageProcessor.from_pretrained(checkpoint)

    def _pixels(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        return dict(self.processor(images=images, return_tensors="pt")) if images else {}

    @torch.inference_mode()
    def greedy(self, prompt: list[int], images: list[Image.Image]) -> list[int]:
        ids = torch.tensor([prompt])
        output = self.network.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == vision_zoo.IMAGE_ID).int(),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            **self._pixels(images),
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def features(self, images: list[Image.Image]) -> torch.Tensor:
        found = self.network.model.get_image_features(**self._pixels(images))
        return torch.cat(found.pooler_output)


@pytest.fixture(scope="module")
def reference(vision: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(vision(name)))


def generated(
    engine: EngineProcess, asked: list[dict[str, Any]]
) -> list[tuple[list[int], list[int]]]:
    """Prompt with places for images, and tokens, of each request."""
    return [
        (list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for output in engine.generate(asked, GREEDY)
    ]


def images_of(request: dict[str, Any]) -> list[Image.Image]:
    return request.get("multi_modal_data", {}).get("image", [])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_features_are_those_of_transformers_and_the_encoder_waits_for_nothing(
    family: str,
    vision: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    reference: Callable[[str], Reference],
):
    asked = requests()
    with start(vision(family)) as engine:
        engine.on_workers("watch_encoder")
        answers = generated(engine, asked)
        [forwards] = engine.on_workers("encoder_forwards")
    for request, (prompt, tokens) in zip(asked, answers, strict=True):
        assert tokens == reference(family).greedy(prompt, images_of(request))

    images = [image for request in asked for image in images_of(request)]
    expected = reference(family).features(images)
    # Columns after these are those of deeper blocks (DeepStack).
    found = torch.cat([output for output, _ in forwards])[:, : expected.shape[1]]
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-4
    for _, counts in forwards:
        assert counts["launches"] > 0
        assert (counts["copies_to_host"], counts["synchronizations"]) == (0, 0)


TORCHVISION_FIRST = """
from transformers import LlamaConfig
from torchvision.transforms.v2 import functional
import torch
assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
"""


def test_torchvision_of_the_package_index_is_imported_by_whoever_comes_first():
    """Built for CUDA, beside a torch without; by transformers, before vLLM is there."""
    subprocess.run([sys.executable, "-c", TORCHVISION_FIRST], check=True, timeout=240)


SETTINGS: dict[str, dict[str, Any]] = {
    "chunked_prefill": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    "graph_mode": {"enforce_eager": False},
    "tensor_parallel": {"tensor_parallel_size": 2},
    "encoder_on_every_rank": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
    "races": {"environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_the_same_under(
    setting: str,
    vision: Callable[[str], Path],
    start: Callable[..., EngineProcess],
    reference: Callable[[str], Reference],
):
    family = "qwen2_5_vl"
    asked = requests()
    with start(vision(family), **SETTINGS[setting]) as engine:
        answers = generated(engine, asked)
    for request, (prompt, tokens) in zip(asked, answers, strict=True):
        assert tokens == reference(family).greedy(prompt, images_of(request))


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


@pytest.fixture(scope="module")
def server(
    vision: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("vision_server")
    server = ServerProcess(
        vision("qwen2_5_vl"),
        directory / "log.txt",
        *SMALL,
        "--max-model-len=512",
        "--served-model-name=vision",
        '--limit-mm-per-prompt={"image": 2, "video": 0}',
        f"--allowed-local-media-path={directory}",
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


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def answer(client: openai.OpenAI, *urls: str) -> str:
    images: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    completion = client.chat.completions.create(
        model="vision",
        messages=[{"role": "user", "content": [*images, {"type": "text", "text": "what"}]}],
        max_tokens=8,
        temperature=0,
    )
    text = completion.choices[0].message.content
    assert text is not None
    return text


def test_an_image_comes_as_data_or_from_a_file_and_makes_a_difference(
    client: openai.OpenAI, server: ServerProcess
):
    image = vision_zoo.image(112, 84)
    from_data = answer(client, data_url(png(image)))
    assert from_data == answer(client, f"file://{server.log.parent}/image.png")
    assert from_data != answer(client, data_url(png(vision_zoo.image(112, 84, seed=7))))


def broken_images() -> dict[str, tuple[list[str], str]]:
    """Addresses, and what the answer says."""
    image = png(vision_zoo.image(56, 56))
    return {
        "cut_short": ([data_url(image[:60])], "image"),
        "no_image": ([data_url(b"nothing of the kind")], "image"),
        "not_base64": (["data:image/png;base64,?!"], ""),
        "other_mime": ([data_url(b"a text", "text/plain")], ""),
        "too_many": ([data_url(image)] * 3, "At most 2 image"),
        "too_narrow": ([data_url(png(vision_zoo.image(2000, 5)))], "size=2000x5"),
        "elsewhere": (["file:///etc/hostname"], "allowed"),
        "not_there": (["file:///no/such/file.png"], ""),
    }


@pytest.mark.parametrize("case", broken_images())
def test_a_bad_image_is_the_askers_error_and_the_server_goes_on(case: str, client: openai.OpenAI):
    urls, said = broken_images()[case]
    good = data_url(png(vision_zoo.image(56, 56)))
    expected = answer(client, good)
    with pytest.raises(openai.APIStatusError) as raised:
        answer(client, *urls)
    assert 400 <= raised.value.status_code < 500
    assert said in str(raised.value)
    assert answer(client, good) == expected
