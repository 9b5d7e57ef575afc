"""Decides whether each step is split into ubatches, and where, alike on all data-parallel ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheConfig

from vllm_davinci.core.components.protocols import Decision, Split, StreamScheduler
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import ATTENTION, side_stream
from vllm_davinci.core.config.step_costs import costs_file, ways_to_experts
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.ubatch.coordination import CoordinatedStep, RankStep, coordinate_across_dp
from vllm_davinci.core.ubatch.decisions import Counts, Decisions, has_communication
from vllm_davinci.core.ubatch.metrics import CountWriter
from vllm_davinci.core.ubatch.planned_step import PlannedStep, SplitStep
from vllm_davinci.core.ubatch.step_facts import BatchFacts, ScheduledStep

logger = init_logger(__name__)


class StepSplitter:
    """Decides whether each step of one runner is split into ubatches, and where.

    scheduler:  None if dual-batch overlap is off: DP ranks then exchange only whether they prefill
    decode_query_len: tokens of a decoding request
    takes_images: whether the model takes multimodal input; its graphs then hold whole steps
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        scheduler: StreamScheduler | None,
        decode_query_len: int,
        takes_images: bool,
    ) -> None:
        config = get_config(vllm_config)
        self._options = config.dbo
        self._parallel: ParallelConfig = vllm_config.parallel_config
        self.decode_query_len = decode_query_len
        self._takes_images = takes_images
        self._tries = False  # dummy runs are split like real steps
        self._is_causal = False  # until the KV cache exists
        self._graph_decisions: dict[int, Decision] = {}  # by number of tokens
        self._layers_ask_for_prefills = (
            self._parallel.data_parallel_size > 1
            and side_stream(vllm_config, ATTENTION) is not None
        )
        self._decisions: Decisions | None = None
        if scheduler is not None:
            tells = get_tp_group().rank_in_group == 0 and get_pp_group().is_first_rank
            self._decisions = Decisions(
                scheduler,
                self._options,
                has_communication(self._parallel),
                costs_file(config),
                ways_to_experts(config),
                interval_s=envs.VLLM_LOG_STATS_INTERVAL if tells else None,
                publish=CountWriter(vllm_config) if tells else None,
            )

    @property
    def is_needed(self) -> bool:
        """True if steps may be split or DP ranks must agree, so that `plan` must run."""
        return self._decisions is not None or self._layers_ask_for_prefills

    @contextmanager
    def builder_per_ubatch(self) -> Iterator[None]:
        """Shows vLLM the number of ubatches during one call: each gets its own builder."""
        size = self._parallel.ubatch_size
        if self._decisions is not None:
            self._parallel.ubatch_size = self._options.num_ubatches
        try:
            yield
        finally:
            self._parallel.ubatch_size = size

    def look_at_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Learns from the layers' caches whether steps may be cut at all."""
        self._is_causal = attends_causally(kv_cache_config)

    @property
    def splits(self) -> bool:
        """True if any step may be split."""
        return self._decisions is not None and has_communication(self._parallel)

    def first_shares(self) -> tuple[float, ...]:
        """Possible fractions of tokens in the first ubatch: the usual one, and the largest."""
        if not self.splits:
            return ()
        usual = self._options.first_share or 1 / self._options.num_ubatches
        if self._options.split == "token":
            return (usual,)
        return (usual, min(usual + self._options.imbalance_ratio, 0.99))

    def would_split(self, query_lens: Sequence[int], first_share: float) -> bool:
        """True if a step of these requests is split with that fraction in the first ubatch."""
        if self._decisions is None or not self._is_causal:
            return False
        step = self._decisions.facts(query_lens, decode_query_len=self.decode_query_len)
        with self._decisions.revised(first_share=first_share):
            return self._decisions.decide(step).split is not None

    @contextmanager
    def as_if_real(self, first_share: float) -> Iterator[None]:
        """Decides about dummy runs as about real steps, without counting them."""
        assert self._decisions is not None
        with self._decisions.revised(first_share=first_share):
            self._tries = True
            try:
                yield
            finally:
                self._tries = False

    def plan(
        self, step: ScheduledStep, mode: CUDAGraphMode, num_tokens: int, facts: BatchFacts | None
    ) -> PlannedStep:
        """The step as all DP ranks run it. All ranks call it, once per step.

        mode, num_tokens: the DP ranks have agreed on them; rows of this rank, padding included
        facts:            about the batch; None in a step without requests
        """
        step, about, decision = self._decide(step, mode, num_tokens, facts)
        ubatch_sizes: list[torch.Tensor] | None = None
        prefills = False
        if self._parallel.data_parallel_size > 1:
            coordinated = self._coordinate(step, num_tokens, decision)
            ubatch_sizes = coordinated.ubatch_sizes
            prefills = self._layers_ask_for_prefills and coordinated.prefills
        agreed = self._planned(step, mode, num_tokens, about, decision, ubatch_sizes)
        return PlannedStep(agreed, prefills)

    def _decide(
        self, step: ScheduledStep, mode: CUDAGraphMode, num_tokens: int, facts: BatchFacts | None
    ) -> tuple[ScheduledStep, Any, Decision | None]:
        """Returns the step, facts about it, and this rank's decision; None without overlap."""
        decisions = self._decisions
        if self._tries:
            step, facts = replace(step, is_real=True), BatchFacts(can_be_cut=True)
        if decisions is None:
            return step, None, None
        about = self._about(decisions, step, mode, num_tokens, facts)
        return step, about, decisions.decide(about, None if facts is None else facts.prefixes)

    def _planned(
        self,
        step: ScheduledStep,
        mode: CUDAGraphMode,
        num_tokens: int,
        about: Any,
        decision: Decision | None,
        ubatch_sizes: list[torch.Tensor] | None,
    ) -> SplitStep | None:
        """Cuts the step and counts the decision. ubatch_sizes: of every DP rank, if all cut"""
        decisions = self._decisions
        if decisions is None or decision is None:
            return None
        if self._parallel.data_parallel_size > 1 and ubatch_sizes is None:
            decision = decision.withdrawn("VETOED")
        if not self._tries:
            decisions.count(about, decision)
        split = decision.split
        if mode == CUDAGraphMode.FULL or step.precedes_graph:
            split = self._split_in_graph(num_tokens)
            ubatch_sizes = None if split is None else self._same_on_all_ranks(split, num_tokens)
        return None if split is None else SplitStep(split, ubatch_sizes)

    def _about(
        self,
        decisions: Decisions,
        step: ScheduledStep,
        mode: CUDAGraphMode,
        num_tokens: int,
        facts: BatchFacts | None,
    ) -> Any:
        replays = mode != CUDAGraphMode.NONE
        return decisions.facts(
            step.query_lens.tolist(),
            decode_query_len=self.decode_query_len,
            num_cached_tokens=0
            if facts is None
            else facts.cached_tokens(step.query_lens > self.decode_query_len),
            is_real=step.is_real,
            is_graph_replay=replays,
            is_split_in_graph=replays and self._split_in_graph(num_tokens) is not None,
            is_supported=self._is_causal and facts is not None and facts.can_be_cut,
        )

    def ubatches_of_graph(self, num_tokens: int) -> int:
        """Number of ubatches in the captured graph of `num_tokens` tokens; 1: whole."""
        split = self._split_in_graph(num_tokens)
        return 1 if split is None else len(split.ubatches)

    def _split_in_graph(self, num_tokens: int) -> Split | None:
        """The split of a graph's steps; None if whole. The same at capture and at each replay."""
        if self._decisions is None or self._takes_images:
            return None
        if not self._is_causal:
            return None
        query_len = self.decode_query_len
        if num_tokens not in self._graph_decisions:
            # The number of padding requests among the decodes does not matter.
            step = self._decisions.facts(
                [query_len] * (num_tokens // query_len), decode_query_len=query_len
            )
            decision = self._decisions.decide(step)
            self._graph_decisions[num_tokens] = decision
            if self._options.decode:
                logger.info_once(
                    "Dual-batch overlap: the graph of %d tokens holds its steps %s.",
                    num_tokens,
                    f"whole: {decision.reason.value}"
                    if decision.split is None
                    else f"as {len(decision.split.ubatches)} ubatches",
                )
        return self._graph_decisions[num_tokens].split

    def _same_on_all_ranks(self, split: Split, num_tokens: int) -> list[torch.Tensor] | None:
        """Returns every DP rank's tokens per ubatch if all ranks' steps are equal."""
        dp_size = self._parallel.data_parallel_size
        if dp_size == 1:
            return None
        return [
            torch.full((dp_size,), size, dtype=torch.int32) for size in _sizes(split, num_tokens)
        ]

    def _coordinate(
        self, step: ScheduledStep, num_tokens: int, decision: Decision | None
    ) -> CoordinatedStep:
        split = None if decision is None else decision.split
        return coordinate_across_dp(
            RankStep(
                [] if split is None else _sizes(split, num_tokens),
                bool(step.is_real and step.query_lens.max() > self.decode_query_len),
            ),
            self._options.num_ubatches,
            self._parallel.data_parallel_rank,
            get_dp_group().cpu_group,
        )

    @property
    def policy(self) -> Any:
        """The policy currently in force; None if dual-batch overlap is off."""
        return None if self._decisions is None else self._decisions.policy

    def revise(self, **rules: Any) -> None:
        """Changes the rules from now on, if steps may be split at all."""
        self._graph_decisions.clear()
        if self._decisions is not None:
            self._decisions.revise(**rules)

    def counts(self) -> Counts:
        """Reason -> number of steps; empty if dual-batch overlap is off."""
        return {} if self._decisions is None else self._decisions.counts()

    def log(self) -> None:
        """Logs the decisions since the last line."""
        if self._decisions is not None:
            self._decisions.log()


def attends_causally(kv_cache_config: KVCacheConfig) -> bool:
    """True if the layers attend to earlier tokens only."""
    groups = kv_cache_config.kv_cache_groups
    return bool(groups) and not any(
        isinstance(spec := group.kv_cache_spec, EncoderOnlyAttentionSpec)
        or getattr(spec, "non_causal", False)
        for group in groups
    )


def _sizes(split: Split, num_tokens: int) -> list[int]:
    """Rows of each ubatch; the last one includes padding up to num_tokens."""
    return [end - begin for begin, end in pairwise([0, *split.cuts, num_tokens])]
