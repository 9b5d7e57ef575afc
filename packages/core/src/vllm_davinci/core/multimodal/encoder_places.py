"""Which of a step's tokens are an encoder's, told without waiting for the device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput


class EncoderPlaces:
    """Tells a model by number, not by a mask, which tokens of a step are an encoder's.

    vLLM gives a mask of the host. Indexing a tensor of the device with one finds the numbers on the
    host too, and then waits for their copy, three times for each tensor that is written.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._takes_places = takes_places(model)
        self._device = device

    def of_step(self, embeddings: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """The places of an encoder's outputs, [tokens, hidden_size] each, in the step.

        mask: [tokens], whether a token is an encoder's; returned where the model needs it
        Returns int64 numbers on the device. Raises ValueError where the two do not have as many
        tokens.
        """
        if not embeddings or not self._takes_places:
            return mask
        return async_tensor_h2d(places_of(embeddings, mask), self._device)


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


def in_order_of_batch(step: SchedulerOutput, rows: Mapping[str, int]) -> SchedulerOutput:
    """The step with the inputs of its encoder in the order of the batch.

    A decoder's slots for what it attends to have that order. vLLM's scheduler has the one in which
    it chose the requests, which is another where a preempted request returns beside new ones.

    rows: of requests in the batch
    """
    chosen = step.scheduled_encoder_inputs
    in_order = {name: chosen[name] for name in sorted(chosen, key=rows.__getitem__)}
    return replace(step, scheduled_encoder_inputs=in_order)
