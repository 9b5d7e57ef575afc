"""How tokens reach the ranks of their experts, and why that way."""

from dataclasses import dataclass
from enum import Enum

from vllm_davinci.core.config import RELEASE
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.moe.groups import ExpertLayout


class Scheme(Enum):
    """Values of additional_config key `moe_communication`."""

    ALL_GATHER = "all_gather"
    """Every rank gets all tokens, and sums of partial results are scattered back."""
    MULTICAST = "multicast"
    """Each replica broadcasts its tokens; all partial results are reduced everywhere."""
    ALL_TO_ALL = "all_to_all"
    """Tokens go to the ranks of their experts, in as many rows as there are."""
    FUSED = "fused"
    """One launch that dispatches, one that combines. Refused: this release has no such launches."""


@dataclass(frozen=True)
class Choice:
    """A scheme and the reason for it, a clause that can follow "because"."""

    scheme: Scheme
    reason: str


@dataclass(frozen=True)
class SchemeRule:
    """Chooses a scheme for a step, from what all ranks know alike.

    forced:           what the user asked for, or None
    num_replicas:     data-parallel size
    tp_size:          ranks of a replica
    max_decode_tokens: most tokens of a replica's step that has no prefill
    """

    forced: Scheme | None
    layout: ExpertLayout
    num_replicas: int
    tp_size: int
    max_decode_tokens: int

    @property
    def experts_span_replicas(self) -> bool:
        """Whether ranks that share an expert hold tokens of different replicas."""
        return self.tp_size % self.layout.etp_size != 0

    def check(self) -> None:
        """Raises ConfigurationError for a scheme that these ranks cannot follow."""
        if self.forced is None:
            return
        asked = f"additional_config key 'moe_communication' = {self.forced.value!r}"
        if self.forced is Scheme.FUSED:
            raise ConfigurationError(
                f"not available in {RELEASE}: {asked}. Use 'all_to_all', or remove the key."
            )
        if self.forced is not Scheme.ALL_TO_ALL:
            return
        if self.layout.ep_size == 1:
            raise ConfigurationError(
                f"{asked} sends tokens to their experts' ranks, and every rank has a part of all "
                "experts. Add --enable-expert-parallel or remove the key."
            )
        if self.experts_span_replicas:
            raise ConfigurationError(
                f"{asked} needs the {self.layout.etp_size} ranks of an expert within the "
                f"{self.tp_size} ranks of a replica. Lower 'expert_tensor_parallel_size' or "
                "remove the key."
            )

    def choose(self, max_tokens: int) -> Choice:
        """The scheme of a step.

        max_tokens: most tokens any replica has in this step. A step with more than decodes make
                    has a prefill somewhere; all ranks see the same number, so they agree.
        """
        ep_size = self.layout.ep_size
        if self.forced is not None:
            return Choice(self.forced, "moe_communication asks for it")
        if self.num_replicas == 1:
            return Choice(Scheme.ALL_GATHER, "one replica's tokens are on all of its ranks already")
        prefill = max_tokens > self.max_decode_tokens
        if ep_size == 1:
            if prefill:
                return Choice(
                    Scheme.MULTICAST, "all ranks share all experts, and the step has a prefill"
                )
            return Choice(Scheme.ALL_GATHER, "all ranks share all experts, and the step decodes")
        if self.experts_span_replicas:
            return Choice(
                Scheme.ALL_GATHER,
                f"the {self.layout.etp_size} ranks of an expert are in several replicas",
            )
        return Choice(Scheme.ALL_TO_ALL, f"experts are among {ep_size} ranks")
