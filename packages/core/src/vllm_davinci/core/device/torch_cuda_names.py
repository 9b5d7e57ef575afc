"""The one place where the `torch.cuda` names that vLLM spells out resolve to `torch.npu`.

vLLM's V1 runner writes `torch.cuda.Stream()`, `torch.cuda.Event(blocking=True)`,
`torch.cuda.current_stream()` and `torch.cuda.stream(...)` literally, for asynchronous scheduling
(`v1/worker/gpu_model_runner.py`). vLLM's own XPU runner points the same names of torch at
`torch.xpu`; this does it for `torch.npu`. Names of torch change, names of vLLM never do.

Can go when the V1 runner uses `torch.Stream`, `torch.Event` and `torch.accelerator`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch_npu import npu

# name under torch.cuda -> name under torch.npu
ALIASES: dict[str, str] = {
    "Stream": "Stream",
    "default_stream": "default_stream",
    "set_stream": "set_stream",
}


def _current_stream(device: Any = None) -> Any:
    """`torch.cuda.current_stream(...)` on the NPU.

    torch finds the current device's number by asking for every kind of device there may be, which
    takes longer than everything else here. A step of asynchronous scheduling asks several times.
    """
    return npu.current_stream(npu.current_device() if device is None else device)


@contextmanager
def _stream(stream: Any) -> Iterator[None]:
    """`torch.cuda.stream(...)` on the NPU, of a stream of the current device."""
    if stream is None:
        yield
        return
    before = _current_stream()
    npu.set_stream(stream)
    try:
        yield
    finally:
        npu.set_stream(before)


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
            "torch: pip install torch --index-url of PyTorch's CPU builds."
        )
    for cuda_name, npu_name in ALIASES.items():
        target = getattr(npu, npu_name)
        if not isinstance(target, type):
            # Its own object: Dynamo refuses one handler under two names.
            target = functools.partial(target)
        setattr(torch.cuda, cuda_name, target)
    torch.cuda.current_stream = _current_stream
    torch.cuda.stream = _stream  # type: ignore[assignment]
    torch.cuda.Event = _event  # type: ignore[assignment,misc]
