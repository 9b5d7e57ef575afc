"""Computes the device resources of graphs before the first capture."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.memory import format_bytes
from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.graph.sizes import sample_evenly

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Streams of a device left for other work: the runner, collectives outside of graphs, other
# processes. Source: the established plugin plans with 1920 of 1984.
SPARE_STREAMS = 64


@dataclass(frozen=True)
class GraphMemory:
    """Device memory of graphs, in bytes, measured by trial captures.

    first:      the largest graph, with the shared pool and operators' workspaces
    next:       each further graph
    workspaces: kept by torch_npu for each stream of the steps, in addition to the graphs
    """

    first: int
    next: int
    workspaces: int = 0

    def of_graphs(self, count: int) -> int:
        """Memory of `count` graphs without the workspaces, in bytes."""
        return self.first + (count - 1) * self.next if count else 0

    def room(self, available: int) -> int:
        """The number of graphs that fit into `available` bytes."""
        if available < self.first:
            return 0
        return 1 + (available - self.first) // max(1, self.next)


@dataclass(frozen=True)
class CapturePlan:
    """The graphs of one engine, and the resources they hold on each device.

    sizes:             tokens, ascending
    streams_per_graph: the main stream, side streams of layers, and streams of collectives
    events_per_graph:  between these streams, in a step that is not split
    updates_per_graph: launches whose lengths change before a replay: one per attention layer, in a
                       step that is not split
    num_ubatches:      by size, for sizes captured as ubatches
    memory:            None before it is measured
    notes:             reasons for fewer sizes than requested, and which sizes are split
    """

    sizes: tuple[int, ...]
    streams_per_graph: int
    events_per_graph: int
    updates_per_graph: int
    num_ubatches: Mapping[int, int] = field(default_factory=dict)
    memory: GraphMemory | None = None
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Number of ubatches in all graphs; an unsplit step counts as one."""
        return sum(self.num_ubatches.get(size, 1) for size in self.sizes)

    def within(self, limits: GraphLimits, available_bytes: int | None = None) -> "CapturePlan":
        """Reduces the plan to the sizes that the device can hold, always including the largest.

        available_bytes: device memory; None: not limited. Without memory for one graph no size is
                         left, because a capture would fail.
        Raises ConfigurationError if streams, events or updatable launches allow no graph.
        """
        most_parts = max((self.num_ubatches.get(size, 1) for size in self.sizes), default=1)
        events, updates = self.events_per_graph * most_parts, self.updates_per_graph * most_parts
        room = {
            "streams": (limits.streams - SPARE_STREAMS) // self.streams_per_graph,
            "events": limits.events // max(1, events),
            "updatable launches": limits.updatable_tasks // max(1, updates),
        }
        what, most = min(room.items(), key=lambda item: item[1])
        if most < 1:
            raise ConfigurationError(
                f"A graph of this model does not fit the device: {self.told()}; limits: {limits}, "
                f"too few {what}. Start with --enforce-eager."
            )
        if self.memory is not None and available_bytes is not None:
            most_in_memory = self.memory.room(available_bytes)
            if most_in_memory < most:
                what, most = f"{format_bytes(available_bytes)} of memory left", most_in_memory
        return self.with_most(most, f"the device has {what} for {most}")

    def with_most(self, count: int, reason: str) -> "CapturePlan":
        """Reduces the plan to `count` sizes, always including the largest. reason: a clause."""
        if count >= len(self.sizes):
            return self
        return replace(
            self,
            sizes=tuple(sample_evenly(self.sizes, count)) if count else (),
            notes=(*self.notes, f"{len(self.sizes)} sizes were requested, and {reason}"),
        )

    def with_drafts(self, count: int) -> "CapturePlan":
        """Adds `count` graphs of a drafter's passes to each size.

        Each is assumed to need as much as the model's graph, an upper bound: the model has more
        layers, and the counted layers include the drafter's.
        """
        return replace(
            self,
            streams_per_graph=self.streams_per_graph * (1 + count),
            events_per_graph=self.events_per_graph * (1 + count),
            updates_per_graph=self.updates_per_graph * count,
            notes=(*self.notes, f"each with {count} of the drafter's passes"),
        )

    def totals(self) -> dict[str, int]:
        """Totals over all graphs, by resource; memory in bytes."""
        count = len(self.sizes)
        return {
            "graphs": count,
            "streams": count * self.streams_per_graph,
            "events": self.parts * self.events_per_graph,
            "updatable_tasks": self.parts * self.updates_per_graph,
            "memory": 0 if self.memory is None else self.memory.of_graphs(count),
        }

    def told(self) -> str:
        """The plan in one line, for the log."""
        count, totals = len(self.sizes), self.totals()
        text = (
            f"{count} graphs of {', '.join(map(str, self.sizes))} tokens; each with "
            f"{self.streams_per_graph} streams, {self.events_per_graph} events, "
            f"{self.updates_per_graph} launches to update; together "
            f"{totals['streams']} streams, {totals['events']} events"
        )
        if self.memory is not None:
            text += f", {format_bytes(totals['memory'])}"
        if self.num_ubatches:
            split = ", ".join(map(str, sorted(self.num_ubatches)))
            text += f"; those of {split} tokens are split and hold this much per ubatch"
        return "; ".join([text, *self.notes])


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of layers in this rank's pipeline stage.

    attention:  attention layers
    experts:    layers of routed experts
    exchanging: `experts` layers whose tokens are sent by collectives
    fused:      `experts` layers whose tokens are sent by fused launches
    apart:      `experts` layers whose shared experts have their own all-reduce
    embeds:     True if the stage embeds tokens
    widths:     graphs of each size, for steps with longer requests
    """

    attention: int
    experts: int = 0
    exchanging: int = 0
    fused: int = 0
    apart: int = 0
    embeds: bool = True
    widths: int = 1


# Events of a collective (by torch_npu's process group), of a layer's side stream (two forks and
# joins), of a prefetch. Counted on a virtual NPU, in every kind of graph that tests capture.
EVENTS_PER_COLLECTIVE = 3
EVENTS_PER_SIDE_STREAM = 4
EVENTS_PER_PREFETCH = 1
# Collectives of a layer of routed experts: tokens, logits and returned sums; or counts, rows and
# results.
COLLECTIVES_PER_EXCHANGE = 3


def plan_capture(
    vllm_config: "VllmConfig",
    sizes: list[int],
    layers: LayerCounts,
    num_ubatches: Mapping[int, int],
    memory: GraphMemory | None = None,
) -> CapturePlan:
    """The plan of this rank's graphs, before the device's limits.

    num_ubatches: by size, for sizes captured as ubatches
    """
    config = get_config(vllm_config)
    options, sequence_parallel = config.torchair_graph_config, config.sequence_parallel
    collectives = layers.exchanging * COLLECTIVES_PER_EXCHANGE
    is_tp = vllm_config.parallel_config.tensor_parallel_size > 1
    is_sequence_parallel = (
        sequence_parallel.enabled and max(sizes, default=0) >= sequence_parallel.min_tokens
    )
    if is_tp:  # a sum after attention and one after the MLP, each in one or two collectives
        collectives += (2 * layers.attention + layers.embeds) * (1 + is_sequence_parallel)
        collectives += layers.apart
    forks = layers.attention * options.enable_multistream_mla
    forks += layers.experts * options.enable_multistream_moe
    # Steps in ubatches do not prefetch.
    is_prefetching = config.weight_prefetch_config.enabled and not num_ubatches.keys() >= set(sizes)
    prefetches = (layers.attention + layers.experts) * is_prefetching
    # Each process group has its own stream.
    streams = [
        is_tp,
        layers.exchanging > 0,
        options.enable_multistream_mla,
        options.enable_multistream_moe,
        is_prefetching,
        bool(num_ubatches) and (is_sequence_parallel or layers.fused > 0),  # the ubatches' stream
    ]
    return CapturePlan(
        sizes=tuple(sizes),
        streams_per_graph=layers.widths * (1 + sum(streams)),
        events_per_graph=layers.widths
        * (
            collectives * EVENTS_PER_COLLECTIVE
            + forks * EVENTS_PER_SIDE_STREAM
            + prefetches * EVENTS_PER_PREFETCH
        ),
        updates_per_graph=layers.widths * layers.attention,
        num_ubatches=num_ubatches,
        memory=memory,
    )
