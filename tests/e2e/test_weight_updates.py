"""New weights for a running engine: those of a fresh one, bit for bit, where graphs read them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_davinci.core.export.calibration import input_ranges
from vllm_davinci.core.export.exporter import Exporter
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


def changed(checkpoint: Path, directory: Path, seed: int) -> Path:
    """The checkpoint with other weights: every tensor of floats a little off."""
    shutil.copytree(checkpoint, directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        tensors[name] = tensor + noise * tensor.std() * 0.2 if tensor.numel() > 1 else tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


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


def test_a_trainer_that_sends_weights_ends_the_start(
    tiny_llama: Path, start_engine: Callable[..., EngineProcess]
):
    with pytest.raises(EngineError, match="--weight-transfer-config"):
        start_engine(tiny_llama, weight_transfer_config={"backend": "ipc"})
