"""Finds a step's encoder tokens without waiting for the device."""

from collections.abc import Sequence

import torch
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.utils.torch_utils import async_tensor_h2d


class EncoderPlaces:
    """Passes a model indices instead of a mask of a step's encoder tokens.

    vLLM passes a mask on the host. Indexing a device tensor with it computes the indices on the
    host and waits for their copy, three times per written tensor.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._takes_places = takes_places(model)
        self._device = device

    def of_step(self, embeddings: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Indices, in the step, of an encoder's outputs, [tokens, hidden_size] each.

        mask: [tokens], True for an encoder's token; returned as it is if the model needs it
        Returns int64 indices on the device. Raises ValueError if the numbers of tokens differ.
        """
        if not embeddings or not self._takes_places:
            return mask
        return async_tensor_h2d(places_of(embeddings, mask), self._device)


def places_of(embeddings: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Indices of the tokens in a mask [tokens], int64, on the host.

    Raises ValueError if `embeddings`, [tokens, hidden_size] each, have another number of tokens.
    """
    places = mask.nonzero().squeeze(1)
    if (num_embeddings := sum(map(len, embeddings))) != len(places):
        raise ValueError(
            f"the encoder's outputs of this step have {num_embeddings} tokens, and the prompts "
            f"have {len(places)} placeholders: the model's processor and its encoder disagree on "
            "the size of an image or video"
        )
    return places


def takes_places(model: torch.nn.Module) -> bool:
    """True if a model uses the mask of encoder tokens only for indexing.

    vLLM's common definition of `embed_input_ids` does so, unless image tokens are beyond the
    vocabulary. A model with another definition declares it: `indexes_multimodal_tokens`.
    """
    if not isinstance(model, SupportsMultiModal) or model._has_oov_mm_tokens:
        return False
    is_common = type(model).embed_input_ids is SupportsMultiModal.embed_input_ids
    return is_common or getattr(model, "indexes_multimodal_tokens", False)
