"""Pictures of a report, as SVG."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from vllm_davinci.verify.trace import Task

WIDTH, LEFT = 860, 250
ROW = 18
GREEN, RED, BLUE = "#2a7d4f", "#c0392b", "#2d6cab"
COLORS = (BLUE, "#d98c21", GREEN, "#8e5aa8", "#5b6b7a")


def _svg(height: float, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def errors(rows: Mapping[str, Sequence[float]]) -> str:
    """A row for each operator, a dot for each call: its error over its bound, on a log scale.

    rows: operator -> errors over bounds; infinite where a call failed
    """
    least, most = -6.0, 3.0

    def place(ratio: float) -> float:
        power = math.log10(ratio) if 0 < ratio < math.inf else (least if ratio == 0 else most)
        return LEFT + (WIDTH - LEFT - 20) * (min(max(power, least), most) - least) / (most - least)

    height = ROW * (len(rows) + 2)
    body = (
        f'<line x1="{place(1):.1f}" x2="{place(1):.1f}" y1="4" y2="{height - ROW}" '
        f'stroke="{RED}" stroke-dasharray="4 3"/>' + _text(place(1), height - 4, "bound", "middle")
    )
    body += _text(LEFT, height - 4, "exact") + _text(WIDTH - 20, height - 4, "failed", "end")
    for number, (name, ratios) in enumerate(rows.items()):
        y = ROW * (number + 1)
        body += _text(LEFT - 12, y + 4, name, "end")
        body += f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" stroke="#e5e5e5"/>'
        for ratio in ratios:
            color = GREEN if ratio <= 1 else RED
            body += (
                f'<circle cx="{place(ratio):.1f}" cy="{y}" r="3.4" fill="{color}" '
                'fill-opacity="0.55"/>'
            )
    return _svg(height, body)


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """A bar for each figure of one unit: name, value, unit."""
    largest = max((value for _, value, _ in rows), default=1.0) or 1.0
    body = ""
    for number, (name, value, unit) in enumerate(rows):
        y = ROW * number
        length = (WIDTH - LEFT - 130) * value / largest
        body += _text(LEFT - 12, y + 13, name, "end")
        body += (
            f'<rect x="{LEFT}" y="{y + 3}" width="{max(length, 1):.1f}" height="{ROW - 6}" '
            f'fill="{BLUE}"/>'
        )
        body += _text(LEFT + length + 6, y + 13, f"{value:g} {unit}")
    return _svg(ROW * len(rows) + 4, body)


def timeline(tasks: Sequence[Task], most: int = 1500) -> str:
    """A row for each stream, of the middle tasks of a trace."""
    skipped = max(0, (len(tasks) - most) // 2)
    shown = tasks[skipped : skipped + most]
    begin = min(task.begin for task in shown)
    length = max(task.end for task in shown) - begin or 1.0
    streams = sorted({task.stream for task in shown})
    scale = (WIDTH - 120) / length
    body = ""
    for number, stream in enumerate(streams):
        y = number * (ROW + 8)
        body += _text(0, y + 16, f"stream {stream}"[:16])
        for task in shown:
            if task.stream == stream:
                x, width = 110 + (task.begin - begin) * scale, (task.end - task.begin) * scale
                color = COLORS[number % len(COLORS)]
                body += (
                    f'<rect x="{x:.2f}" y="{y + 3}" width="{max(width, 0.4):.2f}" height="{ROW}" '
                    f'fill="{color}"><title>{escape(task.name)}</title></rect>'
                )
    height = len(streams) * (ROW + 8) + 18
    return _svg(height, body + _text(WIDTH, height - 4, f"{length:.0f} us", "end"))
