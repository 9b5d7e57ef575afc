"""Sequence parallelism: large steps are sharded by tokens between attention and MLP."""

from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.distributed.beside_ubatches import run_beside_ubatches
from vllm_davinci.core.log import init_logger
from vllm_davinci.models.decoder_layer import NPUDecoderLayer, ShardedStates
from vllm_davinci.models.token_shards import TokenShards

logger = init_logger(__name__)


class SequenceParallel(nn.Module):
    """Mix-in ahead of one of vLLM's causal language models: large steps run sequence parallel.

    All other steps, and engines without sequence parallelism, run vLLM's own forward.
    """

    model: Any
    layer_type: type[NPUDecoderLayer] = NPUDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        options = get_config(vllm_config).sequence_parallel
        layers = self.model.layers
        present = [i for i, each in enumerate(layers) if not isinstance(each, PPMissingLayer)]
        self.is_sequence_parallel = options.enabled and all(
            self.layer_type.fits(layers[index]) for index in present
        )
        self.min_sequence_parallel_tokens = options.min_tokens
        if not self.is_sequence_parallel:
            return
        logger.info_once(
            "Steps of %d tokens or more run sequence parallel on %d tensor-parallel ranks between "
            "attention and MLP.",
            options.min_tokens,
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
        """Takes and returns all rows on every rank, as vLLM's model does.

        positions: [num_tokens] or [3, num_tokens], int64
        """
        is_small = positions.shape[-1] < self.min_sequence_parallel_tokens
        # Some draft models read hidden states between layers: all rows, as in vLLM's forward.
        reads_between = getattr(self.model, "aux_hidden_state_layers", None)
        if not self.is_sequence_parallel or is_small or reads_between:
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
        return self._forward_sequence_parallel(positions, hidden_states, residual)

    def _forward_sequence_parallel(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor | IntermediateTensors:
        model = self.model
        shards = TokenShards.of_step(positions.shape[-1])
        states = ShardedStates(shards.shard(hidden_states))
        residual = None if residual is None else shards.shard(residual)
        for layer in islice(model.layers, model.start_layer, model.end_layer):
            states, residual = layer.forward_sequence_parallel(positions, states, residual, shards)

        if get_pp_group().is_last_rank:
            return run_beside_ubatches(
                lambda: shards.all_gather(model.norm(states.reduced(shards), residual)[0])
            )
        assert residual is not None
        gathered, gathered_residual = run_beside_ubatches(
            lambda: (shards.all_gather(states.reduced(shards)), shards.all_gather(residual))
        )
        return IntermediateTensors({"hidden_states": gathered, "residual": gathered_residual})
