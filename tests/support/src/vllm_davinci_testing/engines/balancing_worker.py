"""A worker that reports its experts' slots and contents."""

import hashlib
from typing import Any

import torch
from vllm.distributed.parallel_state import get_ep_group

from vllm_davinci.core.expert_balance.state import NPUEplbState
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.worker import NPUWorker


class BalancingWorker(NPUWorker):
    """Named as an engine's worker class by tests."""

    def expert_digests(self) -> list[list[tuple[int, str]]]:
        """Returns, by layer, the expert in each slot of this rank and the checksum of its
        tensors.
        """
        state = self.model_runner.eplb_state
        answer = []
        for index, layer in enumerate(self._expert_layers()):
            slots = layer.local_num_experts
            first = slots * get_ep_group().rank_in_group
            experts = layer.expert_map_manager.physical_to_logical()
            if isinstance(state, NPUEplbState):
                (model_state,) = state.model_states.values()
                experts = model_state.physical_to_logical_map[index].tolist()
            tensors = [each.cpu().view(torch.uint8) for each in layer.get_expert_weights()]
            digests = [
                hashlib.sha256(b"".join(each[slot].numpy().tobytes() for each in tensors))
                for slot in range(slots)
            ]
            answer.append(
                [(experts[first + slot], digests[slot].hexdigest()) for slot in range(slots)]
            )
        return answer

    def weight_addresses(self) -> list[int]:
        """Returns the addresses of all tensors that experts' forwards read."""
        return [
            each.data_ptr()
            for layer in self._expert_layers()
            for each in layer.get_expert_weights()
        ]

    def balance(self) -> dict[str, Any]:
        """Returns the numbers of applied decisions and changed slots, and the newest imbalance."""
        state = self.model_runner.eplb_state
        assert isinstance(state, NPUEplbState)
        return {
            "decisions": state.num_decisions,
            "moved": state.num_moved,
            "imbalance": None if state.imbalance is None else tuple(state.imbalance),
        }

    def _expert_layers(self) -> list[NPURoutedExperts]:
        modules = self.model_runner.get_model().modules()
        return [each for each in modules if isinstance(each, NPURoutedExperts)]
