"""Decides whether a step is split, with the reason."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_davinci.multistream.costs import StepCosts
from vllm_davinci.multistream.split import CutMode, Split, choose_cuts, split_at


class Reason(enum.Enum):
    """Why a step was split, or was not."""

    SPLIT = "split"
    DISABLED = "overlap is off"
    NOT_A_STEP = "a profile or warm-up run"
    NO_COMMUNICATION = "no rank to communicate with"
    GRAPH_REPLAY = "the step replays a graph that holds it whole"
    SPLIT_REPLAY = "the step replays a graph that holds it split"
    NO_PREFILL = "no prefill request (dbo.decode is off)"
    FEW_TOKENS = "fewer tokens than min_total_tokens_to_split"
    FEW_DECODE_TOKENS = "fewer tokens than min_decode_tokens_to_split, and none of a prefill"
    FEW_PREFILL_TOKENS = "fewer prefill tokens than min_prefill_tokens_to_split"
    NO_CUT = "no legal cut within imbalance_ratio"
    PREFIX_DEPENDENCY = "a part would read cached blocks that a later part writes"
    UNSUPPORTED = "something in this step cannot be cut (LoRA, multimodal inputs)"
    NO_GAIN = "by its costs the step is faster whole"
    VETOED = "another data-parallel rank does not split"


@dataclass(frozen=True)
class StepFacts:
    """Facts about a step that determine the decision.

    query_lens:       new tokens of each request, in batch order
    decode_query_len: maximum new tokens of a decode
    num_cached_tokens: tokens of the prefills' requests that are cached before the step
    is_split_in_graph: True if the step replays a graph captured as ubatches
    """

    query_lens: Sequence[int]
    decode_query_len: int = 1
    num_cached_tokens: int = 0
    is_real: bool = True
    is_graph_replay: bool = False
    is_split_in_graph: bool = False
    is_supported: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(length for length in self.query_lens if length > self.decode_query_len)


@dataclass(frozen=True)
class Decision:
    """A split, or the reason against it."""

    reason: Reason
    split: Split | None = None

    def withdrawn(self, reason: str) -> "Decision":
        """Returns the decision, changed to whole for a reason that the caller found.

        reason: a name of Reason. A step that is whole already keeps its reason.
        """
        return self if self.split is None else Decision(Reason[reason])


@dataclass(frozen=True)
class SplitPolicy:
    """Decides for each step, from its facts alone.

    has_communication: True if there is a rank to communicate with
    min_total_tokens, min_prefill_tokens: smaller steps stay whole
    decode:   True if steps without a prefill may be split
    min_decode_tokens: smaller steps without a prefill stay whole
    alignment: cuts inside requests are multiples of it, in tokens
    first_share: first part's share of a step's tokens; None: equal parts
    costs:    step times, if known; for steps with a prefill they replace the thresholds, and
              first_share unless it is set or much is cached: a first part is larger because tokens
              at the beginning of a prompt attend to few others
    """

    enabled: bool = True
    has_communication: bool = True
    num_ubatches: int = 2
    min_total_tokens: int = 256
    min_prefill_tokens: int = 64
    imbalance_ratio: float = 0.1
    mode: CutMode = "request"
    alignment: int = 1
    first_share: float | None = None
    decode: bool = False
    min_decode_tokens: int = 32
    costs: StepCosts | None = None

    def decide(self, step: StepFacts) -> Decision:
        """The decision for one step."""
        first_share = self.first_share
        if not self.enabled:
            return Decision(Reason.DISABLED)
        if not step.is_real:
            return Decision(Reason.NOT_A_STEP)
        if not self.has_communication:
            return Decision(Reason.NO_COMMUNICATION)
        if not step.is_supported:
            return Decision(Reason.UNSUPPORTED)
        if step.is_graph_replay:
            return Decision(Reason.SPLIT_REPLAY if step.is_split_in_graph else Reason.GRAPH_REPLAY)
        if step.num_prefill_tokens == 0:
            if not self.decode:
                return Decision(Reason.NO_PREFILL)
            if step.num_tokens < max(self.min_decode_tokens, self.num_ubatches):
                return Decision(Reason.FEW_DECODE_TOKENS)
        elif self.costs is not None:
            if step.num_tokens < self.num_ubatches or not self.costs.gains(step.num_tokens):
                return Decision(Reason.NO_GAIN)
            if first_share is None and 4 * step.num_cached_tokens <= step.num_tokens:
                first_share = self.costs.first_share(step.num_tokens)
        else:
            if step.num_tokens < max(self.min_total_tokens, self.num_ubatches):
                return Decision(Reason.FEW_TOKENS)
            if step.num_prefill_tokens < self.min_prefill_tokens:
                return Decision(Reason.FEW_PREFILL_TOKENS)
        cuts = choose_cuts(
            step.query_lens,
            num_ubatches=self.num_ubatches,
            mode=self.mode,
            imbalance_ratio=self.imbalance_ratio,
            alignment=self.alignment,
            first_share=first_share,
            decode_query_len=step.decode_query_len,
        )
        if not cuts:
            return Decision(Reason.NO_CUT)
        return Decision(Reason.SPLIT, split_at(step.query_lens, cuts))
