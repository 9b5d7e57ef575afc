"""How large the pieces of routed experts are: what rows take is measured, before all else is."""

from collections.abc import Iterator

import torch
import torch_npu

from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens
from vllm_davinci.core.fused_moe.forward import LOCAL, FusedMoEForward
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)

# The rows of one piece may take a third of the memory that weights leave, and less where the rest
# is not enough for the step's other tensors and for the KV cache of one request.
PARTS_OF_MEMORY = (3, 6, 12)
# Pieces of fewer tokens would read the experts' weights more often than the KV cache is worth.
FEWEST_TOKENS = 1024
# Rows that travel between ranks are there several times: as they are sent, as they arrive, in the
# order of their experts, and on their way back.
COPIES_IN_EXCHANGE = 4
# Of the run that measures.
MEASURED_TOKENS = 256


def plan_pieces(
    model: torch.nn.Module,
    available_bytes: int,
    asked: int | None,
    most_tokens: int,
    parts: int = PARTS_OF_MEMORY[0],
) -> bool:
    """Sets the pieces of all layers of routed experts. Every rank calls it, with loaded weights.

    available_bytes: device memory that the engine may use beside this rank's weights
    asked:           tokens of a piece, by the user; None: as memory allows
    most_tokens:     of a step
    parts:           of the memory, of which a piece may take one
    Pieces are the same on all ranks: where rows travel, all ranks exchange equally many.
    Returns whether smaller ones are possible.
    """
    layers = list(_layers(model))
    least_bytes = least_of_all_ranks(available_bytes)
    token_bytes: dict[tuple[int, ...], int] = {}
    for layer, forward in layers:
        weights = tuple(layer.w13_weight.shape)
        if asked is None and weights not in token_bytes:
            token_bytes[weights] = _token_bytes(layer, forward)
        fitting = asked or least_bytes // parts // token_bytes[weights]
        forward.pieces.max_tokens = asked or max(FEWEST_TOKENS, fitting)
        if (count := forward.pieces.count(most_tokens)) > 1:
            logger.info_once(
                "Routed experts take the rows of at most %d tokens at once: a step of %d tokens in "
                "%d pieces.",
                forward.pieces.max_tokens,
                most_tokens,
                count,
            )
    sizes = (of.pieces.max_tokens or 0 for _, of in layers)
    return asked is None and any(size > FEWEST_TOKENS for size in sizes)


def _layers(model: torch.nn.Module) -> Iterator[tuple[NPURoutedExperts, FusedMoEForward]]:
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if (
            isinstance(layer, NPURoutedExperts)
            and isinstance(method, NPUFusedMoEMethodBase)
            and method.moe_forward is not None
        ):
            yield layer, method.moe_forward


def _token_bytes(layer: NPURoutedExperts, forward: FusedMoEForward) -> int:
    """Device memory that one token's rows take at most while its experts compute."""
    config = layer.moe_config
    # What operators take besides, whatever the number of rows, is in both.
    fewer, more = (_bytes_of_rows(layer, forward, count * MEASURED_TOKENS) for count in (1, 2))
    taken = -(-(more - fewer) // MEASURED_TOKENS)
    if forward.dispatchers is not None:
        row = config.in_dtype.itemsize * config.hidden_dim
        taken += COPIES_IN_EXCHANGE * forward.rule.top_k * row
    return max(1, taken)


def _bytes_of_rows(layer: NPURoutedExperts, forward: FusedMoEForward, num_tokens: int) -> int:
    """Upper limit for the rows of that many tokens and what their experts make of them."""
    config, device = layer.moe_config, layer.w13_weight.device
    x = torch.zeros(num_tokens, config.hidden_dim, dtype=config.in_dtype, device=device)
    ids = torch.full(
        (num_tokens, forward.rule.top_k), forward.experts.first, dtype=torch.int32, device=device
    )
    tokens = SelectedTokens(x, torch.ones_like(ids, dtype=x.dtype), ids)
    rows = LOCAL.dispatch(tokens, forward.experts)
    before = torch.accelerator.memory_allocated(device)
    torch_npu.npu.reset_peak_memory_stats(device)
    forward.experts(rows.rows, rows.tokens_per_expert, rows.scales)
    computed = torch.accelerator.max_memory_allocated(device) - before
    return int(computed) + rows.rows.nbytes + (0 if rows.scales is None else rows.scales.nbytes)
