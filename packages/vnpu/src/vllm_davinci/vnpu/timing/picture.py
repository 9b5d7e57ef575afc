"""Draws modelled timelines: a panel each, with a row per stream and a colour per label."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_davinci.vnpu.errors import TraceError

# Colours of launches without a label, then of labels in order.
_COLOURS = ("#5b6b7b", "#2f6db3", "#e08a2c", "#3f8f5b", "#9b4f96")
_COLLECTIVE_HATCH = "//"
# Shares of a panel's width: narrower bars have no edge, which would hide them; wider bars have a
# name.
_EDGED, _NAMED = 0.002, 0.06


@dataclasses.dataclass(frozen=True)
class Bar:
    """A task, in microseconds of the modelled clock."""

    row: str
    name: str
    category: str
    label: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Picture:
    """Content of a timeline: the machine's title, and tasks ordered by begin."""

    title: str
    bars: tuple[Bar, ...]

    @property
    def begin(self) -> float:
        """Start of the first task, in microseconds."""
        return min(bar.begin for bar in self.bars)

    @property
    def end(self) -> float:
        """End of the last task, in microseconds."""
        return max(bar.end for bar in self.bars)


def read(file: pathlib.Path) -> Picture:
    """Reads a timeline's tasks, without events. Raises TraceError."""
    try:
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{file} cannot be read: {error}. Name a timeline of vnpu's.") from error
    title, rows = "", {}
    bars: list[Bar] = []
    for event in events:
        if event["name"] == "process_labels":
            title = event["args"]["labels"]
        elif event["name"] == "thread_name":
            rows[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["cat"] != "event":
            place = (event["pid"], event["tid"])
            label = event["args"].get("label", "")
            end = event["ts"] + event["dur"]
            row = rows.get(place, str(place))
            bars.append(Bar(row, event["name"], event["cat"], label, event["ts"], end))
    if not bars:
        raise TraceError(f"{file} has no tasks. Name a timeline of vnpu's.")
    return Picture(title, tuple(_with_streams_of_libraries_named(bars)))


def _with_streams_of_libraries_named(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Names streams without a role after their only kind of task, such as HCCL's."""
    categories: dict[str, set[str]] = {}
    for bar in bars:
        categories.setdefault(bar.row, set()).add(bar.category)
    for bar in bars:
        kinds = categories[bar.row]
        if bar.row.startswith("stream ") and len(kinds) == 1:
            row = bar.row.replace("stream ", f"{bar.category} stream ", 1)
            bar = dataclasses.replace(bar, row=row)
        yield bar


def draw(
    sources: Sequence[pathlib.Path],
    destination: pathlib.Path,
    begin_ms: float = 0.0,
    length_ms: float | None = None,
) -> None:
    """Draws timelines below each other on one scale, as PNG or SVG.

    begin_ms:  begin of each panel, after the timeline's first task
    length_ms: length of every panel; None: the longest timeline's
    Raises TraceError for unreadable files, and without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise TraceError(
            "pictures need matplotlib: pip install 'vllm-davinci-vnpu[picture]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Keeps text as text, and ids deterministic.
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "vnpu"
    pictures = [read(source) for source in sources]
    if length_ms is None:
        length_ms = max((each.end - each.begin) / 1000 - begin_ms for each in pictures)
    figure, panels = pyplot.subplots(
        len(sources), 1, figsize=(14, 2.2 * len(sources) + 1), squeeze=False, layout="constrained"
    )
    for (axes,), source, picture in zip(panels, sources, pictures, strict=True):
        _draw_panel(axes, picture, begin_ms, length_ms)
        axes.set_title(f"{source.stem}: {picture.title}", fontsize=8, loc="left")
    panels[-1][0].set_xlabel("ms, modelled; hatched: collectives")
    # No dates and versions, so that the same timelines give the same bytes.
    figure.savefig(destination, dpi=150, metadata={"Date": None} if _is_svg(destination) else None)
    pyplot.close(figure)


def _draw_panel(axes: Any, picture: Picture, begin_ms: float, length_ms: float) -> None:
    """Draws one timeline. axes: matplotlib's"""
    from matplotlib import patches

    begin = picture.begin + begin_ms * 1000
    end = begin + length_ms * 1000
    rows = _rows_in(picture, begin, end)
    labels = sorted({bar.label for bar in picture.bars} - {""})
    # All bars of a kind in one call: a step has thousands.
    kinds: dict[tuple[str, str, bool, bool], list[tuple[float, float]]] = {}
    for bar in _visible(picture, begin, end):
        left, width = (bar.begin - begin) / 1000, (bar.end - bar.begin) / 1000
        kind = (bar.row, bar.label, bar.category == "collective", width > length_ms * _EDGED)
        kinds.setdefault(kind, []).append((left, width))
        if width > length_ms * _NAMED:
            shown = max(left, 0.0), min(left + width, length_ms)
            axes.text(
                sum(shown) / 2,
                rows.index(bar.row),
                bar.name.removeprefix("aclnn"),
                fontsize=7,
                ha="center",
                va="center",
                clip_on=True,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
    for (row, label, is_collective, is_edged), spans in kinds.items():
        axes.broken_barh(
            spans,
            (rows.index(row) - 0.4, 0.8),
            facecolors=_colour(label, labels),
            edgecolor="white" if is_edged else "none",
            linewidth=0.2,
            hatch=_COLLECTIVE_HATCH if is_collective else None,
        )
    if labels:
        keys = [patches.Patch(color=_colour(each, labels), label=each) for each in labels]
        axes.legend(handles=keys, loc="lower right", fontsize=7, ncols=len(keys))
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xlim(0, length_ms)
    axes.invert_yaxis()


def _colour(label: str, labels: Sequence[str]) -> str:
    return _COLOURS[(1 + labels.index(label)) % len(_COLOURS) if label else 0]


def _is_svg(destination: pathlib.Path) -> bool:
    return destination.suffix == ".svg"


def _visible(picture: Picture, begin: float, end: float) -> Iterator[Bar]:
    for bar in picture.bars:
        if bar.end > begin and bar.begin < end:
            yield bar


def _rows_in(picture: Picture, begin: float, end: float) -> list[str]:
    """The streams with tasks in the panel, the busiest first."""
    busy: dict[str, float] = {}
    for bar in _visible(picture, begin, end):
        busy[bar.row] = busy.get(bar.row, 0.0) + bar.end - bar.begin
    return sorted(busy, key=lambda row: -busy[row])
