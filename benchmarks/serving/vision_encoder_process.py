"""Times one image encoder: host alone, device alone, both, and with a blocking copy per block.

Operators do no work and sleep for a given time.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3VLConfig
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.plugins import load_general_plugins

from serving.blocking_encoder import read_lengths_in_every_block
from vllm_davinci.core.triton_kernels.registration import register_for_models
from vllm_davinci.vnpu import _C

PR_SET_TIMERSLACK, SLACK_NS = 29, 1000  # with the default slack, Linux ends sleeps 50 us late


def encoder_of(options: dict[str, Any]) -> torch.nn.Module:
    """Makes an encoder with Qwen3-VL-8B's shape and another number of blocks."""
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer

    config = Qwen3VLConfig(
        vision_config={
            "depth": options["blocks"],
            "hidden_size": 1152,
            "num_heads": 16,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [],
        }
    ).vision_config
    register_for_models()  # as a runner does
    with torch.device("npu"):
        return Qwen3_VisionTransformer(config)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS)  # also for threads started later
    load_general_plugins()
    torch.set_default_dtype(torch.bfloat16)
    config = VllmConfig(device_config=DeviceConfig(device="npu"))
    found: dict[str, Any] = {name: [] for name in ("host", "device", "ours", "blocking")}
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, options["init"], 0, "gloo")
        initialize_model_parallel(1, 1)
        encoder = encoder_of(options)
        side = options["side"]
        grid = [[1, side, side]] * options["images"]
        patch = encoder.patch_embed.proj.weight[0].numel()
        pixels = torch.zeros(side * side * options["images"], patch, device="npu")

        def forward() -> None:
            encoder(pixels, grid_thw=grid)

        def counted(call: Callable[[], None]) -> dict[str, int]:
            before = _C.host_counts()
            call()
            return {name: n - before[name] for name, n in _C.host_counts().items()}

        forward()
        torch.npu.synchronize()
        found["counts"] = counted(forward)
        torch.npu.synchronize()
        other = torch.npu.Stream()
        for _ in range(options["rounds"]):
            host, device = apart(forward, other)
            found["host"].append(host)
            found["device"].append(device)
            found["ours"].append(together(forward))
            hooks = read_lengths_in_every_block(encoder)
            found["blocking"].append(together(forward))
            found["blocking_counts"] = counted(forward)
            for hook in hooks:
                hook.remove()
            torch.npu.synchronize()
    return found


def together(forward: Callable[[], None]) -> float:
    """Returns seconds until host and device have finished a forward."""
    torch.npu.synchronize()
    begin = time.perf_counter()
    forward()
    torch.npu.synchronize()
    return time.perf_counter() - begin


def apart(forward: Callable[[], None], other: torch.npu.Stream) -> tuple[float, float]:
    """Returns seconds of the host alone, while the device is blocked, and of the device alone,
    after all launches.
    """
    torch.npu.synchronize()
    gate = torch.npu.ExternalEvent()
    gate.wait(torch.npu.current_stream())
    begin = time.perf_counter()
    forward()
    launched = time.perf_counter()
    gate.record(other)
    torch.npu.synchronize()
    return launched - begin, time.perf_counter() - launched
