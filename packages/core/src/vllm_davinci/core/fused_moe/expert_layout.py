"""Layout of experts: which ranks hold which slice of which experts.

The ranks of all DP ranks together, within a pipeline stage, hold the experts: consecutive ranks
share each expert, and ranks with the same index in their groups divide the experts among them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

    from vllm_davinci.core.config.options import DavinciConfig


@dataclass(frozen=True)
class ExpertLayout:
    """Layout of experts on `world_size` ranks.

    etp_size: ranks that share one expert, each with a part of its intermediate dimension
    """

    world_size: int
    etp_size: int

    @property
    def ep_size(self) -> int:
        """Ranks among which whole experts are divided."""
        return self.world_size // self.etp_size

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp_size

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp_size

    def etp_groups(self) -> list[list[int]]:
        """Ranks that share experts: [k * etp_size, (k + 1) * etp_size)."""
        starts = range(0, self.world_size, self.etp_size)
        return [list(range(start, start + self.etp_size)) for start in starts]

    def ep_groups(self) -> list[list[int]]:
        """Ranks with the same part of different experts: equal modulo etp_size."""
        return [
            list(range(first, self.world_size, self.etp_size)) for first in range(self.etp_size)
        ]


def expert_layout(parallel: "ParallelConfig", config: "DavinciConfig") -> ExpertLayout:
    """The layout that the engine's options request.

    Each expert is shared by the tensor parallel ranks, unless --enable-expert-parallel makes
    experts whole or expert_tensor_parallel_size is set.
    Raises ConfigurationError for options that contradict each other or do not divide the ranks.
    """
    # Ranks of one data-parallel rank. Those of prefill context parallelism have different tokens.
    ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    world_size = parallel.data_parallel_size * ranks
    asked = config.expert_tensor_parallel_size
    if parallel.enable_expert_parallel:
        if asked > 1:
            raise ConfigurationError(
                f"--enable-expert-parallel keeps experts whole, and additional_config key "
                f"'expert_tensor_parallel_size' = {asked} divides each among {asked} ranks. "
                "Remove one of them."
            )
        return ExpertLayout(world_size, 1)
    etp_size = asked or ranks
    if world_size % etp_size:
        raise ConfigurationError(
            f"additional_config key 'expert_tensor_parallel_size' is {etp_size} and does not "
            f"divide the {world_size} ranks (data parallel {parallel.data_parallel_size} x tensor "
            f"parallel {parallel.tensor_parallel_size}). Use a divisor of {world_size}."
        )
    return ExpertLayout(world_size, etp_size)


def check_expert_count(num_experts: int, layout: ExpertLayout, num_redundant: int = 0) -> None:
    """Raises ConfigurationError if the experts cannot be divided evenly.

    num_redundant: slots beyond one per expert
    """
    if num_redundant and (
        (num_experts + num_redundant) % layout.ep_size
        or num_experts + num_redundant > num_experts * layout.ep_size
    ):
        legal = range(-num_experts % layout.ep_size, num_experts * (layout.ep_size - 1) + 1)
        raise ConfigurationError(
            f"{num_redundant} redundant experts in addition to the model's {num_experts} cannot be"
            f" divided among {layout.ep_size} ranks without placing an expert twice on one rank. "
            "Possible values of additional_config key 'eplb_config.num_redundant_experts', or of "
            f"an expert map: {_described(legal[:: layout.ep_size])}."
        )
    if not num_redundant and num_experts % layout.ep_size:
        raise ConfigurationError(
            f"The model's {num_experts} experts do not divide among {layout.ep_size} ranks "
            f"({layout.world_size} ranks, {layout.etp_size} per expert). Change "
            "--tensor-parallel-size or --data-parallel-size, or set additional_config key "
            "'expert_tensor_parallel_size' so that ranks / size divides the experts."
        )


def _described(legal: range) -> str:
    if len(legal) <= 8:
        return ", ".join(map(str, legal))
    return f"{', '.join(map(str, legal[:3]))} and so on to {legal[-1]}"


def check_intermediate_size(layer_name: str, size: int, layout: ExpertLayout) -> None:
    """Raises ConfigurationError if experts of that size cannot be cut into equal parts.

    layer_name: of the experts, for the message
    """
    if size % layout.etp_size:
        legal = [
            count
            for count in range(1, layout.world_size + 1)
            if layout.world_size % count == 0 and size % count == 0
        ]
        raise ConfigurationError(
            f"{layer_name}: experts of intermediate size {size} do not divide among "
            f"{layout.etp_size} ranks. Of {layout.world_size} ranks, {', '.join(map(str, legal))} "
            "can share an expert: set additional_config key 'expert_tensor_parallel_size', which "
            "defaults to --tensor-parallel-size, or start with --enable-expert-parallel for whole"
            " experts."
        )
