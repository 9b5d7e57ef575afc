"""How tokens reach the ranks of their experts, and why that way."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import torch

from vllm_davinci.core.device.soc import Soc
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_layout import ExpertLayout


class Scheme(Enum):
    """Values of additional_config key `moe_communication`."""

    ALL_GATHER = "all_gather"
    """Every rank gets all tokens, and sums of partial results are scattered back."""
    MULTICAST = "multicast"
    """Each DP rank broadcasts its tokens; all partial results are reduced everywhere."""
    ALL_TO_ALL = "all_to_all"
    """Tokens go to the ranks of their experts, in as many rows as there are."""
    FUSED = "fused"
    """Tokens go to the ranks of their experts in one launch and come back in one; no host wait."""


ONE_DP_RANK = "one DP rank's tokens are on all of its ranks already"


@dataclass(frozen=True)
class Choice:
    """A scheme and the reason for it, a clause that can follow "because"."""

    scheme: Scheme
    reason: str


# A token's experts, eight in the largest models there are, lie on up to eight ranks. Gathering all
# tokens on 16 moves at most twice as many rows as sending each token to those.
MAX_RANKS_TO_GATHER = 16


def fused_obstacle(
    soc: Soc, dtype: torch.dtype, hidden_size: int, layout: ExpertLayout
) -> str | None:
    """Why these experts cannot use the fused launches, a clause for "because"; None if they can."""
    limits = soc.fused_experts
    if limits is None:
        return f"{soc.name} has no fused launches of experts"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"fused launches take bfloat16 and float16, and the model computes in {name}"
    if layout.ep_size not in limits.ranks:
        return (
            f"fused launches of {soc.name} take {_described(limits.ranks)} ranks, and experts are "
            f"among {layout.ep_size}"
        )
    if hidden_size not in limits.hidden_sizes:
        return (
            f"fused launches of {soc.name} take hidden sizes {_described(limits.hidden_sizes)}, "
            f"and the model's is {hidden_size}"
        )
    return None


def _described(allowed: Collection[int]) -> str:
    if isinstance(allowed, range):
        multiples = f" in steps of {allowed.step}" if allowed.step > 1 else ""
        return f"{allowed[0]} to {allowed[-1]}{multiples}"
    return ", ".join(map(str, allowed))


@dataclass(frozen=True)
class SchemeRule:
    """Chooses a scheme for a step, from what all ranks know alike.

    forced:           what the user asked for, or None
    dp_size:     data-parallel size
    tp_size:          ranks of a DP rank
    max_decode_tokens: most tokens of a DP rank's step that has no prefill
    obstacle:         what is in the way of the fused launches, or None
    overlapped:       whether steps may run as ubatches, which a wait of the host would stop
    """

    forced: Scheme | None
    layout: ExpertLayout
    dp_size: int
    tp_size: int
    max_decode_tokens: int
    obstacle: str | None
    overlapped: bool = False

    @property
    def experts_span_dp_ranks(self) -> bool:
        """Whether ranks that share an expert hold tokens of different DP ranks."""
        return self.tp_size % self.layout.etp_size != 0

    def check(self) -> None:
        """Raises ConfigurationError for a scheme that these ranks cannot follow."""
        if self.forced is None:
            return
        asked = f"additional_config key 'moe_communication' = {self.forced.value!r}"
        if self.forced not in (Scheme.ALL_TO_ALL, Scheme.FUSED):
            return
        if self.layout.ep_size == 1:
            raise ConfigurationError(
                f"{asked} sends tokens to their experts' ranks, and every rank has a part of all "
                "experts. Add --enable-expert-parallel or remove the key."
            )
        if self.experts_span_dp_ranks:
            raise ConfigurationError(
                f"{asked} needs the {self.layout.etp_size} ranks of an expert within the "
                f"{self.tp_size} ranks of a DP rank. Lower 'expert_tensor_parallel_size' or "
                "remove the key."
            )
        if self.forced is Scheme.FUSED and self.obstacle is not None:
            raise ConfigurationError(
                f"{asked} is not possible: {self.obstacle}. Use 'all_to_all', or remove the key."
            )

    @property
    def may_fuse(self) -> bool:
        """Whether any step may use the fused launches."""
        if self.forced is not None or self.dp_size == 1:
            return self.forced is Scheme.FUSED
        apart = self.layout.ep_size > 1 and not self.experts_span_dp_ranks
        return apart and self.obstacle is None

    def choose(self, max_tokens: int) -> Choice:
        """The scheme of a step.

        max_tokens: most tokens any DP rank has in this step. A step with more than decodes make
                    has a prefill somewhere; all ranks see the same number, so they agree.
        """
        ep_size = self.layout.ep_size
        if self.forced is not None:
            return Choice(self.forced, "moe_communication asks for it")
        if self.dp_size == 1:
            return Choice(Scheme.ALL_GATHER, ONE_DP_RANK)
        prefill = max_tokens > self.max_decode_tokens
        if ep_size == 1:
            if prefill:
                return Choice(
                    Scheme.MULTICAST, "all ranks share all experts, and the step has a prefill"
                )
            return Choice(Scheme.ALL_GATHER, "all ranks share all experts, and the step decodes")
        if self.experts_span_dp_ranks:
            return Choice(
                Scheme.ALL_GATHER,
                f"the {self.layout.etp_size} ranks of an expert are in several DP ranks",
            )
        if prefill and not self.overlapped:
            return Choice(
                Scheme.ALL_TO_ALL, f"experts are among {ep_size} ranks, and the step has a prefill"
            )
        hurry = "ubatches overlap" if self.overlapped else "the step decodes"
        if self.obstacle is None:
            return Choice(
                Scheme.FUSED, f"{hurry}, and fused launches leave the host nothing to wait for"
            )
        if ep_size <= MAX_RANKS_TO_GATHER:
            return Choice(
                Scheme.ALL_GATHER, f"{hurry}, the host should not wait, and {self.obstacle}"
            )
        return Choice(
            Scheme.ALL_TO_ALL,
            f"experts are among {ep_size} ranks, too many to gather on, and {self.obstacle}",
        )
