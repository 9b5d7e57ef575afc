"""Points the `torch.cuda` names that vLLM uses literally at `torch.npu`.

vLLM's V2 runner writes `torch.cuda.Stream()`, `torch.cuda.Event(blocking=True)`,
`torch.cuda.current_stream()` and `torch.cuda.stream(...)` literally (`v1/worker/gpu`). vLLM's own
XPU runner points the same names of torch at `torch.xpu`; this does it for `torch.npu`. Only names
of torch are replaced, never names of vLLM.

Remove it when the V2 runner uses `torch.Stream`, `torch.Event` and `torch.accelerator`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu
from torch_npu import npu

# name under torch.cuda -> name under torch.npu
ALIASES: dict[str, str] = {
    "Stream": "Stream",
    "default_stream": "default_stream",
    "set_stream": "set_stream",
}


@functools.cache
def _stream_of(stream_id: int, device_index: int, device_type: int) -> Any:
    """Cached stream object per stream, which these three numbers identify."""
    return npu.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def current_stream(device: Any = None) -> Any:
    """`torch.cuda.current_stream(...)` on the NPU, without a new object per call.

    torch_npu makes one, and torch then searches every device type for the current device, which
    takes longer than everything else. A step with asynchronous scheduling asks several times.
    """
    if device is not None and not isinstance(device, int):
        return npu.current_stream(device)
    index = npu.current_device() if device is None else device
    return _stream_of(*torch_npu._C._npu_getCurrentStream(index))


@contextmanager
def stream(chosen: Any) -> Iterator[None]:
    """`torch.cuda.stream(...)` on the NPU, for a stream of the current device."""
    if chosen is None:
        yield
        return
    before = current_stream()
    npu.set_stream(chosen)
    try:
        yield
    finally:
        npu.set_stream(before)


class _Event(npu.Event):
    """`torch.cuda.Event(...)` on the NPU; `blocking` is accepted by both.

    Without a stream it uses the current one, as torch_npu's does, without making an object for it.
    """

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def install() -> None:
    """Points the names at `torch.npu` for the rest of this process. Idempotent.

    Call it only in the worker process, before the model runner exists. Raises RuntimeError if a
    CUDA device is available, because the names are then in use.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "torch.cuda reports an available CUDA device, so its stream and event names cannot "
            "be pointed at torch.npu. Run vLLM for the NPU in an environment with a CPU build of "
            "torch, which PyTorch's installation page gives a command for (platform: CPU)."
        )
    for cuda_name, npu_name in ALIASES.items():
        target = getattr(npu, npu_name)
        if not isinstance(target, type):
            # A separate object: Dynamo refuses one handler under two names.
            target = functools.partial(target)
        setattr(torch.cuda, cuda_name, target)
    torch.cuda.current_stream = current_stream
    torch.cuda.stream = stream  # type: ignore[assignment]
    torch.cuda.Event = _Event  # type: ignore[misc]
