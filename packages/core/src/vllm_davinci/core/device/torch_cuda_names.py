"""The one place where the `torch.cuda` names that vLLM spells out resolve to `torch.npu`.

vLLM's V1 runner writes `torch.cuda.Stream()`, `torch.cuda.Event(blocking=True)`,
`torch.cuda.current_stream()` and `torch.cuda.stream(...)` literally, for asynchronous scheduling
(`v1/worker/gpu_model_runner.py`). vLLM's own XPU runner points the same names of torch at
`torch.xpu`; this does it for `torch.npu`. Names of torch change, names of vLLM never do.

Can go when the V1 runner uses `torch.Stream`, `torch.Event` and `torch.accelerator`.
"""

import functools
from typing import Any

import torch
from torch_npu import npu

# name under torch.cuda -> name under torch.npu
ALIASES: dict[str, str] = {
    "Stream": "Stream",
    "current_stream": "current_stream",
    "default_stream": "default_stream",
    "stream": "stream",
    "set_stream": "set_stream",
}


def _event(*args: Any, **kwargs: Any) -> Any:
    """`torch.cuda.Event(...)` on the NPU; `blocking` is accepted by both."""
    return npu.Event(*args, **kwargs)


def install() -> None:
    """Points the names at `torch.npu` for the rest of this process. Idempotent.

    Called in the worker process only, before the model runner exists. Refuses when torch was
    built with CUDA and a CUDA device is present, because then the names already mean something.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "torch.cuda reports an available CUDA device, so its stream and event names cannot "
            "be pointed at torch.npu. Run vLLM for the NPU in an environment with a CPU build of "
            "torch, or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )
    for cuda_name, npu_name in ALIASES.items():
        target = getattr(npu, npu_name)
        if not isinstance(target, type):
            # Its own object: Dynamo refuses one handler under two names.
            target = functools.partial(target)
        setattr(torch.cuda, cuda_name, target)
    torch.cuda.Event = _event  # type: ignore[assignment,misc]
