"""Qwen2, Qwen3 and Qwen3-MoE whose tokens are divided among ranks between attention and MLP.

Routers choose experts of gathered rows on every rank, with the bits of whole steps.
"""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_davinci.models.token_division import DividesTokens


class NPUQwen2ForCausalLM(DividesTokens, Qwen2ForCausalLM):
    """Qwen2 and 2.5."""


class NPUQwen3ForCausalLM(DividesTokens, Qwen3ForCausalLM):
    """Qwen3: norms of queries and keys are attention's own."""


class NPUQwen3MoeForCausalLM(DividesTokens, Qwen3MoeForCausalLM):
    """Qwen3 with routed experts."""
