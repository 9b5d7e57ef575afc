"""Chooses the chunk size of routed experts: measures their memory before memory is planned."""

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

# One chunk's rows may use a third of the memory left by the weights; less, if the rest is too small
# for other tensors of the step and the KV cache of one request.
PARTS_OF_MEMORY = (3, 6, 12)
# Smaller chunks would read the experts' weights too often to be worth the memory that they free.
FEWEST_TOKENS = 1024
# Copies of a row that ranks exchange: sent, received, sorted by expert, and returned.
COPIES_IN_EXCHANGE = 4
# Tokens of the measuring run.
MEASURED_TOKENS = 256


def plan_pieces(
    model: torch.nn.Module,
    available_bytes: int,
    asked: int | None,
    most_tokens: int,
    parts: int = PARTS_OF_MEMORY[0],
) -> bool:
    """Sets the chunk size of all routed experts. Every rank calls it, with loaded weights.

    available_bytes: device memory that the engine may use in addition to this rank's weights
    asked:           tokens per chunk, set by the user; None: as memory allows
    most_tokens:     of a step
    parts:           a chunk may use the memory divided by this number
    Ranks that send rows need the same number of exchanges, so all ranks get the same size.
    Returns True if smaller chunks are possible.
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
                "Routed experts run in chunks of at most %d tokens: a step of %d tokens in %d "
                "chunks.",
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
    """Most device memory that the rows of one token use while its experts compute."""
    config = layer.moe_config
    # The difference leaves out memory of operators that does not depend on the number of rows.
    fewer, more = (_bytes_of_rows(layer, forward, count * MEASURED_TOKENS) for count in (1, 2))
    taken = -(-(more - fewer) // MEASURED_TOKENS)
    if forward.dispatchers is not None:
        row = config.in_dtype.itemsize * config.hidden_dim
        taken += COPIES_IN_EXCHANGE * forward.rule.top_k * row
    return max(1, taken)


def _bytes_of_rows(layer: NPURoutedExperts, forward: FusedMoEForward, num_tokens: int) -> int:
    """Upper limit of memory for the rows of `num_tokens` tokens and their intermediate results."""
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
