"""vLLM's expert balancing state, connected to our layers' counters and tables."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.eplb.eplb_state import EplbModelState, EplbState
from vllm.distributed.eplb.rebalance_execute import AsyncEplbLayerResult
from vllm.distributed.parallel_state import get_ep_group, get_tp_group

from vllm_davinci.core.components.worker_metrics import MetricsFile
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.forward import FusedMoEForward
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.load_record import LoadCounter
from vllm_davinci.core.fused_moe.replicas import ReplicaTable
from vllm_davinci.core.log import init_logger

# Imbalance of a step's tokens over ranks.


class Imbalance(NamedTuple):
    """Largest load of a rank over the mean load, averaged over layers; 1 is even.

    before: with the map that was active while counting; after: with the newest map, same loads
    """

    before: float
    after: float


def imbalance(loads: torch.Tensor, placed: torch.Tensor, ep_size: int) -> float:
    """Computes one value of Imbalance; replicas of an expert share its tokens evenly."""
    replicas = torch.zeros_like(loads, dtype=torch.float64)
    replicas.scatter_add_(1, placed, torch.ones_like(placed, dtype=torch.float64))
    of_slot = (loads / replicas.clamp_min(1)).gather(1, placed)
    of_rank = of_slot.view(len(loads), ep_size, -1).sum(-1)
    mean = of_rank.mean(1)
    counted = mean > 0
    if not counted.any():
        return 1.0
    return float((of_rank.max(1).values[counted] / mean[counted]).mean())


# Not "vllm:...": vLLM unregisters metrics with its name when an engine starts.
IMBALANCE = "davinci:expert_imbalance"
IMBALANCE_HELP = (
    "Largest load of a rank over the mean, before and after the newest decision, same tokens."
)
MOVES = "davinci:expert_moves"
MOVES_HELP = "Expert slots that got another expert."


class BalanceWriter:
    """A worker's writer. Does nothing while no server reads."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._gauges = MetricsFile(vllm_config, "gauge_mostrecent_eplb")
        self._counters = MetricsFile(vllm_config, "counter_eplb")

    def __call__(self, imbalance: Imbalance, num_moved: int) -> None:
        """Writes the newest values. num_moved: since the start"""
        if self._gauges.is_read():
            for when, value in imbalance._asdict().items():
                self._gauges.write(IMBALANCE, IMBALANCE, {"when": when}, value, IMBALANCE_HELP)
        if self._counters.is_read():
            self._counters.write(MOVES, f"{MOVES}_total", {}, num_moved, MOVES_HELP)


logger = init_logger(__name__)


class NPUEplbState(EplbState):
    """vLLM's state: stores loads, decides and moves weights. Layers count loads and look up experts
    in tensors of this plugin.

    Loads are counted on the device; only deciding steps wait for them.
    """

    _tables: list[ReplicaTable]  # per expert layer, in order
    _weights: torch.Tensor  # see LoadCounter
    _num_counted = 0  # tokens of the newest step whose experts are counted
    _shown: torch.Tensor  # [num_layers, num_physical_experts], on the host: contents of the tables
    _before: torch.Tensor | None = None  # the same, before the decision that is being applied
    _moved: list[AsyncEplbLayerResult]  # results applied in the newest step
    num_decisions = 0
    num_moved = 0  # slots that got another expert
    imbalance: Imbalance | None = None  # imbalance of the newest decision

    @classmethod
    def taking_over(cls, state: EplbState, vllm_config: VllmConfig) -> "NPUEplbState":
        """Takes over the state that vLLM made at start, and connects the model's layers to it.

        Raises UnsupportedFeatureError for a model that vLLM cannot balance.
        """
        taken = cls(state.parallel_config, state.device)
        taken.__dict__.update(state.__dict__)
        name = vllm_config.model_config.model
        if not taken.model_states:
            raise UnsupportedFeatureError(
                f"additional_config key 'eplb_config.dynamic_eplb' cannot be used with {name!r}: "
                "vLLM's definition does not say which of its layers have experts. Remove the key."
            )
        (model_state,) = taken.model_states.values()
        taken._bind(model_state, vllm_config)
        taken.is_async = get_config(vllm_config).eplb_config.use_async
        taken.device_index = model_state.device_index = torch.accelerator.current_device_index()
        return taken

    def _bind(self, model_state: EplbModelState, vllm_config: VllmConfig) -> None:
        experts = [_routed_experts(layer) for layer in model_state.model.moe_layers]
        forwards = [_forward(each) for each in experts]
        scheduler = vllm_config.scheduler_config
        tp_group = get_tp_group()
        # Slices of TP ranks may be padded beyond the last token.
        most = scheduler.max_num_batched_tokens + tp_group.world_size
        self._weights = torch.zeros(
            most, forwards[0].rule.top_k, dtype=torch.int32, device=self.device
        )
        self._tables = []
        for index, (each, forward) in enumerate(zip(experts, forwards, strict=True)):
            assert forward.physical_experts is not None
            self._tables.append(forward.physical_experts)
            forward.load.counter = LoadCounter(
                model_state.expert_load_pass[index],
                self._weights,
                tp_group.rank_in_group,
                each.moe_config.is_sequence_parallel,
            )
        placed = torch.tensor([each.expert_map_manager.physical_to_logical() for each in experts])
        self.update_mapping(vllm_config.model_config, placed.to(self.device))
        self._shown = placed
        self._write = BalanceWriter(vllm_config)

    def prepare_forward(
        self,
        model_config: ModelConfig,
        num_unpadded_tokens: int,
        ubatch_slices: Sequence[Any] | None = None,
    ) -> None:
        """Sets which tokens of the next forward are counted; launches nothing if unchanged."""
        log_stats = self.parallel_config.eplb_config.log_balancedness
        count = num_unpadded_tokens if self._should_record_current_step(log_stats) else 0
        if count > self._num_counted:
            self._weights[self._num_counted : count].fill_(1)
        elif count < self._num_counted:
            self._weights[count : self._num_counted].zero_()
        self._num_counted = count

    def step(
        self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False
    ) -> None:
        """vLLM's step after each forward; HCCL's buffers exist and are in the memory plan."""
        if is_profile:
            return
        (model_state,) = self.model_states.values()
        loads, self._moved = model_state.last_expert_load, []
        super().step(is_dummy, is_profile, log_stats)
        for moved in self._moved:
            self._follow(moved.layer_idx, moved.new_physical_to_logical_map)
        if model_state.last_expert_load is not loads:
            self._before = self._shown.clone()
            if not self.is_async:
                for layer, placed in enumerate(model_state.physical_to_logical_map.cpu()):
                    self._follow(layer, placed)
        if self._before is not None and not model_state.rebalanced:
            self._tell(model_state.last_expert_load.cpu(), self._before)
            self._before = None

    def _all_ranks_result_ready(self, model_state: EplbModelState) -> bool:
        """vLLM's check, which moves this rank's result at once if it returns True.

        Reads the result before returning, because the sending thread may then set the next one.
        """
        is_ready = super()._all_ranks_result_ready(model_state)
        result = model_state.pending_result
        if is_ready and result is not None:
            self._moved.append(result)
        return is_ready

    def _follow(self, layer: int, placed: torch.Tensor) -> None:
        """Updates a layer's table after its weights have arrived."""
        self._shown[layer] = placed
        self._tables[layer].place(placed.tolist())

    def _tell(self, loads: torch.Tensor, before: torch.Tensor) -> None:
        """Logs a decision that has been applied. loads: see `imbalance`"""
        group = get_ep_group()
        moved = int((before != self._shown).sum())
        self.num_decisions += 1
        self.num_moved += moved
        self.imbalance = Imbalance(
            imbalance(loads, before, group.world_size),
            imbalance(loads, self._shown, group.world_size),
        )
        if group.rank_in_group == 0:
            self._write(self.imbalance, self.num_moved)
            logger.info(
                "Experts are balanced: the largest load of a rank over the mean was %.3f, and is "
                "%.3f with the same tokens; %d of %d slots got another expert.",
                *self.imbalance,
                moved,
                before.numel(),
            )


def _routed_experts(layer: Any) -> NPURoutedExperts:
    experts = layer.routed_experts
    assert isinstance(experts, NPURoutedExperts)
    return experts


def _forward(experts: NPURoutedExperts) -> FusedMoEForward:
    forward = getattr(experts.quant_method, "moe_forward", None)
    assert isinstance(forward, FusedMoEForward)
    return forward
