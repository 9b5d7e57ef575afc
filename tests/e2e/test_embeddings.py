"""Embeddings of decoders and encoders, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference


def as_inputs(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def test_embeddings_of_a_decoder_equal_those_of_transformers(
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    name = "qwen3_norm_head64_gqa8_tied"
    with start_engine(zoo(name), runner="pooling", convert="embed") as engine:
        outputs = engine.embed(as_inputs(prompts[:24]))
    for prompt, output in zip(prompts, outputs, strict=False):
        last = reference(name).last_hidden_state(prompt)[-1]
        expected = torch.nn.functional.normalize(last, dim=-1)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=2e-5, rtol=1e-4
        )


def test_embeddings_of_an_encoder_equal_those_of_transformers(
    tmp_path: Path, start_engine: Callable[..., EngineProcess], prompts: list[list[int]]
):
    checkpoint = model_zoo.write_bert(tmp_path / "bert")
    with start_engine(checkpoint, runner="pooling") as engine:
        outputs = engine.embed(as_inputs(prompts[:24]))
    network = transformers.AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    for prompt, output in zip(prompts, outputs, strict=False):
        with torch.inference_mode():
            first = network(torch.tensor([prompt])).last_hidden_state[0, 0]
        expected = torch.nn.functional.normalize(first, dim=-1)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=2e-5, rtol=1e-4
        )
