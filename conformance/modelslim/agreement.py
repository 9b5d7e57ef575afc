"""Compares two checkpoints of the same format, tensor by tensor and bit by bit."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Agreement:
    """Result of comparing two checkpoints.

    equal, other: last part of tensors' names -> number of tensors with equal dtype, shape and bits;
        of others
    only_one:     names in only one of the checkpoints
    num_integers_apart: number of other tensors in layers with integer weights
    """

    equal: Counter[str]
    other: Counter[str]
    only_one: tuple[str, ...]
    num_integers_apart: int

    def __str__(self) -> str:
        text = f"{self.equal.total()} of {self.equal.total() + self.other.total()} tensors equal"
        if self.other:
            text += f" ({', '.join(f'{count} {part} not' for part, count in self.other.items())})"
        if self.only_one:
            text += f", {len(self.only_one)} names in one alone ({self.only_one[0]})"
        return text


def compare(one: Path, other: Path) -> Agreement:
    """Compares the tensors of two checkpoint directories."""
    places = [
        {name: path for path in sorted(each.glob("*.safetensors")) for name in names(path)}
        for each in (one, other)
    ]
    equal: Counter[str] = Counter()
    different: Counter[str] = Counter()
    num_integers_apart = 0
    for name in sorted(places[0].keys() & places[1].keys()):
        first, second = (tensor(place[name], name) for place in places)
        is_equal = first.dtype == second.dtype and first.shape == second.shape
        is_equal = is_equal and torch.equal(bits(first), bits(second))
        prefix, _, part = name.rpartition(".")
        (equal if is_equal else different)[part] += 1
        num_integers_apart += not is_equal and f"{prefix}.weight_scale" in places[0]
    only_one = tuple(sorted(places[0].keys() ^ places[1].keys()))
    return Agreement(equal, different, only_one, num_integers_apart)


def names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        found: torch.Tensor = file.get_tensor(name)
    return found


def bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the raw bytes, so that -0 differs from 0 and a NaN equals itself."""
    return values.contiguous().flatten().view(torch.uint8)
