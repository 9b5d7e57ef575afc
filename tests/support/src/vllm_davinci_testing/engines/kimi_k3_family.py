"""Kimi-K3's images: requests, and the results of its equations in plain torch."""

from pathlib import Path

import torch

from vllm_davinci_testing.engines.kimi_k3_checkpoint import KimiK3Reference, write_kimi_k3
from vllm_davinci_testing.engines.kimi_k3_tower import PLACEHOLDER
from vllm_davinci_testing.engines.multimodal_family import MultimodalFamily, Request
from vllm_davinci_testing.engines.multimodal_reference import MultimodalReference


class KimiK3ImageReference(MultimodalReference):
    """Like its base, with the equations instead of transformers."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self._equations = KimiK3Reference(checkpoint, dtype)
        self.network = self._equations.network

    def inputs(self, request: Request) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([self._equations.prompt_of(request)])}

    def logits(self, request: Request, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        ours = self._equations.prompt_of(request)
        if ours != prompt:
            raise ValueError(f"prompts differ: {prompt} here, {ours} by the equations")
        images = request.get("multi_modal_data", {}).get("image", [])
        rows = self._equations.logits([*prompt, *tokens], images)
        return rows[len(prompt) - 1 : -1]


KIMI_K3 = MultimodalFamily(
    write_kimi_k3,
    place=PLACEHOLDER,
    reference=KimiK3ImageReference,
    changed="its equations in plain torch instead of transformers",
)
