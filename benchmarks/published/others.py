"""Decode steps that users of Ascend chips have published, as options of dry-runs.

Nothing is fitted to them. A figure is `held` if it was first compared after the model's code and
    figures had been settled. Sources state machine, release and load only in part; each row has
    assumptions for the rest. Intervals cover the ranges of assumed figures and what a source leaves
    open: the number of chips, a chip's variant, how steps are launched. By default, releases of
    that time replay piecewise graphs and launch attention between them. Such a step takes longer
    than one graph of the whole step, as this engine replays it, and less than a step launched
    operator by operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_davinci.planner.deployments.checkpoint import write_checkpoint
from vllm_davinci.planner.deployments.table import Checkpoint

CHUNK = 8192
ISSUES = "github.com/vllm-project/vllm-ascend/issues/"
# Releases before asynchronous scheduling.
SYNCHRONOUS = ("--no-async-scheduling",)
GRAPHS = ("-cc.cudagraph_mode=FULL_DECODE_ONLY",)
EAGER = ("--no-async-scheduling", "--enforce-eager")
IN_PIECES = ({"options": EAGER},)
B4 = {"chip": str(Path(__file__).parent / "ascend910b4_64gib.toml")}
LAUNCHED = ({"options": ("--enforce-eager",)},)
W8A8 = {"*.gate": "FLOAT", "model.layers.*": "W8A8_DYNAMIC"}


@dataclass(frozen=True)
class Figure:
    """
    published: ms of one decode step of `requests` requests behind prompts of `prompt_tokens`
    source:    number of the issue or pull request
    taken:     assumptions about what the source does not state
    or_else:   other values of this figure's fields that the source allows
    is_held:   first compared after the model was settled
    """

    name: str
    published: float
    source: int
    model: str
    ranks: int
    requests: int
    prompt_tokens: int
    options: tuple[str, ...]
    chip: str = "ascend910b2"
    taken: str = ""
    is_held: bool = False
    quantization: dict[str, str] = field(default_factory=dict)
    or_else: tuple[dict[str, Any], ...] = ()

    def possible(self) -> Iterator[Figure]:
        """Returns this figure, and a variant for each thing that the source leaves open."""
        yield self
        for fields in self.or_else:
            yield replace(self, **fields, or_else=())


FIGURES = (
    Figure("Qwen3-32B on 4, one prompt of 15k", 38, 4656, "qwen3-32b", 4, 1, 15000, SYNCHRONOUS,
           taken="910B2", or_else=IN_PIECES),
    Figure("Qwen3-30B-A3B on 4, one prompt of 15k", 20, 4656, "qwen3-30b-a3b", 4, 1, 15000,
           SYNCHRONOUS, taken="910B2; published as 20 and more", or_else=IN_PIECES),
    Figure("Qwen3-30B-A3B on 2", 34.2, 2328, "qwen3-30b-a3b", 2, 1, 1024, SYNCHRONOUS,
           taken="one request, graphs", or_else=IN_PIECES),
    Figure("Qwen3-32B on 2, 16 prompts of 2k", 66.7, 4395, "qwen3-32b", 2, 16, 2048, SYNCHRONOUS,
           chip="ascend910b3", taken="the 64 GB variant of 910B4 as 910B3, or as 910B4",
           or_else=(*IN_PIECES, B4)),
    Figure("Qwen3-32B on 2, 16 prompts of 8k", 111, 4395, "qwen3-32b", 2, 16, 8192, SYNCHRONOUS,
           chip="ascend910b3", taken="likewise", or_else=(*IN_PIECES, B4)),
    Figure("Qwen3-235B int8 on 8, 16 prompts of 2k", 71.4, 4395, "qwen3-235b-a22b", 8, 16, 2048,
           SYNCHRONOUS, chip="ascend910b3", taken="likewise; W8A8 with scales per token",
           quantization=W8A8, or_else=(*IN_PIECES, B4)),
    Figure("Qwen3-14B on 1, v0.9.2", 33.2, 2566, "qwen3-14b", 1, 1, 128, SYNCHRONOUS,
           taken="910B2, graphs, short prompt", is_held=True, or_else=IN_PIECES),
    Figure("Qwen3-14B on 1, v0.9.1", 43.0, 2566, "qwen3-14b", 1, 1, 128, EAGER,
           taken="910B2, eager, short prompt", is_held=True),
    Figure("QwQ-32B on 8", 100, 506, "qwq-32b", 8, 1, 1024, EAGER,
           taken="910B2, eager, one request", is_held=True),
    Figure("Qwen2.5-7B on 1, one request a second", 32.1, 776, "qwen2.5-7b", 1, 4, 256, EAGER,
           taken="910B2, eager, four requests under way; published of its vision sibling"),
    Figure("Qwen2.5-7B on 1, one request a second, tuned", 16.8, 878, "qwen2.5-7b", 1, 2, 264,
           SYNCHRONOUS, taken="910B2, graphs, two requests under way, as rate and step say",
           is_held=True),
    Figure("Qwen3-30B-A3B on 4, one request a second", 23.9, 1605, "qwen3-30b-a3b", 4, 3, 192,
           SYNCHRONOUS, taken="910B2, graphs, three requests under way, as rate and step say",
           is_held=True, or_else=IN_PIECES),
    Figure("Qwen3-8B on 1, one request a second", 28.8, 11751, "qwen3-8b", 1, 4, 264, GRAPHS,
           chip="ascend910b3", taken="910B3, graphs, four requests under way; published of its "
           "vision sibling", is_held=True, or_else=LAUNCHED),
    Figure("Qwen2.5-7B on 1, 20 prompts of 3.5k", 32.3, 11750, "qwen2.5-7b", 1, 20, 3500, GRAPHS,
           chip="ascend910b3", taken="910B3, graphs; published of its sibling for all senses, by "
           "its peak rate", is_held=True, or_else=LAUNCHED),
    Figure("Qwen3-30B-A3B on 2, 20 prompts of 3.5k", 22.2, 11750, "qwen3-30b-a3b", 2, 20, 3500,
           GRAPHS, chip="ascend910b3", taken="910B3, two chips, graphs; published of its sibling "
           "for all senses", is_held=True, or_else=(*LAUNCHED, {"ranks": 4}, {"ranks": 8})),
)  # fmt: skip


def dry_run_options(figure: Figure, model: Path) -> tuple[str, ...]:
    """Returns options of a dry-run, except its report. model: a directory for its checkpoint"""
    # All requests have the same prompt, which later ones find in the prefix cache. The first
    # request must still generate when the last prompt has been computed, and for a few more steps.
    output_tokens = 6 + figure.prompt_tokens // CHUNK
    write_checkpoint(Checkpoint(figure.model, figure.model, ISSUES, figure.quantization), model)
    return (
        *(f"--model={model}", f"--chip={figure.chip}", "--topology=node-of-8"),
        *(f"--requests={figure.requests}", f"--prompt-tokens={figure.prompt_tokens}"),
        *(f"--output-tokens={output_tokens}", f"--tensor-parallel-size={figure.ranks}"),
        *("--enable-prefix-caching", f"--max-num-batched-tokens={CHUNK}"),
        *(("--quantization=ascend",) if figure.quantization else ()),
        *figure.options,
    )
