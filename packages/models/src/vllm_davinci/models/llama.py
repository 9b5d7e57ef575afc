"""Llama and Mistral whose tokens are divided among ranks between attention and MLP."""

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM

from vllm_davinci.models.token_division import DividesTokens


class NPULlamaForCausalLM(DividesTokens, LlamaForCausalLM):
    """Llama 2 and 3, and what has its shape."""


class NPUMistralForCausalLM(DividesTokens, MistralForCausalLM):
    """Mistral; a layer with a time condition (ada_rms_norm_t_cond) stays vLLM's."""
