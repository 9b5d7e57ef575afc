"""A user's logits processor for vLLM's V2 runner."""

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

ARGUMENT = "only_token"


class OnlyToken(LogitsProcessor):
    """Forces a request to generate only the token in its argument ARGUMENT."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config, req_states)
        self.tokens = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.int32)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        token = (sampling_params.extra_args or {}).get(ARGUMENT, 0)
        if not isinstance(token, int) or token < 0:
            raise ValueError(f"{ARGUMENT} = {token!r} is no token")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        token = (sampling_params.extra_args or {}).get(ARGUMENT, -1)
        self.tokens.np[req_idx] = token
        return bool(token >= 0)

    def apply_staged_writes(self) -> None:
        self.tokens.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        chosen = self.tokens.gpu.index_select(0, ctx.expanded_idx_mapping).unsqueeze(1)
        numbers = torch.arange(logits.shape[1], device=logits.device, dtype=chosen.dtype)
        return logits.masked_fill_((chosen >= 0) & (numbers != chosen), -torch.inf)
