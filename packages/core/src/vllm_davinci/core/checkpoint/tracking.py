"""Tracks the checkpoint tensors that a model's loader reads and the parameters it fills.

vLLM's models skip unknown tensors, truncate tensors that are too large, and leave a parameter
uninitialized if no tensor is loaded into it. The loader's copies show all three.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COPY, _INDEX_PUT = torch.ops.aten.copy_.default, torch.ops.aten.index_put_.default
_FILLS = frozenset(
    {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
)


class LoadTracker(TorchDispatchMode):
    """Active while the loader holds a tensor; the loader reads from `watch`.

    Close `watch`'s generator if the loader raises, and call `release` at the end; otherwise the
    mode stays on.

    is_at_end: whether the loader has read all tensors
    seen:    names of the tensors it has read -> their shapes
    read:    tensors whose values it has used
    copied:  entries copied unchanged from a tensor into parameters; converted ones are not counted
    places:  tensor -> the parameter that it was copied into
    spread:  tensors copied into a parameter of another size
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[int, str] = {}  # storage address -> its parameter
        self._sizes: Counter[int] = Counter()
        for name, parameter in model.named_parameters():
            address = parameter.untyped_storage().data_ptr()
            self._names.setdefault(address, name)
            self._sizes[address] += parameter.numel()
        self._written: Counter[int] = Counter()
        self._starts: list[int] = []  # addresses of tensors, sorted
        self._ends: dict[int, tuple[int, str]] = {}
        self.is_at_end = False
        self._is_held = False
        self.seen: dict[str, torch.Size] = {}
        self.read: set[str] = set()
        self.copied: Counter[str] = Counter()
        self.places: dict[str, str] = {}
        self.spread: set[str] = set()

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        self.release()
        for name, tensor in weights:
            self.seen[name] = tensor.shape
            if tensor.numel():
                self._expect(name, tensor)
            else:
                self.read.add(name)
            with self:  # inactive while the next tensor is read
                yield name, tensor
        self.is_at_end = True
        # Stays active: some models list all tensors before they copy the first.
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_held = True

    def release(self) -> None:
        """Ends tracking after the last tensor. Idempotent."""
        if self._is_held:
            self._is_held = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def unfilled(self) -> Iterator[tuple[str, int, int]]:
        """Parameters that were filled only in part: name, entries written, all entries."""
        for address, name in self._names.items():
            if self._written[address] < self._sizes[address]:
                yield name, self._written[address], self._sizes[address]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._note(func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        for argument in args:
            # torch.cat takes a list.
            for each in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(each, torch.Tensor) and (name := self._name_of(each)):
                    self.read.add(name)
        if func is not _COPY and func is not _INDEX_PUT and func not in _FILLS:
            return
        target = args[0]
        address = target.untyped_storage().data_ptr()
        if address not in self._names:
            return
        source = args[1] if func is _COPY else args[2] if func is _INDEX_PUT else target
        self._written[address] += source.numel()
        name = self._name_of(source)
        if name is not None:
            self.copied[name] += source.numel()
            self.places[name] = self._names[address]
            if func is _COPY and source.numel() != target.numel():
                self.spread.add(name)

    def _expect(self, name: str, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        # Forget earlier tensors at these addresses.
        first = max(bisect_right(self._starts, start) - 1, 0)
        while first < len(self._starts) and self._starts[first] < end:
            if self._ends[self._starts[first]][0] > start:
                del self._ends[self._starts.pop(first)]
            else:
                first += 1
        insort(self._starts, start)
        self._ends[start] = (end, name)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the checkpoint tensor whose memory contains this tensor."""
        if not self._starts or not tensor.numel() or tensor.device.type != "cpu":
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        end, name = self._ends[self._starts[at]]
        return name if address < end else None
