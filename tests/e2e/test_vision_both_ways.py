"""Gemma3, whose images see each other both ways: transformers' tokens, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import SamplingParams

from vllm_davinci_testing.engines import vision_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.gemma3_checkpoint import (
    TOKENS_PER_IMAGE,
    gemma3_prompt,
    write_gemma3,
)
from vllm_davinci_testing.engines.rounding import first_wrong_token

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
THOROUGH = pytest.mark.thorough
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
# Words, with an image between each two: before and after text, one after the other, none.
PROMPTS = [
    ("look: ", " what is this"),
    ("", "", " and these"),
    ("one", "two", "three", "", "five"),
    ("no image at all",),
    ("a text of more than one window before it" * 4, ""),
]
CHUNKS = {"max_num_batched_tokens": 3 * TOKENS_PER_IMAGE, "max_num_seqs": 4}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [2, 8],
    },
}
LIMITS = {"max_model_len": 512, "limit_mm_per_prompt": {"image": 4}}


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3") / "model")


@pytest.fixture(scope="module")
def network(gemma3: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        gemma3, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def requests() -> list[dict[str, Any]]:
    every = []
    for number, words in enumerate(PROMPTS):
        images = [
            vision_zoo.image(40 + 20 * i, 90, seed=10 * number + i) for i in range(len(words) - 1)
        ]
        data = {"multi_modal_data": {"image": images}} if images else {}
        every.append({"prompt": gemma3_prompt(*words), **data})
    return every


def assert_tokens(
    checkpoint: Path, network: Any, asked: list[dict[str, Any]], outputs: list[Any]
) -> None:
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    for request, output in zip(asked, outputs, strict=True):
        images = request.get("multi_modal_data", {}).get("image")
        inputs = processor(
            text=[request["prompt"]], images=None if images is None else [images],
            return_tensors="pt",
        )  # fmt: skip
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == MAX_TOKENS
        following = torch.tensor([tokens])
        for name, value in (("input_ids", 0), ("attention_mask", 1), ("token_type_ids", 0)):
            added = following if name == "input_ids" else torch.full_like(following, value)
            inputs[name] = torch.cat([inputs[name], added], 1)

        def logits(inputs: Any = inputs) -> torch.Tensor:
            with torch.inference_mode():
                rows: torch.Tensor = network(**inputs).logits[0]
            return rows[-MAX_TOKENS - 1 : -1]

        wrong = first_wrong_token(network, logits, tokens)
        assert wrong is None, f"{request['prompt']!r}: {wrong}"


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        # Prompts in pieces that end before and after images, but not inside of one.
        pytest.param({**CHUNKS, **GRAPHS}, RACES, id="chunks_graphs_races"),
        pytest.param({}, {}, id="whole", marks=THOROUGH),
        pytest.param(
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            {},
            id="tensor2",
            marks=THOROUGH,
        ),
        pytest.param(
            {"additional_config": {"enable_compiled_operators": False}},
            {},
            id="composed",
            marks=THOROUGH,
        ),
    ],
)
def test_tokens_are_those_of_transformers(
    options: dict[str, Any],
    environment: dict[str, str],
    gemma3: Path,
    network: Any,
    start_engine: Callable[..., EngineProcess],
) -> None:
    asked = requests()
    with start_engine(gemma3, environment=environment, **LIMITS, **options) as engine:
        outputs = engine.generate(asked, GREEDY)
        again = engine.generate(asked, GREEDY)
        said = engine.log_text()
    assert_tokens(gemma3, network, asked, outputs)
    assert_tokens(gemma3, network, asked, again)
    assert all(output.num_cached_tokens == 0 for output in again)
    for name in ("disable_chunked_mm_input", "enable_prefix_caching", "WholeImageScheduler"):
        assert name in said
    assert "the tokens of an image see each other both ways" in said


def test_an_image_that_is_larger_than_a_step_ends_the_start(gemma3: Path, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": TOKENS_PER_IMAGE - 1, "max_num_seqs": 4}
    with pytest.raises(EngineError, match=r"max_num_batched_tokens|max_tokens_per_mm_item"):
        EngineProcess(gemma3, tmp_path / "log.txt", **{**LIMITS, **options}).close()
