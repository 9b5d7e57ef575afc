"""Qwen2, Qwen3 and Qwen3-MoE, sequence parallel between attention and MLP.

Routers choose experts for gathered rows on every rank, bit-identical with whole steps.
"""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_davinci.models.sequence_parallel import SequenceParallel


class NPUQwen2ForCausalLM(SequenceParallel, Qwen2ForCausalLM):
    """Qwen2 and 2.5."""


class NPUQwen3ForCausalLM(SequenceParallel, Qwen3ForCausalLM):
    """Qwen3: attention includes the norms of queries and keys."""


class NPUQwen3MoeForCausalLM(SequenceParallel, Qwen3MoeForCausalLM):
    """Qwen3 with routed experts."""
