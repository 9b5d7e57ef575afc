"""Imports modules that the fork server's children share, and hides them from the garbage collector.

Only the fork server imports this module (see `fork_server`).
"""

import atexit
import gc
import sys
from importlib import import_module
from importlib.util import find_spec

from vllm_davinci_testing.processes import model_facts

# By the distribution that must be installed. No module uses the device.
MODULES = {
    "torch": ("torch", "torch.distributed"),
    "vllm": (
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.coordinator",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.structured_output",
        "vllm.v1.worker.gpu_worker",
    ),
    "vllm_davinci.core": (
        "vllm_davinci.core.worker",
        "vllm_davinci.core.attention.paged",
        "vllm_davinci.core.out_of_tree",
        "vllm_davinci.core.runner.model_runner",
        "vllm_davinci.core.triton_kernels.registration",
    ),
}


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


for present, names in MODULES.items():
    if is_installed(present):
        for name in names:
            import_module(name)
if registration := sys.modules.get("vllm_davinci.core.triton_kernels.registration"):
    # vLLM searches every name of every module for its kernels, which takes half a second per rank.
    registration.register()

if "vllm.model_executor.models.registry" in sys.modules:
    model_facts.fill_cache()

# vLLM runs a full collection about ten times while an engine starts. With over a million objects of
# imported modules, each takes 0.3 s; together they are nine tenths of a small engine's start.
gc.collect()
gc.freeze()
# Undone when the server exits, because libraries then list unfreed objects.
atexit.register(gc.unfreeze)
