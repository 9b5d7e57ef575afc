"""Slices and elements of tensors in a kernel, in terms of Triton's own operations.

Source: the language expansion in Triton-Ascend's "architecture design and core features".
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from triton.language import core as tl


def _values(given: Iterable[Any]) -> list[Any]:
    return [tl._unwrap_if_constexpr(each) for each in given]


def _lanes(shape: Sequence[int], axis: int, semantic: Any) -> Any:
    """Indices along an axis, which broadcast to `shape`."""
    lanes = tl.arange(0, shape[axis], _semantic=semantic)
    for other in range(len(shape)):
        if other != axis:
            lanes = tl.expand_dims(lanes, other, _semantic=semantic)
    return lanes


def _gathered(source: Any, places: Any, shape: Sequence[int], semantic: Any) -> Any:
    """Elements of the flattened source at `places`, as a tensor of `shape`."""
    flat = tl.reshape(source, [math.prod(source.shape)], _semantic=semantic)
    places = tl.reshape(places, [math.prod(shape)], _semantic=semantic)
    return tl.reshape(tl.gather(flat, places, 0, _semantic=semantic), shape, _semantic=semantic)


def _place(shape: Sequence[int], indices: Sequence[Any], semantic: Any) -> Any:
    """Index into a flattened tensor of `shape`."""
    place = indices[0]
    for size, index in zip(shape[1:], indices[1:], strict=True):
        place = semantic.add(semantic.mul(place, size, False), index, False)
    return place


@tl.builtin  # type: ignore[untyped-decorator]
def extract_slice(
    ful: Any, offsets: Any, sizes: Any, strides: Any, _semantic: Any = None, _generator: Any = None
) -> Any:
    """The elements of `ful` at offset + stride * index, for each index below `sizes`."""
    sizes = _values(sizes)
    indices = [
        _semantic.add(_semantic.mul(_lanes(sizes, axis, _semantic), stride, False), offset, False)
        for axis, (offset, stride) in enumerate(
            zip(_values(offsets), _values(strides), strict=True)
        )
    ]
    places = _place(_values(ful.shape), indices, _semantic)
    return _gathered(ful, places, sizes, _semantic)


@tl.builtin  # type: ignore[untyped-decorator]
def insert_slice(
    ful: Any,
    sub: Any,
    offsets: Any,
    sizes: Any,
    strides: Any,
    _semantic: Any = None,
    _generator: Any = None,
) -> Any:
    """`ful` with the elements of `sub` at offset + stride * index, for each index below `sizes`."""
    shape, sizes = _values(ful.shape), _values(sizes)
    inside, indices = None, []
    for axis, (offset, stride) in enumerate(zip(_values(offsets), _values(strides), strict=True)):
        distance = _semantic.sub(_lanes(shape, axis, _semantic), offset, False)
        index = _semantic.floordiv(distance, stride)
        for is_met in (
            _semantic.greater_equal(distance, 0),
            _semantic.less_than(index, sizes[axis]),
            _semantic.equal(_semantic.mod(distance, stride), 0),
        ):
            inside = is_met if inside is None else _semantic.and_(inside, is_met)
        indices.append(index)
    places = _place(_values(sub.shape), indices, _semantic)
    places = _semantic.where(inside, places, _semantic.to_tensor(0))
    return _semantic.where(inside, _gathered(sub, places, shape, _semantic), ful)


@tl.builtin  # type: ignore[untyped-decorator]
def get_element(src: Any, indice: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """The scalar of `src` at an index of each dimension."""
    place = _semantic.to_tensor(_place(_values(src.shape), _values(indice), _semantic))
    places = _semantic.splat(place, [1])
    return _semantic.unsplat(_gathered(src, places, [1], _semantic))
