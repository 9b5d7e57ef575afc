"""The steps of vLLM's runner that a checkpoint's weights are part of."""

from typing import Any

from vllm_davinci.core.attention.mla.weight_prefetch import plan_prefetches
from vllm_davinci.core.checkpoint.load_errors import check_loaded, explained
from vllm_davinci.core.config.weight_updates import refuse_new_weights
from vllm_davinci.core.kv_cache.runner import CachingRunner
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan, resolved_plan
from vllm_davinci.core.quantization.rotation import refuse_heads_of_rotated_models


class LoadingRunner(CachingRunner):
    """vLLM's runner, which checks what it loads, and plans a quantized model's outputs."""

    # Created anew by vLLM under this name.
    model: Any
    _output_plan: OutputPlan | None = None  # of a quantized model

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        quantization = self.vllm_config.quant_config
        if self.speculative_config is not None:
            refuse_heads_of_rotated_models(self.speculative_config.method, quantization)
        with explained(self.model_config.model, quantization):
            super().load_model(load_dummy_weights, **options)
        check_loaded(self.get_model(), quantization, self.load_config.load_format)
        plan_prefetches(self.vllm_config)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; what follows from the weights follows in the same memory."""
        refuse_new_weights(self.vllm_config)
        super().reload_weights(*args, **kwargs)

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's, of a model whose operators have their output kinds already."""
        self._output_plan = resolved_plan(self.vllm_config, self.get_model(), self._dummy_run)
        super().profile_run(*args, **kwargs)

    def _check_outputs_with_attention(self) -> None:
        if self._output_plan is not None:
            longest = self.max_model_len - 1  # a dummy prefill has one token of context
            self._output_plan.check_with_attention(self.vllm_config, longest, self._dummy_run)
