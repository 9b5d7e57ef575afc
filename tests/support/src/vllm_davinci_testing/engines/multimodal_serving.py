"""Serves a multimodal family: differences from transformers, and the host's waits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from vllm_davinci_testing.engines.encoder_worker import EncoderWorker
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.multimodal_family import MultimodalFamily, Request
from vllm_davinci_testing.engines.multimodal_reference import MultimodalReference
from vllm_davinci_testing.engines.rounding import first_wrong_token


@dataclass(frozen=True)
class ServedFamily:
    """Answers to a family's requests.

    differences: for each request, a description of its first difference from transformers, or None
    waits:       for each call of the encoder, how often the host waited for or copied from the
                 device
    """

    differences: list[str | None]
    waits: list[int]


def served_family(
    family: MultimodalFamily,
    checkpoint: Path,
    reference: MultimodalReference,
    log: Path,
    environment: Mapping[str, str],
    max_tokens: int,
) -> ServedFamily:
    """Serves the family's requests one by one, greedily. Raises the engine's errors."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = family.requests()
    options: dict[str, Any] = {
        "max_model_len": 512,
        "limit_mm_per_prompt": {family.modality: 1},
        "mm_processor_cache_gb": 0,
        "worker_extension_cls": f"{EncoderWorker.__module__}.{EncoderWorker.__name__}",
        **dict(family.engine),
    }
    with EngineProcess(checkpoint, log, environment, **options) as engine:
        engine.generate(requests[-1:], sampling)  # text only: creates the masks
        engine.on_workers("watch_encoder_calls")
        outputs = [engine.generate([request], sampling)[0] for request in requests]
        [calls] = engine.on_workers("encoder_calls")
    return ServedFamily(
        [difference_of(reference, *pair) for pair in zip(requests, outputs, strict=True)],
        [each.synchronizations + each.copies_to_host for each in calls],
    )


def difference_of(reference: MultimodalReference, request: Request, output: Any) -> str | None:
    """Describes an answer's first difference from the expected prompt or tokens, or None."""
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    try:
        return first_wrong_token(
            reference.network, lambda: reference.logits(request, prompt, tokens), tokens
        )
    except ValueError as error:  # the prompts differ
        return str(error)
