"""Expert balancing in vLLM's runner."""

from typing import Any

from vllm.config import ModelConfig
from vllm.v1.worker.gpu.eplb_utils import EPLBController

from vllm_davinci.core.expert_balance.state import NPUEplbState


def balance(runner: Any) -> None:
    """Makes the layers of a runner's model count loads and follow moved experts, if enabled.

    runner: vLLM's, with its model loaded
    """
    if runner.eplb_state is not None:
        state = NPUEplbState.taking_over(runner.eplb_state, runner.vllm_config)
        runner.eplb_state = state
        state.start_async_loop()


class NPUEPLBController(EPLBController):
    """vLLM's expert balancing in the V2 runner. Steps that vLLM suppresses count no loads."""

    def prepare_forward(
        self,
        model_config: ModelConfig,
        num_unpadded_tokens: int,
        ubatch_slices: list[Any] | None = None,
    ) -> None:
        count = 0 if self.suppressed else num_unpadded_tokens
        super().prepare_forward(model_config, count, ubatch_slices)
