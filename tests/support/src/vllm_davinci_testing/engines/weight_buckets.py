"""Sends weights to an engine's workers bucket by bucket, like verl.

Each worker has a sender on its device. The sender has one bucket, in device memory or the host's
shared memory; it refills the bucket repeatedly and describes the content to the worker over a
socket.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import zmq
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

BUCKET_BYTES = 1 << 21
LIMIT_S, TURN_MS = 60.0, 100
DEVICE_ARGUMENT = 6  # torch's warning about a shared tensor

Tensors = Sequence[tuple[str, torch.Tensor]]


class _EndedError(Exception):
    """The worker has ended with an error."""


def tensors_of(checkpoint: Path) -> list[tuple[str, torch.Tensor]]:
    files = sorted(checkpoint.glob("*.safetensors"))
    return [named for file in files for named in load_file(file).items()]


@contextmanager
def sending(addresses: Sequence[str], tensors: Tensors, shared_on: str) -> Iterator[None]:
    """Sends the tensors to workers at the addresses. shared_on: npu or cpu"""
    assert all(each.nbytes <= BUCKET_BYTES for _, each in tensors)
    end = Event()
    senders = [
        Thread(target=_send, args=(address, rank, tensors, shared_on, end))
        for rank, address in enumerate(addresses)
    ]
    for each in senders:
        each.start()
    try:
        yield
    finally:
        end.set()
        for each in senders:
            each.join()


def _send(address: str, rank: int, tensors: Tensors, shared_on: str, end: Event) -> None:
    torch.npu.set_device(rank)
    with suppress(_EndedError), zmq.Context() as context, _socket(context, zmq.REQ) as socket:
        socket.bind(address)
        with _bucket(shared_on) as (bucket, place):

            def tell(message: Any) -> None:
                torch.accelerator.synchronize()
                socket.send_pyobj(message)
                _receive(socket, socket.recv, end.is_set)

            tell(place)
            contents: list[Any] = []
            begin = 0
            for name, tensor in tensors:
                size = tensor.nbytes
                if begin + size > BUCKET_BYTES:
                    tell((contents, False))
                    contents, begin = [], 0
                bucket[begin : begin + size].copy_(tensor.contiguous().view(-1).view(torch.uint8))
                contents.append((name, tensor.dtype, tuple(tensor.shape), begin))
                begin += -(-size // 512) * 512
            tell((contents, True))


@contextmanager
def _bucket(shared_on: str) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yields the bucket, and the handle with which the worker opens it."""
    if shared_on == "npu":
        bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device="npu")
        yield bucket, reduce_tensor(bucket)
        del bucket
        torch.npu.ipc_collect()
        return
    memory = SharedMemory(create=True, size=BUCKET_BYTES)
    bucket = torch.frombuffer(memory.buf, dtype=torch.uint8)
    try:
        yield bucket, memory.name
    finally:
        memory.unlink()


def receive(address: str, device: torch.device) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yields each bucket's tensors; requesting the next bucket reuses their memory."""
    with zmq.Context() as context, _socket(context, zmq.REP) as socket:
        socket.connect(address)
        place = _receive(socket, socket.recv_pyobj, lambda: False)
        memory = SharedMemory(name=place) if isinstance(place, str) else None
        if memory is not None:
            bucket = torch.frombuffer(memory.buf, dtype=torch.uint8)
        else:
            rebuild, arguments = place
            of_device = list(arguments)
            of_device[DEVICE_ARGUMENT] = device.index
            bucket = rebuild(*of_device)
        socket.send(b"")
        is_last = False
        while not is_last:
            contents, is_last = _receive(socket, socket.recv_pyobj, lambda: False)
            yield [(name, _view(bucket, *where).to(device)) for name, *where in contents]
            torch.accelerator.synchronize()
            if is_last:
                del bucket
                gc.collect()
                if memory is not None:
                    memory.close()
            socket.send(b"")


def _view(bucket: torch.Tensor, dtype: torch.dtype, shape: torch.Size, at: int) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return bucket[at : at + size].view(dtype).view(shape)


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, TURN_MS)
    return socket


def _receive(socket: Any, call: Callable[[], Any], has_ended: Callable[[], bool]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not has_ended():
        try:
            return call()
        except zmq.Again:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came within {LIMIT_S} s") from None
    raise _EndedError
