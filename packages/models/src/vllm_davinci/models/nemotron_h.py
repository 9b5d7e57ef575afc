"""Nemotron-H with experts without gates, which vLLM supports only on other vendors' devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

from vllm_davinci.core.fused_moe.layer import GATED_IN_NAME


class NPUNemotronHForCausalLM(NemotronHForCausalLM):
    """vLLM's model. Its experts' activation is renamed until `NPURoutedExperts` replaces it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with _named(vllm_config.model_config.hf_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


@contextmanager
def _named(config: Any) -> Iterator[None]:
    """Renames the experts' activation to one that vLLM's description of experts accepts.

    Only experts read this field: other layers hold the function itself.
    """
    activation = config.mlp_hidden_act
    config.mlp_hidden_act = GATED_IN_NAME.get(activation, activation)
    try:
        yield
    finally:
        config.mlp_hidden_act = activation
