"""Results of ModelSlim's exports, as a table and as a documentation page."""

from dataclasses import dataclass

import environment
from recipes import Recipe

from versions import stamp

# What is compared, and the largest increase of perplexity over the definition's, for types whose
# rounding costs more than the goal.
NUM_PROMPTS, NUM_TOKENS = 8, 16
SCORED_TOKENS = 8192
NEAR_DEFINITION = 0.002


@dataclass(frozen=True)
class Outcome:
    recipe: Recipe
    is_good: bool
    text: str


def table(outcomes: list[Outcome]) -> str:
    width = max(len(f"{outcome.recipe.model}: {outcome.recipe.name}") for outcome in outcomes)
    lines = [
        f"{f'{outcome.recipe.model}: {outcome.recipe.name}':{width}}  "
        f"{'ok    ' if outcome.is_good else 'FAILED'}  {outcome.text}"
        for outcome in outcomes
    ]
    good = sum(outcome.is_good for outcome in outcomes)
    return "\n".join([*lines, f"{good} of {len(outcomes)} exports are as they should be"])


INTRODUCTION = f"""\
Small models, quantized by ModelSlim {environment.VERSION} over the virtual NPU and served by the
engine in bf16: `nox -s conformance -- modelslim --table FILE` writes this page. Tokens are
compared with those of an integer definition in fp32 ({NUM_PROMPTS} prompts, {NUM_TOKENS} tokens
each); *close* ones differ, but their logits are so near that 16 bits can exchange them. Perplexity
over {SCORED_TOKENS} tokens of held-out text is compared with the float checkpoint's. If it exceeds
the goal, the row says so, and the engine's may be at most {100 * NEAR_DEFINITION} % above that of
the definition, which contains only the tool's rounding. If `vllm-davinci quantize` makes the same
type, its tensors are compared bit by bit; ModelSlim divides in the model's dtype and ours in fp32,
so that integers and scales agree if the model is in fp32 (*wide*)."""


def verdict(outcome: Outcome) -> str:
    if not outcome.is_good:
        return "no"
    return "but for the goal" if "MISSED" in outcome.text else "yes"


def page(outcomes: list[Outcome]) -> str:
    """Formats the results as a documentation page."""
    lines = [
        "# ModelSlim's own exports",
        "",
        stamp("core", "vnpu"),
        "",
        INTRODUCTION,
        "",
        "| model | export | result | as it should be |",
        "| --- | --- | --- | --- |",
        *(
            f"| {outcome.recipe.model} | {outcome.recipe.name} | {outcome.text} "
            f"| {verdict(outcome)} |"
            for outcome in outcomes
        ),
    ]
    return "\n".join(lines) + "\n"
