"""Dispatch methods: how tokens reach the ranks of their experts, and why."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from vllm_davinci.core.config.environment_variables import hccl_buffer_mib
from vllm_davinci.core.config.step_costs import costs_file
from vllm_davinci.core.device.soc import MIB, FusedExperts, Soc
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_layout import ExpertLayout, expert_layout
from vllm_davinci.core.fused_moe.method_costs import MethodCosts, Steps

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_davinci.core.config.options import DavinciConfig


class CommunicationMethod(Enum):
    """Values of additional_config key `moe_communication`."""

    ALL_GATHER = "all_gather"
    """Gathers all tokens on every rank and reduce-scatters the partial sums."""
    MULTICAST = "multicast"
    """Each DP rank broadcasts its tokens; all-reduces the partial results."""
    ALL_TO_ALL = "all_to_all"
    """Sends tokens to the ranks of their experts, in exactly as many rows as needed."""
    FUSED = "fused"
    """Sends tokens to their experts' ranks in one launch and back in another; no host wait."""


ONE_DP_RANK = "all ranks of one DP rank already hold its tokens"


@dataclass(frozen=True)
class Choice:
    """A dispatch method and its reason, a clause that can follow "because"."""

    method: CommunicationMethod
    reason: str


# A token has up to eight experts, so up to eight ranks need it. Gathering on 16 ranks moves at most
# twice as many rows as sending each token to its experts.
MAX_RANKS_TO_GATHER = 16


@dataclass(frozen=True)
class RoutedSizes:
    """Sizes of a model's routed experts.

    num_experts: slots of all ranks
    """

    hidden_size: int
    num_experts: int
    top_k: int

    @classmethod
    def of_model(cls, model: "ModelConfig", num_redundant: int = 0) -> "RoutedSizes":
        """Sizes from a model's configuration. num_redundant: slots beyond one per expert"""
        config = model.hf_text_config
        named = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
        top_k = next((value for name in named if (value := getattr(config, name, None))), 1)
        # Some configurations have one entry per layer.
        most = max(top_k) if isinstance(top_k, list | tuple) else int(top_k)
        return cls(model.get_hidden_size(), model.get_num_experts() + num_redundant, most)


def unfused_reason(
    soc: Soc, dtype: torch.dtype, sizes: RoutedSizes, layout: ExpertLayout
) -> str | None:
    """Why experts cannot use the fused launches, as a clause after "because"; None if they can."""
    limits = soc.fused_experts
    if limits is None:
        return f"{soc.name} has no fused launches of experts"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"fused launches take bfloat16 and float16, and the model computes in {name}"
    if layout.ep_size not in limits.ranks:
        return (
            f"fused launches of {soc.name} take {_described(limits.ranks)} ranks, and experts are "
            f"divided among {layout.ep_size}"
        )
    if sizes.hidden_size not in limits.hidden_sizes:
        return (
            f"fused launches of {soc.name} take hidden sizes {_described(limits.hidden_sizes)}, "
            f"and the model's is {sizes.hidden_size}"
        )
    local = -(-sizes.num_experts // layout.ep_size)
    for what, value, most in (
        ("experts per token", sizes.top_k, limits.max_top_k),
        ("experts", sizes.num_experts, limits.max_experts),
        ("experts per rank", local, limits.max_local_experts),
        ("experts per rank times ranks", local * layout.ep_size, limits.max_places),
    ):
        if value > most:
            return f"fused launches of {soc.name} take up to {most} {what}, and there are {value}"
    return None


def window_mib(
    limits: FusedExperts, max_tokens: int, sizes: RoutedSizes, layout: ExpertLayout
) -> int:
    """HCCL buffer of the fused launches' group, in MiB: at least the other groups' size."""
    needed = limits.window_bytes(
        max_tokens, sizes.hidden_size, sizes.num_experts, sizes.top_k, layout.ep_size
    )
    return max(hccl_buffer_mib(), -(-needed // MIB))


def _described(allowed: Collection[int]) -> str:
    if isinstance(allowed, range):
        multiples = f" in steps of {allowed.step}" if allowed.step > 1 else ""
        return f"{allowed[0]} to {allowed[-1]}{multiples}"
    return ", ".join(map(str, allowed))


@dataclass(frozen=True)
class CommunicationRule:
    """Chooses a step's dispatch method from facts that all ranks share.

    forced:            what the user asked for, or None
    dp_size:           data-parallel size
    tp_size:           TP ranks of a DP rank
    max_decode_tokens: most tokens of a DP rank's decode-only step
    unfused_reason:    why no step can use the fused launches, or None
    overlapped:        whether steps may run as ubatches, which a host wait would stall
    sends_integers:    whether all-to-alls may send rows for int8 experts as int8; the
                       published schedule does not
    costs:             step times by method, or None
    """

    forced: CommunicationMethod | None
    layout: ExpertLayout
    dp_size: int
    tp_size: int
    max_decode_tokens: int
    unfused_reason: str | None
    overlapped: bool = False
    sends_integers: bool = True
    costs: MethodCosts | None = None

    @classmethod
    def of_engine(
        cls,
        vllm_config: "VllmConfig",
        config: "DavinciConfig",
        soc: Soc,
        dtype: torch.dtype,
        sizes: RoutedSizes,
    ) -> "CommunicationRule":
        """The rule of this engine's steps. dtype: of the experts' input tokens"""
        parallel = vllm_config.parallel_config
        asked = config.moe_communication
        layout = expert_layout(parallel, config)
        is_open = asked == "auto" and parallel.data_parallel_size > 1
        file = costs_file(config) if is_open else None
        return cls(
            forced=None if asked == "auto" else CommunicationMethod(asked),
            layout=layout,
            dp_size=parallel.data_parallel_size,
            tp_size=parallel.tensor_parallel_size,
            max_decode_tokens=vllm_config.scheduler_config.max_num_seqs,
            unfused_reason=unfused_reason(soc, dtype, sizes, layout),
            overlapped=config.dbo.enabled,
            sends_integers=config.overlap != "published",
            costs=None if file is None else MethodCosts.read(file),
        )

    @property
    def experts_span_dp_ranks(self) -> bool:
        """True if ranks that share an expert hold tokens of different DP ranks."""
        return self.tp_size % self.layout.etp_size != 0

    def check(self) -> None:
        """Raises ConfigurationError for a method that is impossible on these ranks."""
        if self.forced is None:
            return
        asked = f"additional_config key 'moe_communication' = {self.forced.value!r}"
        if self.forced not in (CommunicationMethod.ALL_TO_ALL, CommunicationMethod.FUSED):
            return
        if self.layout.ep_size == 1:
            raise ConfigurationError(
                f"{asked} sends tokens to their experts' ranks, and here every rank holds a part "
                "of all experts. Add --enable-expert-parallel or remove the key."
            )
        if self.experts_span_dp_ranks:
            raise ConfigurationError(
                f"{asked} needs the {self.layout.etp_size} ranks of an expert within the "
                f"{self.tp_size} TP ranks of one DP rank. Lower 'expert_tensor_parallel_size' or "
                "remove the key."
            )
        if self.forced is CommunicationMethod.FUSED and self.unfused_reason is not None:
            raise ConfigurationError(
                f"{asked} is not possible: {self.unfused_reason}. Use 'all_to_all', or remove the "
                "key."
            )

    @property
    def may_fuse(self) -> bool:
        """True if any step may use the fused launches."""
        if self.forced is not None or self.dp_size == 1:
            return self.forced is CommunicationMethod.FUSED
        apart = self.layout.ep_size > 1 and not self.experts_span_dp_ranks
        return apart and self.unfused_reason is None

    def max_fused_tokens(self, soc: Soc, max_num_batched_tokens: int) -> int:
        """Most tokens per rank in one fused launch of any step."""
        assert soc.fused_experts is not None
        may_prefill = self.forced is CommunicationMethod.FUSED or self.overlapped
        of_dp_rank = max_num_batched_tokens if may_prefill else self.max_decode_tokens
        slices = max(1, self.tp_size // self.layout.etp_size)
        return max(1, min(soc.fused_experts.max_tokens, -(-of_dp_rank // slices)))

    def choose(self, max_tokens: int, num_ubatches: int = 1) -> Choice:
        """The dispatch method of a step.

        max_tokens:   most tokens of any DP rank in this step or ubatch, known to all ranks, so that
                      they agree. Above `max_decode_tokens` some rank prefills
        num_ubatches: of the step
        """
        of_step = max_tokens * num_ubatches
        return self._cheapest(of_step, num_ubatches) or self._choose_by_rule(max_tokens)

    def _cheapest(self, of_step: int, num_ubatches: int) -> Choice | None:
        """The fastest method by this engine's step times; None without step times."""
        if self.costs is None:
            return None
        steps: Steps = "decodes" if of_step <= self.max_decode_tokens else "whole"
        if steps == "whole" and num_ubatches > 1:
            steps = "split"
        found = self.costs.fastest(steps, of_step, [each.value for each in self.candidates(steps)])
        return None if found is None else Choice(CommunicationMethod(found.method), found.told)

    def candidates(self, steps: Steps) -> list[CommunicationMethod]:
        """The methods possible for such steps on these ranks, if none was requested."""
        if self.dp_size == 1:
            return [CommunicationMethod.ALL_GATHER]
        found = [CommunicationMethod.ALL_GATHER]
        if self.layout.ep_size == 1:
            return [*found, CommunicationMethod.MULTICAST]
        if self.experts_span_dp_ranks:
            return found
        found.append(CommunicationMethod.ALL_TO_ALL)
        # The fused launches' buffers are large enough for prefills only if steps may be split.
        if self.unfused_reason is None and (steps == "decodes" or self.overlapped):
            found.append(CommunicationMethod.FUSED)
        return found

    def _choose_by_rule(self, max_tokens: int) -> Choice:
        """The dispatch method of a step without known step times."""
        ep_size = self.layout.ep_size
        if self.forced is not None:
            return Choice(self.forced, "moe_communication asks for it")
        if self.dp_size == 1:
            return Choice(CommunicationMethod.ALL_GATHER, ONE_DP_RANK)
        prefill = max_tokens > self.max_decode_tokens
        if ep_size == 1:
            if prefill:
                return Choice(
                    CommunicationMethod.MULTICAST,
                    "all ranks share all experts, and the step has a prefill",
                )
            return Choice(
                CommunicationMethod.ALL_GATHER, "all ranks share all experts, and the step decodes"
            )
        if self.experts_span_dp_ranks:
            return Choice(
                CommunicationMethod.ALL_GATHER,
                f"the {self.layout.etp_size} ranks that share an expert belong to several DP ranks",
            )
        if prefill and not self.overlapped:
            return Choice(
                CommunicationMethod.ALL_TO_ALL,
                f"experts are divided among {ep_size} ranks, and the step has a prefill",
            )
        hurry = "ubatches overlap" if self.overlapped else "the step decodes"
        if self.unfused_reason is None:
            return Choice(
                CommunicationMethod.FUSED, f"{hurry}, and fused launches need no host wait"
            )
        if ep_size <= MAX_RANKS_TO_GATHER:
            return Choice(
                CommunicationMethod.ALL_GATHER,
                f"{hurry}, the host should not wait, and {self.unfused_reason}",
            )
        return Choice(
            CommunicationMethod.ALL_TO_ALL,
            f"experts are divided among {ep_size} ranks, too many for an all-gather, and "
            f"{self.unfused_reason}",
        )
