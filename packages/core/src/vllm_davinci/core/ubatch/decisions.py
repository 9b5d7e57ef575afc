"""The decision whether to split a step, counted and told to the user."""

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from vllm_davinci.core.components.protocols import Decision, Split, StepFacts, StreamScheduler
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

Counts = dict[str, int]


def has_communication(parallel_config: "ParallelConfig") -> bool:
    """Whether more than one rank computes a layer."""
    return parallel_config.tensor_parallel_size > 1 or parallel_config.data_parallel_size > 1


class Decisions:
    """Decides for every step of one engine, and answers why a step was not split.

    interval_s: how often the log says what was decided; None never
    publish:    called with the number of decisions by reason after each of them, or None
    """

    def __init__(
        self,
        scheduler: StreamScheduler,
        options: DualBatchConfig,
        has_communication: bool,
        interval_s: float | None = None,
        publish: Callable[[Counts], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._is_ordered: Callable[[Split], bool] = lambda split: True
        self._policy = scheduler.split_policy(
            mode=options.split,
            costs=options.costs,
            enabled=options.enabled,
            has_communication=has_communication,
            num_ubatches=options.num_ubatches,
            min_total_tokens=options.min_total_tokens_to_split,
            min_prefill_tokens=options.min_prefill_tokens_to_split,
            min_decode_tokens=options.min_decode_tokens_to_split,
            imbalance_ratio=options.imbalance_ratio,
            alignment=options.token_alignment,
            first_share=options.first_share,
            decode=options.decode,
            is_ordered=lambda split: self._is_ordered(split),
        )
        self._interval_s = interval_s
        self._publish = publish
        self._last_log = time.monotonic()
        self._logged: Counts = {}
        self._examples: dict[str, str] = {}

    def decide(
        self,
        query_lens: Sequence[int],
        is_ordered: Callable[[Split], bool],
        **facts: int,
    ) -> Decision:
        """For one step. is_ordered: whether no part reads cache blocks that a later one fills."""
        self._is_ordered = is_ordered
        step = self._scheduler.step_facts(query_lens, **facts)
        decision = self._policy.decide(step)
        self._examples[decision.reason.name] = _describe(step, decision)
        return decision

    def of_graph(self, num_requests: int, query_len: int) -> Decision:
        """For the graph of a step of so many decodes, however many of them are padding.

        No decode reads a cached block that another one fills: blocks that are not full are nobody
        else's.
        """
        self._is_ordered = lambda split: True
        return self._policy.answer(
            self._scheduler.step_facts([query_len] * num_requests, decode_query_len=query_len)
        )

    def veto(self, decision: Decision) -> Decision:
        """Another data-parallel rank does not split: neither does this one."""
        vetoed = self._policy.veto(decision)
        self._examples[vetoed.reason.name] = self._examples[decision.reason.name]
        return vetoed

    def counts(self) -> Counts:
        """Reason -> number of steps since the start."""
        return {reason.name.lower(): count for reason, count in self._policy.counters.items()}

    def tell(self) -> None:
        """Publishes the counts; writes them to the log when that is due."""
        if self._publish is not None:
            self._publish(self.counts())
        now = time.monotonic()
        if self._interval_s is not None and now - self._last_log >= self._interval_s:
            self._last_log = now
            self.log()

    def log(self) -> None:
        """One line: what was decided since the line before, and an example of each reason."""
        counters = self._policy.counters
        new = {r: n - self._logged.get(r.name, 0) for r, n in counters.items()}
        self._logged = {reason.name: count for reason, count in counters.items()}
        lines = [
            self._line(reason, count)
            for reason, count in sorted(new.items(), key=lambda item: -item[1])
            if count > 0
        ]
        if lines:
            logger.info("Dual-batch overlap, steps decided on: %s", "; ".join(lines))

    def _line(self, reason: Enum, count: int) -> str:
        return f"{count} x {reason.value} (the newest: {self._examples[reason.name]})"


def _describe(step: StepFacts, decision: Decision) -> str:
    figures = (
        f"{len(step.query_lens)} requests, {step.num_tokens} tokens, "
        f"{step.num_prefill_tokens} of them prefill"
    )
    if decision.split is None:
        return figures
    return f"{figures}, cut at {', '.join(map(str, decision.split.cuts))}"
