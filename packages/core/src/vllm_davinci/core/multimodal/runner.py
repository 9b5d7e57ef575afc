"""vLLM's runner, which puts an encoder's output among a step's embeddings without waiting."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class MultimodalRunner(GPUModelRunner):
    """Tells models by number, not by a mask, which tokens of a step are an encoder's.

    vLLM gives a mask of the host. Indexing a tensor of the device with one finds the numbers on the
    host too, and then waits for their copy, three times for each tensor that is written.
    """

    _takes_places = False  # until a model is loaded that does

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        self._takes_places = takes_places(self.get_model())

    def _gather_mm_embeddings(
        self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The encoder's outputs [tokens, hidden_size] of the step, and which of its tokens they
        are: int64 numbers on the device, or vLLM's mask [tokens].

        Raises ValueError where the two do not have as many tokens.
        """
        embeddings, mask = super()._gather_mm_embeddings(scheduler_output, shift_computed_tokens)
        if not embeddings or not self._takes_places:
            return embeddings, mask
        return embeddings, async_tensor_h2d(places_of(embeddings, mask), self.device)


def places_of(embeddings: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Numbers of the tokens that a mask [tokens] names, int64, on the host.

    Raises ValueError where `embeddings`, [tokens, hidden_size] each, are not as many.
    """
    places = mask.nonzero().squeeze(1)
    if (num_embeddings := sum(map(len, embeddings))) != len(places):
        raise ValueError(
            f"the encoder's outputs of this step have {num_embeddings} tokens, and the prompts "
            f"have places for {len(places)}: the model's processor and its encoder do not agree on "
            "the size of an image or video"
        )
    return places


def takes_places(model: torch.nn.Module) -> bool:
    """Whether a model only indexes with what says which tokens are an encoder's.

    vLLM's common definition of `embed_input_ids` does, unless tokens of images are beyond the
    vocabulary. A model with another says so: `indexes_multimodal_tokens`.
    """
    if not isinstance(model, SupportsMultiModal) or model._has_oov_mm_tokens:
        return False
    is_common = type(model).embed_input_ids is SupportsMultiModal.embed_input_ids
    return is_common or getattr(model, "indexes_multimodal_tokens", False)
