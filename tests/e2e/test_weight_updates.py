"""New weights for a running engine: those of a fresh one, bit for bit, where graphs read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci.core.export.calibration import input_ranges
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.changed_checkpoint import changed
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
WORKER = "vllm_davinci_testing.engines.updating_worker.UpdatingWorker"
SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "worker_extension_cls": WORKER,
    "enable_prefix_caching": False,  # a cache of the old weights is the caller's to reset
    "enforce_eager": False,
    "compilation_config": {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [4, 8],
    },
}


def generate(engine: EngineProcess, prompts: list[list[int]]) -> list[Any]:
    """Tokens and logprobs, bit for bit."""
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    return [
        (
            list(output.outputs[0].token_ids),
            [{t: p.logprob for t, p in each.items()} for each in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("tiny_llama", {}, id="dense"),
        pytest.param("tiny_deepseek", {"tensor_parallel_size": 2}, id="mla_experts_tp2"),
    ],
)
def test_updated_weights_are_those_of_a_fresh_engine(
    repository: Path,
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
):
    old = repository / "checkpoints" / name
    new = changed(old, tmp_path / "new", seed=1)
    given = prompts[3:7]
    with start_engine(new, **SMALL, **options) as fresh:
        expected = generate(fresh, given)
        digests = fresh.on_workers("compute_weight_checksums")
    with start_engine(old, **SMALL, **options) as engine:
        first = generate(engine, given)
        addresses = engine.on_workers("addresses")
        assert first != expected
        for update, checkpoint, tokens in (
            ("reload_from", new, expected),
            ("load_buckets", old, first),
            ("load_buckets", new, expected),
            ("reload_from", old, first),
        ):
            engine.on_workers(update, str(checkpoint))
            assert generate(engine, given) == tokens, (update, checkpoint.name)
            assert engine.on_workers("addresses") == addresses
            if checkpoint == new:
                assert engine.on_workers("compute_weight_checksums") == digests


def test_quantized_weights_are_not_updated(
    tiny_llama: Path, start_engine: Callable[..., EngineProcess], tmp_path: Path
):
    quantized = tmp_path / "int8"
    ranges = input_ranges(tiny_llama, [torch.tensor([[*range(40, 90)]])], lambda _: None)
    Exporter(tiny_llama, quantized, "W8A8", torch.bfloat16, ranges).run(lambda _: None)
    with start_engine(quantized, dtype="bfloat16", **SMALL) as engine:
        expected = generate(engine, [[5, 6, 7]])
        for update in ("reload_from", "load_buckets"):
            with pytest.raises(EngineError, match="new weights for"):
                engine.on_workers(update, str(quantized))
        assert generate(engine, [[5, 6, 7]]) == expected
