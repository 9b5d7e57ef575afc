"""Draws one layer of a dense model, whole and split, from the traces of multistream/overlap.

`python benchmarks/multistream/layer_picture.py TRACES OUT.png [--layer N]`, after
`python benchmarks/run.py multistream/overlap --models dense --all-reduce --traces TRACES`. Needs
matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from multistream.step_trace import StepTrace, steps_of
from vllm_davinci.vnpu import timeline
from vllm_davinci.vnpu.timeline import Task

# Purposes of a dense layer's operators, in order; the others are too short to be named.
PRODUCTS = ("qkv", "out", "gate, up", "down")
SHORTEST = 2000.0  # microseconds
WHOLE, FIRST, SECOND = "#5b6b7b", "#2f6db3", "#e08a2c"
OTHER_LAYER = 0.25  # opacity
ROWS = ("compute", "communication")


def collectives(step: StepTrace, label: str) -> list[Task]:
    return [t for t in step.tasks if t.category == "collective" and t.label == label]


def window(step: StepTrace, labels: list[str], layer: int) -> tuple[float, float]:
    """The interval from the layer's first operator under the first label to its last collective
    under the last label.

    A part has one collective for the embedding, then two per layer.
    """
    begin = collectives(step, labels[0])[2 * layer].end
    first = next(
        task
        for task in step.tasks
        if task.category == "operator" and task.label == labels[0] and task.begin >= begin
    )
    return first.begin, collectives(step, labels[-1])[2 * layer + 2].end


def bars(step: StepTrace, label: str) -> Iterator[tuple[str, float, float, str, int]]:
    """Row, begin, end, name and layer of each task that is long enough to be visible."""
    reductions = products = 0
    for task in step.tasks:
        begin, end = task.busy
        if task.label != label or end - begin < SHORTEST:
            continue
        if task.category == "collective":
            yield "communication", begin, end, "all-reduce", (reductions - 1) // 2
            reductions += 1
        elif "Fused" in task.name:
            yield "compute", begin, end, "attn", products // 4
        elif task.category == "operator":
            yield "compute", begin, end, PRODUCTS[products % 4], products // 4
            products += 1


def draw(axes: Axes, step: StepTrace, parts: dict[str, str], layer: int) -> None:
    """Draws a layer's tasks as bars, from its begin. parts: label -> colour"""
    begin, _ = window(step, list(parts), layer)
    end = begin + axes.get_xlim()[1] * 1000
    for label, colour in parts.items():
        for row, first, last, name, of_layer in bars(step, label):
            if last <= begin or first >= end:
                continue
            first, last = max(first, begin), min(last, end)
            is_own = of_layer == layer
            left, width = (first - begin) / 1000, (last - first) / 1000
            y = ROWS.index(row)
            axes.barh(
                y, width, left=left, height=0.72, color=colour, edgecolor="white", linewidth=1.2,
                alpha=1.0 if is_own else OTHER_LAYER,
            )  # fmt: skip
            if is_own:
                text = axes.text(
                    left + width / 2, y, name, ha="center", va="center", color="white", fontsize=8.5
                )
                box = text.get_window_extent(axes.figure.canvas.get_renderer())
                space = axes.transData.transform([(left, 0), (left + width, 0)])
                if box.width > space[1][0] - space[0][0] - 4:
                    text.set_rotation(90)
                    text.set_fontsize(7.5)


def milliseconds_per_layer(step: StepTrace, parts: list[str], layer: int) -> float:
    """Milliseconds from the begin of a layer to the begin of the next layer."""
    return (window(step, parts, layer + 1)[0] - window(step, parts, layer)[0]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--layer", type=int, default=3)
    options = parser.parse_args()
    steps = {}
    for side in ("whole", "split"):
        directory = options.traces / f"dense_{side}" / "dp_rank_0"
        windows = json.loads((directory / "prefills.json").read_text(encoding="utf-8"))
        recorded = timeline.read([directory])
        steps[side] = steps_of(recorded, [tuple(each) for each in windows])[-1]
    (clock,) = recorded.clocks

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 4.8), sharex=True)
    longest = window(steps["whole"], [""], options.layer)
    for axes in (above, below):
        axes.set_xlim(0, (longest[1] - longest[0]) / 1000)
        axes.set_ylim(1.5, -0.5)
        axes.set_yticks([0, 1], ["compute\nstream", "communication\nstream"])
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.subplots_adjust(left=0.12, right=0.98, top=0.9, bottom=0.2, hspace=0.55)
    figure.canvas.draw()  # texts are measured against the final axes
    parts = {"whole": {"": WHOLE}, "split": {"ubatch 0": FIRST, "ubatch 1": SECOND}}
    names = {"whole": "Whole steps", "split": "Two ubatches (pale: other layers)"}
    for axes, side in ((above, "whole"), (below, "split")):
        draw(axes, steps[side], parts[side], options.layer)
        pitch = milliseconds_per_layer(steps[side], list(parts[side]), options.layer)
        axes.set_title(f"{names[side]}: a layer every {pitch:.0f} ms", loc="left", fontsize=11)
    below.set_xlabel("milliseconds since the layer began")
    below.legend(
        handles=[Patch(color=FIRST, label="ubatch 0"), Patch(color=SECOND, label="ubatch 1")],
        loc="upper right",
        bbox_to_anchor=(1.0, -0.22),
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    figure.text(0.01, 0.02, f"Virtual NPU, {clock}.", fontsize=7, color="#666666")
    figure.savefig(options.picture, dpi=130)


if __name__ == "__main__":
    main()
