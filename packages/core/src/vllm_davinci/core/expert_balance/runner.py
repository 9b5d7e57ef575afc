"""The steps of vLLM's runner that balanced experts are part of."""

from typing import Any

from vllm.distributed.eplb.eplb_state import EplbState

from vllm_davinci.core.expert_balance.state import NPUEplbState
from vllm_davinci.core.spec_decode.runner import SpeculatingRunner


class BalancingRunner(SpeculatingRunner):
    """vLLM's runner, whose layers count loads and follow experts that move."""

    # Created anew by vLLM under this name.
    eplb_state: EplbState | None

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        if self.eplb_state is not None:
            state = NPUEplbState.taking_over(self.eplb_state, self.vllm_config)
            self.eplb_state = state
            state.start_async_loop()
