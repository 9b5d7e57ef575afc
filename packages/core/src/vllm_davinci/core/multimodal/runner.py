"""The steps of vLLM's runner that encoders are part of."""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_davinci.core.multimodal.encoder_places import EncoderPlaces
from vllm_davinci.core.spec_decode.runner import SpeculatingRunner


class EncodingRunner(SpeculatingRunner):
    """vLLM's runner, which tells models where an encoder's tokens are."""

    _encoder_places: EncoderPlaces

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        self._encoder_places = EncoderPlaces(self.get_model(), self.device)

    def _execute_mm_encoder(self, scheduler_output: SchedulerOutput) -> list[torch.Tensor]:
        """vLLM's, with outputs in the order of the batch where a decoder attends to them.

        Their slots in the cache have that order. vLLM's scheduler has the one in which it chose the
        requests, which is another one where a preempted request returns beside new ones.
        """
        if self.model_config.is_encoder_decoder:
            rows = self.input_batch.req_id_to_index
            chosen = scheduler_output.scheduled_encoder_inputs
            in_order = {name: chosen[name] for name in sorted(chosen, key=rows.__getitem__)}
            scheduler_output = replace(scheduler_output, scheduled_encoder_inputs=in_order)
        outputs: list[torch.Tensor] = super()._execute_mm_encoder(scheduler_output)
        return outputs

    def _gather_mm_embeddings(
        self, scheduler_output: SchedulerOutput, shift_computed_tokens: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The encoder's outputs [tokens, hidden_size] of the step, and which of its tokens they
        are: int64 numbers on the device, or vLLM's mask [tokens]."""
        embeddings, mask = super()._gather_mm_embeddings(scheduler_output, shift_computed_tokens)
        return embeddings, self._encoder_places.of_step(embeddings, mask)
