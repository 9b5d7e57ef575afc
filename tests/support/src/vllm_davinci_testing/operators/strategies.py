"""Hypothesis strategies for equal tensors on the CPU and on the device."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
NUMBERS = FLOATS + INTEGERS
ALL = (*NUMBERS, torch.bool)

# 0-d, empty, one element, odd sizes that end inside a vector register.
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (1,),
    (7,),
    (3, 5),
    (2, 0, 3),
    (1, 4, 1),
    (2, 3, 67),
)
# Shapes of two operands that broadcast together.
BROADCASTS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), ()),
    ((), (3,)),
    ((5,), ()),
    ((67,), (67,)),
    ((3, 5), (5,)),
    ((4, 1), (1, 6)),
    ((2, 3, 5), (3, 1)),
    ((2, 0, 3), (1, 3)),
    ((1,), (2, 3)),
)
_SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 1e-6)


def _identity(base: torch.Tensor) -> torch.Tensor:
    return base


def _swap_outer(base: torch.Tensor) -> torch.Tensor:
    return base.transpose(0, -1)


def _every_second(base: torch.Tensor) -> torch.Tensor:
    return base[..., 1::2]


def _without_first(base: torch.Tensor) -> torch.Tensor:
    return base[1:]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A tensor on both devices: `view` of `base`, so that strides and offsets agree, too."""

    base: torch.Tensor
    view: Callable[[torch.Tensor], torch.Tensor]

    @property
    def cpu(self) -> torch.Tensor:
        """Returns a fresh copy on the CPU."""
        return self.view(self.base.clone())

    @property
    def npu(self) -> torch.Tensor:
        """Returns a fresh copy on the device."""
        return self.view(self.base.to("npu"))

    def __repr__(self) -> str:
        t = self.view(self.base)
        return (
            f"Pair({tuple(t.shape)}, {t.dtype}, strides {t.stride()}: {t.flatten()[:8].tolist()})"
        )


def values(
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    *,
    low: float = -4.0,
    high: float = 4.0,
    special: bool = False,
) -> torch.Tensor:
    """Makes a CPU tensor of uniform values in [low, high), reproducible from the seed.

    special: replaces some values by NaN, infinities, signed zeros and small values.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point:
        lowest = max(int(low), torch.iinfo(dtype).min)
        return torch.randint(lowest, int(high), tuple(shape), generator=generator).to(dtype)
    x = torch.rand(tuple(shape), generator=generator) * (high - low) + low
    if special:
        chosen = torch.randint(0, len(_SPECIAL), x.shape, generator=generator)
        where = torch.rand(x.shape, generator=generator) < 0.25
        x = torch.where(where, torch.tensor(_SPECIAL)[chosen], x)
    return x.to(dtype)


def shuffled(count: int, seed: int = 0) -> torch.Tensor:
    """Returns a seeded permutation of 0 to count - 1, int64."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@st.composite
def tensors(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    low: float = -4.0,
    high: float = 4.0,
    special: bool = False,
) -> Pair:
    """Draws a tensor and its view: contiguous, transposed, strided, offset or expanded."""
    shape = draw(st.sampled_from(shapes))
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**31))
    layouts = ["contiguous"]
    if shape:
        layouts += ["strided", "offset", "expanded"]
    if len(shape) >= 2:
        layouts += ["transposed"]
    view: Callable[[torch.Tensor], torch.Tensor] = _identity
    base = shape
    match draw(st.sampled_from(layouts)):
        case "transposed":
            base, view = (shape[-1], *shape[1:-1], shape[0]), _swap_outer
        case "strided":
            base, view = (*shape[:-1], 2 * shape[-1] + 1), _every_second
        case "offset":
            base, view = (shape[0] + 1, *shape[1:]), _without_first
        case "expanded":
            base, view = (*shape[:-1], 1), lambda t: t.expand(shape)
    return Pair(values(base, dtype, seed, low=low, high=high, special=special), view)


@st.composite
def operands(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = FLOATS,
    *,
    low: float = -4.0,
    high: float = 4.0,
    special: bool = False,
) -> tuple[Pair, Pair]:
    """Draws two tensors of one dtype with shapes that broadcast together."""
    first, second = draw(st.sampled_from(BROADCASTS))
    dtype = (draw(st.sampled_from(dtypes)),)
    return (
        draw(tensors(dtype, (first,), low=low, high=high, special=special)),
        draw(tensors(dtype, (second,), low=low, high=high, special=special)),
    )
