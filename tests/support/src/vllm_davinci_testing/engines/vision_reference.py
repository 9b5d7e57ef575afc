"""transformers' results for requests with images and videos, on the CPU in fp32."""

from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines.rounding import first_wrong_token

MAX_TOKENS = 12

Request = dict[str, Any]
AUTO_CLASS = transformers.AutoModelForImageTextToText


class Reference:
    """transformers' results on the CPU in fp32."""

    def __init__(
        self, checkpoint: Path, needs_metadata: bool, network: torch.nn.Module | None = None
    ) -> None:
        self.network: Any = (
            network
            or AUTO_CLASS.from_pretrained(
                checkpoint, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        )
        self.processor = transformers.AutoProcessor.from_pretrained(checkpoint)
        self._needs_metadata = needs_metadata

    def _inputs(self, request: Request) -> dict[str, torch.Tensor]:
        data = request.get("multi_modal_data", {})
        videos: dict[str, Any] = {}
        if "video" in data:
            videos = {"videos": [frames for frames, _ in data["video"]], "do_sample_frames": False}
            if self._needs_metadata:
                told = [dict(metadata) for _, metadata in data["video"]]
                for each in told:
                    del each["do_sample_frames"]
                videos["video_metadata"] = told
        inputs = self.processor(
            text=[request["prompt"]], images=data.get("image"), return_tensors="pt", **videos
        )
        return {name: value for name, value in inputs.items() if name != "video_metadata"}

    @torch.inference_mode()
    def logits(self, request: Request, tokens: list[int]) -> torch.Tensor:
        """Returns [tokens, vocabulary]: the logits that choose each token."""
        inputs = self._inputs(request)
        prompt = inputs["input_ids"].shape[1]
        following = torch.tensor([tokens])
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            if name not in inputs:  # for families that mark positions only by tokens
                continue
            added = {"input_ids": following, "attention_mask": following * 0 + 1}
            inputs[name] = torch.cat([inputs[name], added.get(name, following * 0)], dim=1)
        logits: torch.Tensor = self.network(**inputs).logits[0, prompt - 1 : -1]
        return logits

    def assert_chosen(self, request: Request, answer: tuple[list[int], list[int]]) -> None:
        """Checks the prompt's placeholders for images and videos, and the greedy tokens."""
        prompt, tokens = answer
        assert prompt == self._inputs(request)["input_ids"][0].tolist()
        assert len(tokens) == MAX_TOKENS
        wrong = first_wrong_token(self.network, lambda: self.logits(request, tokens), tokens)
        assert wrong is None, wrong

    def gaps(self, request: Request, tokens: list[int]) -> torch.Tensor:
        """Returns [tokens]: each one's distance from the best logit, in standard deviations of its
        row.
        """
        rows = self.logits(request, tokens)
        chosen = rows.gather(1, torch.tensor([tokens]).T)[:, 0]
        gaps: torch.Tensor = (rows.max(dim=1).values - chosen) / rows.std(dim=1)
        return gaps

    @torch.inference_mode()
    def features(self, request: Request) -> list[torch.Tensor]:
        """Returns [tokens, hidden_size] for each image, then for each video."""
        inputs = self._inputs(request)
        found: list[torch.Tensor] = []
        if "pixel_values" in inputs:
            names = ("pixel_values", "image_grid_thw")
            given = {name: inputs[name] for name in names if name in inputs}
            found += self.network.model.get_image_features(**given).pooler_output
        if "pixel_values_videos" in inputs:
            found += self.network.model.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"]
            ).pooler_output
        return found
