"""Lets encoders copy to the device, and read back, without waiting for it.

Encoders make tables on the host (positions, masks) and copy them to the device from unpinned
memory, which waits for all of the device's work. Or they read back values that were just copied
there, or derived ones such as an image's number of patches. A torch mode around the encoder's call
avoids both waits: copies use pinned memory, and the host remembers integers that it has copied and
computes all values derived from them by operations in FOLLOWED. The device may round quotients
differently, so they, and integers made of them, are read from the device.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from vllm.utils.torch_utils import async_tensor_h2d

# Most elements of a value known on the host: sizes, counts, lengths, masks, never pixels.
MAX_KNOWN = 1 << 16

# Operations whose results are known if all their tensors are. None of them writes in place.
FOLLOWED = frozenset(
    [
        *("__getitem__", "unbind", "view", "reshape", "flatten", "squeeze", "unsqueeze", "expand"),
        *("cat", "stack", "pad", "clone", "contiguous", "arange", "repeat_interleave"),
        *("sum", "prod", "cumsum", "max", "min", "add", "sub", "mul", "floor_divide"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__"),
        *("remainder", "div", "ceil", "all", "any"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "__invert__"),
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "long", "int", "bool"),
    ]
)
READS = frozenset(("tolist", "item", "__int__", "__index__", "__bool__", "__float__"))
IN_PLACE = frozenset(
    ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__iand__", "__ior__")
)


# Models whose encoders read back or copy in this way. Others run without the mode, because it costs
# the host some microseconds per operation.
DEFINITIONS = frozenset(
    (
        "Gemma4VisionModel",
        "GlmAsrForConditionalGeneration",
        "PixtralHFVisionModel",
        "Qwen2AudioForConditionalGeneration",
        "Qwen3OmniMoeAudioEncoder",
    )
)


def host_values(
    model: torch.nn.Module, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """The context for calls of the model's encoder: HostValues if it would otherwise wait."""
    if any(type(module).__name__ in DEFINITIONS for module in model.modules()):
        return partial(HostValues, device)
    return nullcontext


class HostValues(TorchFunctionMode):
    """Copies to `device` from pinned memory, and answers reads of values derived from the host.

    A known value is forgotten with its tensor, and when its memory is written in place.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "to":
            return self._to(func, args, kwargs)
        if name == "tensor" and self._is_here(kwargs.get("device")):
            return self._copied(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        if name in READS and (known := self._readable(args[0])) is not None:
            return func(known, *args[1:], **kwargs)
        if name == "cpu" and (known := self._readable(args[0])) is not None:
            return known.clone()
        if name == "__setitem__":
            return self._set(func, args)
        if name == "__getitem__" and (places := self._places(args)) is not None:
            return args[0].flatten(0, args[1].dim() - 1).index_select(0, places)
        if self._known:
            for written in _written(func, name, args, kwargs):
                self._forget(written)
        result = func(*args, **kwargs)
        return self._follow(func, args, kwargs, result) if name in FOLLOWED else result

    def _readable(self, tensor: Any) -> torch.Tensor | None:
        known = self._known.get(tensor)
        return None if known is None or known.is_floating_point() else known

    def _set(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Writes to a part of a tensor, which stays known if part and values are known."""
        target = args[0]
        try:
            hosts = [self._on_host(each) for each in args]
        except _UnknownError:
            hosts = []
        self._forget(target)
        if _is_masked_fill(args):
            target.masked_fill_(args[1], args[2])
        else:
            func(*args)
        if hosts and target.device.type == self._device.type:
            written = hosts[0].clone()
            func(written, *hosts[1:])
            self._know(target, written)

    def _is_here(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self._device.type

    def _to(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tensor.to without waiting for copies between host and device."""
        source = args[0]
        device, dtype = _meant(source, args[1:], kwargs)
        if device.type == "cpu" and (known := self._readable(source)) is not None:
            return known.to(dtype, copy=True)
        if source.device.type == "cpu" and self._is_here(device) and "memory_format" not in kwargs:
            host = source.to(dtype)
            if host is source and source.is_pinned() and not kwargs.get("non_blocking"):
                host = source.clone()  # nothing writes to it during the copy
            return self._copied(host)
        result = func(*args, **kwargs)
        if (known := self._known.get(source)) is None or result is source:
            return result
        if known.is_floating_point() and not dtype.is_floating_point:
            return self._copied(known.to(dtype))
        self._know(result, known.to(dtype))
        return result

    def _copied(self, host: torch.Tensor) -> torch.Tensor:
        copied = async_tensor_h2d(host, self._device)
        if host.numel() <= MAX_KNOWN and not host.is_floating_point():
            self._know(copied, host.clone())  # the caller may write to the host tensor afterwards
        return copied

    def _know(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        if host.device.type == "cpu":
            self._known[tensor] = host

    def _places(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Indices of the rows that a known mask chooses, on the device; None for other indices."""
        rows, mask = args
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            return None
        known = self._known.get(mask)
        if known is None or not known.dim() or known.shape != rows.shape[: known.dim()]:
            return None
        if rows.device != mask.device:
            return None
        return async_tensor_h2d(known.flatten().nonzero().squeeze(1), self._device)

    def _follow(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """The result, computed also on the host if all tensors are known there."""
        results = result if isinstance(result, tuple | list) else (result,)
        if not all(_is_small(each, self._device) for each in results):
            return result
        try:
            inputs = [self._on_host(each) for each in args]
            options = {name: self._on_host(each) for name, each in kwargs.items()}
        except _UnknownError:
            return result
        hosts = func(*inputs, **options)
        is_rounded = any(
            isinstance(each, torch.Tensor) and each.dtype.is_floating_point for each in inputs
        )
        if is_rounded and isinstance(hosts, torch.Tensor) and not hosts.is_floating_point():
            return self._copied(hosts)
        for each, host in zip(
            results, hosts if isinstance(hosts, tuple | list) else (hosts,), strict=True
        ):
            if not is_rounded or host.is_floating_point():
                self._know(each, host)
        return result

    def _on_host(self, argument: Any) -> Any:
        """The argument with device tensors replaced by known ones. Raises for an unknown tensor."""
        if isinstance(argument, torch.Tensor) and argument.device.type == self._device.type:
            known = self._known.get(argument)
            if known is None:
                raise _UnknownError
            return known
        if isinstance(argument, torch.device) or self._names_device(argument):
            return "cpu"
        if isinstance(argument, tuple | list):
            return type(argument)(map(self._on_host, argument))
        return argument

    def _names_device(self, argument: Any) -> bool:
        return isinstance(argument, str) and argument.split(":")[0] == self._device.type

    def _forget(self, written: Any) -> None:
        if isinstance(written, torch.Tensor) and written.device.type == self._device.type:
            memory = written.untyped_storage().data_ptr()
            for tensor in list(self._known):
                if tensor.untyped_storage().data_ptr() == memory:
                    del self._known[tensor]


class _UnknownError(Exception):
    """A tensor whose values the host does not know."""


def _written(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[Any]:
    """The tensors that the call may write to."""
    schema = getattr(func, "_schema", None)  # only operators called through torch.ops have one
    if schema is not None:
        return (*args, *kwargs.values()) if schema.is_mutable else ()
    if (out := kwargs.get("out")) is not None:
        return out if isinstance(out, tuple | list) else (out,)
    is_in_place = name.endswith("_") and not name.endswith("__")
    if is_in_place or name in IN_PLACE or name == "__setitem__":
        return args[:1]
    return ()


def _is_masked_fill(args: tuple[Any, ...]) -> bool:
    """True if __setitem__ writes one number wherever a mask of the target's shape is True."""
    target, mask, value = args
    return (
        isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and mask.device == target.device
        and mask.shape == target.shape
        and isinstance(value, int | float)
        and (target.is_floating_point() or isinstance(value, int))
    )


def _is_small(result: Any, device: torch.device) -> bool:
    return (
        isinstance(result, torch.Tensor)
        and result.device.type == device.type
        and result.numel() <= MAX_KNOWN
    )


def _meant(
    source: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, torch.dtype]:
    """Target device and dtype of a Tensor.to call."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    other = kwargs.get("other")
    for each in (*args, *(() if other is None else (other,))):
        if isinstance(each, torch.Tensor):
            device, dtype = each.device, each.dtype
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, torch.device | str) or type(each) is int:
            device = each
    return (
        source.device if device is None else torch.device(device),
        source.dtype if dtype is None else dtype,
    )
