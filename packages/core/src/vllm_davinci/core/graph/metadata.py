"""The attention metadata of a step that a graph can hold."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from vllm_davinci.core.graph.host_lengths import HostLengths, Lengths


class CapturableMetadata(Protocol):
    """Attention metadata of a step that a graph can hold.

    host_lengths: records launches with lengths on the host during a capture; else None
    widths:       blocks of each request that graphs of one size read, ascending; absent if graphs
                  do not depend on it
    width:        the width of the graph that holds this step; None in an eager step
    num_blocks:   of the longest request; absent like `widths`
    """

    host_lengths: HostLengths | None

    def step_lengths(self) -> tuple[Lengths, Lengths]:
        """Cumulative query lengths and total tokens, both per request of the step."""


class Group(NamedTuple):
    """Layers of a graph that share metadata, named by one of them. ubatch: 0 in a whole step."""

    ubatch: int
    layer_name: str
    host_lengths: HostLengths


def widths_of(metadata: CapturableMetadata) -> tuple[int | None, ...]:
    """Returns `widths`, or only None if there are none."""
    widths: tuple[int | None, ...] = getattr(metadata, "widths", (None,))
    return widths


def parts(metadata: Any) -> list[dict[str, Any]]:
    """Metadata by layer, per ubatch."""
    return metadata if isinstance(metadata, list) else [metadata or {}]


def distinct(metadata: list[dict[str, Any]]) -> Iterable[tuple[int, str, CapturableMetadata]]:
    """Yields each distinct metadata of a step: its ubatch, its first layer, and itself."""
    for ubatch, of_part in enumerate(metadata):
        first_layers = {id(each): name for name, each in reversed(of_part.items())}
        for name in first_layers.values():
            yield ubatch, name, of_part[name]
