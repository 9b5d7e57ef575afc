"""transformers' tokens for multimodal families, compared with vLLM's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines.multimodal_family import MultimodalFamily, Request
from vllm_davinci_testing.engines.whisper_checkpoint import SAMPLING_RATE


class MultimodalReference:
    """transformers' results on the CPU in fp32.

    auto_class: name of transformers' class
    change:     adapts the network where vLLM's definition differs
    """

    def __init__(
        self,
        checkpoint: Path,
        auto_class: str = "AutoModelForImageTextToText",
        change: Callable[[Any], None] = lambda network: None,
    ) -> None:
        self.network: Any = (
            getattr(transformers, auto_class)
            .from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
        change(self.network)
        self._processor: Any = transformers.AutoProcessor.from_pretrained(checkpoint)

    def inputs(self, request: Request) -> dict[str, torch.Tensor]:
        data = request.get("multi_modal_data", {})
        if not data:
            tokens = self._processor.tokenizer(request["prompt"], return_tensors="pt")
            return {name: tokens[name] for name in ("input_ids", "attention_mask")}
        media: dict[str, Any] = {"images": [data["image"]]} if "image" in data else {}
        if "audio" in data:
            media = {"audio": [waves for waves, _ in data["audio"]], "sampling_rate": SAMPLING_RATE}
        inputs = self._processor(text=[request["prompt"]], return_tensors="pt", **media)
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in inputs.items()
            if name != "labels"
        }

    @torch.inference_mode()
    def logits(self, request: Request, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Returns [tokens, vocabulary]: logits that predict each token from all tokens before it.

        prompt: vLLM's token ids. Raises ValueError if transformers' ids differ.
        """
        inputs = self.inputs(request)
        ours = inputs["input_ids"][0].tolist()
        if not request.get("multi_modal_data"):
            inputs["input_ids"] = torch.tensor([prompt])
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        elif ours != prompt:
            raise ValueError(f"prompts differ: {prompt} here, {ours} in transformers")
        following = torch.tensor([tokens])
        added = {"input_ids": following, "attention_mask": torch.ones_like(following)}
        for name in inputs:
            if name in ("input_ids", "attention_mask") or name.endswith("token_type_ids"):
                more = added.get(name, torch.full_like(following, self._kind_of_answers(name)))
                inputs[name] = torch.cat([inputs[name], more], dim=1)
        rows: torch.Tensor = self.network(**inputs).logits[0]
        return rows[-len(tokens) - 1 : -1]

    def _kind_of_answers(self, name: str) -> int:
        """Returns the token type of answers: 1 for PaliGemma, whose prompts have 0."""
        is_prefix_lm = self.network.config.model_type == "paligemma"
        return int(is_prefix_lm and name == "token_type_ids")


def reference_of(family: MultimodalFamily, checkpoint: Path) -> MultimodalReference:
    """Makes the expected results of a family's checkpoint."""
    if family.reference is not None:
        own: MultimodalReference = family.reference(checkpoint)
        return own
    return MultimodalReference(checkpoint, family.auto_class, family.change)
