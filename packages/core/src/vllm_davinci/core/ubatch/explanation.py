"""Explains why a step is or is not split into ubatches, and what would change that."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.step_costs import costs_file, ways_to_experts
from vllm_davinci.core.errors import ComponentError, ConfigurationError
from vllm_davinci.core.fused_moe.method_costs import MethodCosts
from vllm_davinci.core.ubatch.decisions import Decisions, has_communication

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_PS_PER_MS = 10**9


@dataclass(frozen=True)
class Explanation:
    """Explains one reason for a decision.

    meaning: what was found
    change:  the option, threshold or request that would change the decision
    """

    meaning: str
    change: str


# By the names of multistream's reasons, as in log and metrics.
EXPLANATIONS = {
    "split": Explanation("the step runs as ubatches", "dbo.enabled = false keeps it whole"),
    "disabled": Explanation(
        "dual-batch overlap is off", '--enable-dbo, or dbo.enabled = true, or overlap = "auto"'
    ),
    "not_a_step": Explanation(
        "a profile or warm-up run, or a dummy run of a DP rank without requests",
        "nothing: it serves no request",
    ),
    "no_communication": Explanation(
        "one rank computes each layer alone: there is nothing to overlap with",
        "--tensor-parallel-size, or --data-parallel-size with --enable-expert-parallel",
    ),
    "unsupported": Explanation(
        "a request has multimodal input for a model that stores some of it for the whole "
        "step, or the model attends bidirectionally or has inputs for the whole step",
        "send such requests separately: one of them prevents the split of its step",
    ),
    "graph_replay": Explanation(
        "the step is replayed from a graph, which holds it whole; the log of the start says why",
        "dbo.decode = true, and a size of dbo.min_decode_tokens_to_split tokens or more",
    ),
    "split_replay": Explanation(
        "the step is replayed from a graph, which holds it as ubatches", "dbo.decode = false"
    ),
    "no_prefill": Explanation(
        "all requests of the step decode; their launches cost more than overlap hides",
        "dbo.decode = true",
    ),
    "few_tokens": Explanation(
        "the step has fewer tokens than the threshold; below it the doubled launches cost more "
        "than overlap hides",
        "a lower dbo.min_total_tokens_to_split, or more requests at once",
    ),
    "few_decode_tokens": Explanation(
        "all requests of the step decode, and have fewer tokens than the threshold of such steps",
        "a lower dbo.min_decode_tokens_to_split, or more requests at once",
    ),
    "few_prefill_tokens": Explanation(
        "most tokens of the step are decodes", "a lower dbo.min_prefill_tokens_to_split"
    ),
    "no_gain": Explanation(
        "by the step times in the file of step_costs, the step is faster whole",
        "more tokens in a step (--max-num-batched-tokens), or step_costs = null: thresholds decide "
        "then",
    ),
    "no_cut": Explanation(
        "no possible cut: no boundary between requests close enough to equal parts, or no "
        "aligned cut inside them",
        'dbo.split = "token", which cuts inside requests too; or a larger dbo.imbalance_ratio, or '
        "a smaller dbo.token_alignment",
    ),
    "prefix_dependency": Explanation(
        "a request before the cut reads cached blocks that one after it fills in the same step",
        "nothing: the next step finds the blocks filled; --no-enable-prefix-caching avoids it",
    ),
    "vetoed": Explanation(
        "another DP rank did not split its step, and DP ranks split together or not at all",
        "requests spread evenly over the DP ranks; see the reasons of the others",
    ),
}

# The options that decide, by reason.
OPTIONS = {
    "few_tokens": ("min_total_tokens_to_split",),
    "few_decode_tokens": ("min_decode_tokens_to_split",),
    "few_prefill_tokens": ("min_prefill_tokens_to_split",),
    "no_cut": ("split", "imbalance_ratio", "token_alignment", "first_share", "num_ubatches"),
    "no_prefill": ("decode",),
    "disabled": ("enabled",),
}


@dataclass(frozen=True)
class StepExplanation:
    """The split decision for a hypothetical step.

    reason:       of `EXPLANATIONS`
    part_tokens:  tokens of each ubatch; one number if the step stays whole
    options:      dotted option -> value on this engine, for the options that decided
    durations:    modelled milliseconds of the step by schedule, for schedules with step times,
                  shortest first
    """

    reason: str
    explanation: Explanation
    part_tokens: tuple[int, ...]
    options: dict[str, object]
    durations: dict[str, float]


def explain_step(
    vllm_config: "VllmConfig", query_lens: Sequence[int], is_supported: bool = True
) -> StepExplanation:
    """The decision of an engine with this configuration, by the policy that it runs.

    query_lens:   new tokens of each request in batch order, decodes (1 token) first
    is_supported: no multimodal input for a model that stores some of it
    Ignores graphs, cached prefixes within the step, and other DP ranks. Raises ConfigurationError
    for an impossible step, ComponentError without a stream scheduler.
    """
    config = get_config(vllm_config)
    options = config.dbo
    limits = vllm_config.scheduler_config
    if not query_lens or min(query_lens) < 1:
        raise ConfigurationError("A step needs at least one request, with at least one token each.")
    if sum(query_lens) > limits.max_num_batched_tokens:
        raise ConfigurationError(
            f"No step has {sum(query_lens)} tokens: --max-num-batched-tokens is "
            f"{limits.max_num_batched_tokens}. Describe the chunks that one step takes."
        )
    if len(query_lens) > limits.max_num_seqs:
        raise ConfigurationError(
            f"No step has {len(query_lens)} requests: --max-num-seqs is {limits.max_num_seqs}."
        )
    scheduler = components.stream_scheduler()
    if scheduler is None:
        package = components.STREAMS.package
        raise ComponentError(
            f"Steps are split by {package}, which is not installed. `pip install {package}` adds "
            "it."
        )
    costs, ways = costs_file(config), ways_to_experts(config)
    decisions = Decisions(
        scheduler, options, has_communication(vllm_config.parallel_config), costs, ways
    )
    decision = decisions.decide(decisions.facts(query_lens, is_supported=is_supported))
    reason = decision.reason.name.lower()
    parts = [] if decision.split is None else decision.split.ubatches
    return StepExplanation(
        reason=reason,
        explanation=EXPLANATIONS[reason],
        part_tokens=tuple(part.tokens.stop - part.tokens.start for part in parts)
        or (sum(query_lens),),
        options={f"dbo.{name}": getattr(options, name) for name in OPTIONS.get(reason, ())},
        durations={} if costs is None else _durations(costs, decisions.policy.costs, query_lens),
    )


def _durations(file: Path, costs: Any, query_lens: Sequence[int]) -> dict[str, float]:
    """Milliseconds of a step by schedule. costs: of the scheduler, for steps with a prefill"""
    num_tokens = sum(query_lens)
    if max(query_lens) == 1:
        found = {
            _schedule("whole", name): duration
            for name, duration in MethodCosts.read(file).durations("decodes", num_tokens).items()
        }
    else:
        whole, split = costs.durations(num_tokens)
        found = {_schedule("whole", name): duration for name, duration in whole.items()}
        found |= {_schedule("split", name): duration for name, duration in split.items()}
    ordered = sorted(found.items(), key=lambda each: each[1])
    return {name: round(duration / _PS_PER_MS, 3) for name, duration in ordered}


def _schedule(steps: str, way: str) -> str:
    return steps if way == "only" else f"{steps}, {way}"
