"""Updates of a worker's weights as trainers make them; a base of the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from vllm_davinci.core.attention.mla.layer import NPUMLAAttention

BUCKET_TENSORS = 7


class UpdatingWorker:
    model_runner: Any

    def reload_from(self, checkpoint: str) -> None:
        """As vLLM reloads, layer by layer."""
        self.model_runner.reload_weights(weights_path=checkpoint)

    def load_buckets(self, checkpoint: str) -> None:
        """As verl does: some tensors at a time, through the model's own loader."""
        model = self.model_runner.get_model()
        files = sorted(Path(checkpoint).glob("*.safetensors"))
        tensors = [named for file in files for named in load_file(file).items()]
        for first in range(0, len(tensors), BUCKET_TENSORS):
            model.load_weights(iter(tensors[first : first + BUCKET_TENSORS]))

    def addresses(self) -> dict[str, int]:
        """Where parameters and what follows from them live."""
        model = self.model_runner.get_model()
        found = {name: each.data_ptr() for name, each in model.named_parameters()}
        for name, layer in model.named_modules():
            if isinstance(layer, NPUMLAAttention):
                found |= {
                    f"{name}.{w}": getattr(layer.impl, w).data_ptr() for w in ("W_UK", "W_UV")
                }
            method = getattr(layer, "quant_method", None)
            if (view := getattr(method, "_weight_t", None)) is not None:
                found[f"{name}.transposed"] = view.data_ptr()
        return found
