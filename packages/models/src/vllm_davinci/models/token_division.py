"""Steps whose tokens are divided among tensor-parallel ranks between attention and MLP."""

from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.config.options import get_config
from vllm_davinci.core.config.sequence_parallel import shares_obstacle
from vllm_davinci.core.distributed.exchange import exchange
from vllm_davinci.core.log import init_logger
from vllm_davinci.models.decoder_layer import Divided, NPUDecoderLayer
from vllm_davinci.models.token_shares import TokenShares

logger = init_logger(__name__)


class DividesTokens(nn.Module):
    """Mix-in ahead of one of vLLM's causal language models: large steps are divided.

    All other steps, and all of an engine that cannot divide, are vLLM's own forward.
    """

    model: Any
    layer_type: type[NPUDecoderLayer] = NPUDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        division = get_config(vllm_config).sequence_parallel
        layers = self.model.layers
        present = [i for i, each in enumerate(layers) if not isinstance(each, PPMissingLayer)]
        self.divides_tokens = (
            division.enabled
            and shares_obstacle(vllm_config) is None
            and all(self.layer_type.fits(layers[index]) for index in present)
        )
        self.min_tokens_to_divide = division.min_tokens
        if not self.divides_tokens:
            return
        logger.info_once(
            "Steps of %d tokens or more are divided among %d tensor-parallel ranks between "
            "attention and MLP.",
            division.min_tokens,
            vllm_config.parallel_config.tensor_parallel_size,
        )
        for index in present:
            layers[index] = self.layer_type(layers[index])

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """All rows in, all rows out, on every rank, as vLLM's model does.

        positions: [num_tokens] or [3, num_tokens], int64
        """
        is_divided = self.divides_tokens and positions.shape[-1] >= self.min_tokens_to_divide
        # Hidden states between layers, which some draft models read, are there in whole steps only.
        if not is_divided or getattr(self.model, "aux_hidden_state_layers", None):
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        residual: torch.Tensor | None = None
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            hidden_states = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        elif inputs_embeds is not None:
            hidden_states = inputs_embeds
        else:
            hidden_states = self.model.embed_input_ids(input_ids)
        return self._forward_divided(positions, hidden_states, residual)

    def _forward_divided(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor | IntermediateTensors:
        model = self.model
        shares = TokenShares.of_step(positions.shape[-1])
        divided = Divided(shares.take(hidden_states))
        residual = None if residual is None else shares.take(residual)
        for layer in islice(model.layers, model.start_layer, model.end_layer):
            divided, residual = layer.forward_divided(positions, divided, residual, shares)

        if get_pp_group().is_last_rank:
            return exchange(lambda: shares.gather(model.norm(divided.settle(shares), residual)[0]))
        assert residual is not None
        gathered, gathered_residual = exchange(
            lambda: (shares.gather(divided.settle(shares)), shares.gather(residual))
        )
        return IntermediateTensors({"hidden_states": gathered, "residual": gathered_residual})
