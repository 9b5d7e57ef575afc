"""Loads one checkpoint's weights."""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from vllm_davinci.core.components.fused_ops import choose_fused_ops
from vllm_davinci_testing.engines.loaded_model import LoadedModel

SAMPLE_S = 0.002


def anonymous_bytes() -> int:
    """Returns this process's memory without file-backed pages, but with the virtual device's
    memory.
    """
    amounts = []
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            amounts.append(int(line.split()[1]) << 10)
    return sum(amounts)


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of a load, and host memory beyond the weights in bytes."""
    from vllm.config import VllmConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    choose_fused_ops(True)  # a worker does the same
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store.name}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    model = Path(options["model"])
    made = LoadedModel(model, quantization=options["quantization"])
    for parameter in made.network.parameters():
        parameter.data.fill_(1)  # allocates all of the weights' memory before the measurement
    torch.accelerator.synchronize()
    before = anonymous_bytes()
    largest, ended = 0, threading.Event()

    def sample() -> None:
        nonlocal largest
        while not ended.wait(SAMPLE_S):
            largest = max(largest, anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    began = time.perf_counter()
    made.load(model)
    seconds = time.perf_counter() - began
    ended.set()
    thread.join()
    return {"seconds": seconds, "extra_bytes": max(largest - before, 0)}
