"""Estimates a model's time and memory on this host, from its files and a short measurement."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_davinci.meta.errors import ModelFileError

# Resident memory of an engine without weights and KV cache (vLLM, torch, torch_npu): 1.3 GB with
# the shipped Llama, and the front end's process.
PROCESSES_BYTES = 2_000_000_000
# The engine's start without the profile run, in multiples of the import time of vLLM and torch.
START_IMPORTS = 0.6
# Time of a virtual operator's launch (benchmarks/vnpu), and number of launches of a decoder layer.
LAUNCH_S = 12e-6
LAUNCHES_PER_LAYER = 25
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a checkpoint that determine time and memory.

    parameters:        values in its safetensors files
    layers:            decoder layers
    kv_values:         values that one token adds to the KV cache, over all layers
    """

    parameters: int
    layers: int
    kv_values: int


@dataclass(frozen=True)
class Estimate:
    """Times in seconds; memory_bytes: host memory of all processes."""

    start_s: float
    prompt_token_s: float
    token_s: float
    memory_bytes: int

    def seconds(self, prompt_tokens: int, new_tokens: int, requests: int) -> float:
        """Seconds for the start, the prefill of all prompts, and decode steps of all requests at
        once.
        """
        batched = 1 + 0.1 * (requests - 1)  # another row adds little: weights are read once
        work = prompt_tokens * self.prompt_token_s + new_tokens * self.token_s * batched
        return self.start_s + work


def size_of(directory: Path) -> ModelSize:
    """Reads config.json and the headers of *.safetensors. Raises ModelFileError without them."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{directory}: no readable config.json ({error}). Name a checkpoint's directory, or a "
            "GGUF file."
        ) from error
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{directory} has no *.safetensors. Name a checkpoint's directory.")
    text = config.get("text_config", config)
    layers = int(text.get("num_hidden_layers", 1))
    heads = int(text.get("num_attention_heads", 1))
    head_size = text.get("head_dim") or int(text.get("hidden_size", heads)) // heads
    if "kv_lora_rank" in text:
        per_layer = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    else:
        per_layer = 2 * int(text.get("num_key_value_heads") or heads) * int(head_size)
    return ModelSize(sum(map(_values, files)), layers, layers * per_layer)


def _values(path: Path) -> int:
    """Counts the values in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for extent in tensor["shape"]:
                count *= extent
            total += count
    return total


def estimate(
    size: ModelSize, dtype: str, kv_tokens: int, profile_tokens: int, import_s: float
) -> Estimate:
    """Estimates a start and its steps from a short measurement of this host's products.

    dtype:          of weights and cache
    kv_tokens:      tokens for which the KV cache has room
    profile_tokens: tokens of the engine's profile run
    import_s:       time that this process took to import vLLM
    """
    weights_bytes = size.parameters * BYTES_PER_VALUE[dtype]
    bytes_per_s, products_per_s = _rates(dtype)
    launches_s = size.layers * LAUNCHES_PER_LAYER * LAUNCH_S
    prompt_token_s = size.parameters / products_per_s
    loads_s = 3 * weights_bytes / bytes_per_s  # read, converted, copied to the device
    start_s = START_IMPORTS * import_s + loads_s + 2 * profile_tokens * prompt_token_s
    token_s = launches_s + weights_bytes / bytes_per_s
    kv_bytes = kv_tokens * size.kv_values * BYTES_PER_VALUE[dtype]
    return Estimate(
        start_s, prompt_token_s, token_s, PROCESSES_BYTES + int(1.1 * weights_bytes) + kv_bytes
    )


def _rates(dtype: str) -> tuple[float, float]:
    """Measures bytes of weights per second in a decode, and multiply-adds per second in a
    prefill.
    """
    import torch

    weight = torch.ones(4096, 2048, dtype=getattr(torch, dtype))
    one = _seconds(lambda: torch.nn.functional.linear(weight[:1, :], weight))
    many = _seconds(lambda: torch.nn.functional.linear(weight[:128, :], weight))
    return weight.nbytes / one, 128 * weight.numel() / many


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of the fastest of five calls."""
    call()
    best = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began_s)
    return best


def available_bytes() -> int:
    """Memory that this host can give, by the kernel's own estimate."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelFileError("/proc/meminfo has no MemAvailable")
