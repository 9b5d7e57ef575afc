"""Compressed rows, and the indexer's selection, equal transformers' however steps divide tokens."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_davinci.core.attention.compressed import quantized_rows
from vllm_davinci.core.attention.compressed.compressor import Compressor
from vllm_davinci.core.attention.compressed.rope import RopeTable, inverse_frequencies
from vllm_davinci.core.attention.compressed.row_cache import (
    PAGE_ROWS,
    RowCache,
    RowCacheLayer,
    RowCacheMetadata,
    RowCacheMetadataBuilder,
    RowKind,
)
from vllm_davinci.core.attention.compressed.row_indexer import RowChoice, key_page_rows
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.vnpu import _C
from vllm_davinci_testing.engines.compressed_zoo import with_int8_keys

HIDDEN, HEAD, ROPE, Q_RANK, INDEX_HEADS, INDEX_HEAD, NUM_CHOSEN = 32, 64, 16, 24, 4, 32, 6
CONFIG = DeepseekV4Config(
    hidden_size=HIDDEN,
    head_dim=HEAD,
    qk_rope_head_dim=ROPE,
    q_lora_rank=Q_RANK,
    index_n_heads=INDEX_HEADS,
    index_head_dim=INDEX_HEAD,
    index_topk=NUM_CHOSEN,
    num_hidden_layers=1,
)
BLOCK_SIZE, NUM_BLOCKS = 128, 400
# Steps have tokens of two requests at different positions in a group, so that a group is always
# incomplete.
CUTS = {
    "whole": ([300], [137]),
    "one_by_one_at_the_end": ([259, *[1] * 9], [0, 0, 5, *[1] * 7]),
    "inside_groups": ([1, 2, 4, 5, 120, 128, 3], [0, 3, 1, 126, 1, 1, 130]),
}


class Projection(nn.Module):
    """Returns values and gates as one tensor, like vLLM's layer."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        weight = torch.cat([module.kv_proj.weight, module.gate_proj.weight])
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(x, self.weight), None


class Harness:
    """Compressors with state, and steps of two requests."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        config.cache_config.block_size = BLOCK_SIZE
        self._config, self._device = config, device
        self._generator = torch.Generator().manual_seed(1)
        with torch.device(device):
            self.rope = RopeTable(inverse_frequencies(160000.0, ROPE, None), 512)
        self._layers: list[RowCacheLayer] = []
        self._tables: dict[str, torch.Tensor] = {}

    def compressor(
        self,
        module: Any,
        ratio: int,
        size: int,
        name: str,
        page_rows: int | None = 1,
        quantizes: bool = False,
    ) -> Compressor:
        ours = Compressor(
            ratio,
            size,
            projection=Projection(module),
            norm=module.kv_norm,
            rope=self.rope,
            dtype=torch.float32,
            prefix=name,
            page_rows=page_rows,
            quantizes=quantizes,
        )
        ours.ape.data.copy_(module.position_bias)
        ours = ours.to(self._device)
        for layer in ours.modules():
            if isinstance(layer, RowCacheLayer):
                self._give_memory(layer)
        return ours

    def _give_memory(self, layer: RowCacheLayer) -> None:
        """Makes pages that lie between another layer's rows, in blocks of random order."""
        spec: Any = layer.get_kv_cache_spec(self._config)
        page, row = spec.page_size_bytes, layer.kind.row_bytes * (layer.kind.page_rows or 1)
        block = 3 * row + page
        # All bits set are a NaN, which reveals reads of unwritten memory.
        memory = torch.full((NUM_BLOCKS * block,), -1, dtype=torch.int8, device=self._device)
        layer.bind_kv_cache(RowCache.in_memory(memory, layer.kind, 2 * row, block))
        self._layers.append(layer)
        width = -(-512 // spec.block_size)
        order = 1 + torch.randperm(NUM_BLOCKS - 1, generator=self._generator)[: 2 * width]
        # A padding request has null blocks.
        table = nn.functional.pad(order.to(torch.int32).view(2, width), (0, 0, 0, 1))
        self._tables[layer.prefix] = table.to(self._device)

    def step(
        self, lengths: Sequence[int], ends: Sequence[int], in_graph: bool = False
    ) -> tuple[StepTokens, Any]:
        """Returns the step and the context from which layers read its metadata.

        in_graph: adds a padding request at a position that completes groups
        """
        starts = [0, lengths[0], sum(lengths)]
        slots = torch.tensor([0, 0, -1], device=self._device)
        metadata = {
            layer.prefix: RowCacheMetadata(self._tables[layer.prefix], starts, list(ends), slots)
            for layer in self._layers
        }
        if in_graph:
            positions = torch.tensor([*(end - 1 for end in ends), 127], device=self._device)
            step = StepTokens.of_graph(positions, slots, 3)
        else:
            step = StepTokens.of_lengths(starts, list(ends), self._device)
        return step, set_forward_context(metadata, self._config)


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        parameter.data.normal_(generator=generator)
        if "norm" in name:
            parameter.data.mul_(0.1).add_(1)


def inputs_of(lengths: Sequence[int], width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, width, generator=generator) for length in lengths]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("ratio", [4, 128])
@torch.inference_mode()
def test_rows_equal_those_of_transformers(ratio, cuts, vllm_config, device):
    """Steps of one token per request are run as in a graph."""
    name = "DeepseekV4CSACompressor" if ratio == 4 else "DeepseekV4HCACompressor"
    module = getattr(theirs, name)(CONFIG)
    fill(module)
    totals = [sum(cut) for cut in cuts]
    x, q = inputs_of(totals, HIDDEN, 1), inputs_of(totals, Q_RANK, 2)
    expected = [
        module(each, q_of, torch.arange(each.shape[1])[None], None, 0)[0][0, 0]
        for each, q_of in zip(x, q, strict=True)
    ]
    harness = Harness(vllm_config, device)
    ours = harness.compressor(module, ratio, HEAD, f"rows{ratio}")
    ends = [0, 0]
    for lengths in zip(*cuts, strict=False):
        new = [each[0, end : end + n] for each, end, n in zip(x, ends, lengths, strict=True)]
        ends = [end + n for end, n in zip(ends, lengths, strict=True)]
        in_graph = lengths == (1, 1)
        step, context = harness.step(lengths, ends, in_graph)
        with context:
            padding = [torch.full((1, HIDDEN), torch.nan)] * in_graph
            ours.write_rows(torch.cat([*new, *padding]).to(device), step)
    for request, rows in enumerate(expected):
        places = torch.arange(totals[request] // ratio, device=device)
        assert len(places) == len(rows)
        step, context = harness.step([1, 1], ends)
        with context:
            numbers = ours.cache.numbers(places, torch.full_like(places, request))
        torch.testing.assert_close(
            ours.cache.rows[numbers].cpu(), rows, atol=2e-5, rtol=2e-5, msg=f"request {request}"
        )


@pytest.mark.parametrize("quantizes", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize("lengths", [(1, 3), (4, 5), (23, 24), (100, 259)], ids=str)
@torch.inference_mode()
def test_selected_rows_equal_transformers(lengths, quantizes, vllm_config, device, monkeypatch):
    """Some queries see fewer rows than the indexer may select, some none."""
    monkeypatch.setattr(quantized_rows, "ELEMENTS", 2 * 144 * INDEX_HEAD)  # two requests in a step
    module = theirs.DeepseekV4Indexer(CONFIG)
    fill(module)
    if quantizes:
        with_int8_keys(module)
    x, q_c = inputs_of(lengths, HIDDEN, 1), inputs_of(lengths, Q_RANK, 2)
    expected = [
        module(each, q_of, torch.arange(each.shape[1])[None], None, 0)[0]
        for each, q_of in zip(x, q_c, strict=True)
    ]
    harness = Harness(vllm_config, device)
    keys = harness.compressor(module, 4, INDEX_HEAD, "keys", PAGE_ROWS, quantizes)
    step, context = harness.step(lengths, lengths)
    with context:
        keys.write_rows(torch.cat(x, 1)[0].to(device), step)
        query = module.q_b_proj(torch.cat(q_c, 1)[0]).view(-1, INDEX_HEADS, INDEX_HEAD)
        query = harness.rope.rotate(query.to(device), harness.rope.at(step.all.positions))
        query = keys.cache.rotated(query) if quantizes else query
        scale = (INDEX_HEADS * INDEX_HEAD) ** -0.5
        weights = module.scorer.weights_proj(torch.cat(x, 1)[0]) * scale
        choice, weights = RowChoice(keys, NUM_CHOSEN), weights.to(device)
        chosen = choice.choose(query, weights, step).cpu()
    start = 0
    for of_request in expected:
        for row in of_request:
            ours = chosen[start]
            assert set(ours[ours >= 0].tolist()) == set(row[row >= 0].tolist()), start
            start += 1
    last = torch.tensor([lengths[0] - 1, sum(lengths) - 1, 0], device=device)
    step, context = harness.step((1, 1), lengths, in_graph=True)
    with context:
        in_graph = choice.choose(query[last], weights[last], step).cpu()
    for row, ours in zip(chosen[last.cpu()[:2]], in_graph, strict=False):
        assert set(ours[ours >= 0].tolist()) == set(row[row >= 0].tolist())


@pytest.mark.parametrize(
    ("heads", "size", "block_size", "has_graphs"),
    [(64, 128, 128, True), (64, 128, 32, False), (64, 64, 128, False), (128, 128, 128, False)],
)
def test_graphs_need_keys_that_the_operator_reads(heads, size, block_size, has_graphs, vllm_config):
    vllm_config.cache_config.block_size = block_size
    kind = RowKind(size, torch.bfloat16, tokens_per_row=4, page_rows=key_page_rows(heads, size))
    spec: Any = RowCacheLayer(kind, "keys").get_kv_cache_spec(vllm_config)
    support = RowCacheMetadataBuilder.get_cudagraph_support(vllm_config, spec)
    assert (support is not AttentionCGSupport.NEVER) == has_graphs


def test_tokens_of_a_step_are_copied_without_a_wait(device):
    step = StepTokens.of_lengths([0, 5, 12], [9, 23], device)
    before = _C.host_counts()["synchronizations"]
    closing, every = step.closing(4), step.all
    assert _C.host_counts()["synchronizations"] == before
    assert closing.positions.tolist() == [7, 19] and closing.rows.tolist() == [3, 8]
    assert every.requests.tolist() == [0] * 5 + [1] * 7


def test_padding_of_a_graph_sees_no_groups(device):
    """Padding would write rows into the null block, before the memory of a layer whose pages come
    later.
    """
    positions, slots = torch.tensor([8, 127], device=device), torch.tensor([3, -1], device=device)
    step = StepTokens.of_graph(positions, slots, 2)
    assert step.num_complete(4).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("connector", "kept"), [(None, 8), ("NPUOffloadingConnector", 8), ("NixlConnector", 9)]
)
def test_a_transferred_window_begins_one_token_earlier(connector, kept, vllm_config):
    if connector is not None:
        vllm_config.kv_transfer_config = SimpleNamespace(kv_connector=connector)
    kind = RowKind(HEAD, torch.float32, window=8, pages=4)
    spec: Any = RowCacheLayer(kind, "window").get_kv_cache_spec(vllm_config)
    assert spec.sliding_window == kept
