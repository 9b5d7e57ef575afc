"""Llama and Mistral, sequence parallel between attention and MLP."""

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM

from vllm_davinci.models.sequence_parallel import SequenceParallel


class NPULlamaForCausalLM(SequenceParallel, LlamaForCausalLM):
    """Llama 2 and 3, and models of the same shape."""


class NPUMistralForCausalLM(SequenceParallel, MistralForCausalLM):
    """Mistral; a layer with a time condition (ada_rms_norm_t_cond) stays vLLM's."""
