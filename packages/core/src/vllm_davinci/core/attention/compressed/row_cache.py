"""Row caches: rows of one kind and layer, in pages packed with the pages of other kinds.

Kinds differ in width, dtype, tokens per row and lifetime, so their pages differ in size. vLLM packs
the pages of all layers of a cache group into one block of bytes, block after block. Rows are
written and gathered by index, so all layers with rows of one width share one view of the memory.
See docs/decisions/0017-rows-in-packed-pages.md.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_davinci import operators
from vllm_davinci.core.attention.backend import LayersOwnBackendBase
from vllm_davinci.core.attention.builder import MetadataBuilderBase
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.attention.metadata import host_seq_lens
from vllm_davinci.core.components.fused_ops import fused_op
from vllm_davinci.core.device.soc import BLOCK_SIZE_TOKENS
from vllm_davinci.core.graph.host_lengths import HostLengths

# Smallest page of the operator's keys. Source: aclnnLightningIndexer.md, constraints.
PAGE_ROWS = 16
# Tokens of a step, pages of rows, and each token's pages in the order of its request's tokens.
PageParts = tuple[slice, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowKind:
    """One kind of rows: size, dtype and lifetime.

    width:          entries per row
    tokens_per_row: tokens that one row stands for; it is written with the last of them
    window:         number of newest tokens whose rows are kept; None keeps all
    pages:          pages per block of the engine's block size
    page_rows:      rows per page of the operator that reads the cache in graphs; None without such
                    an operator, and then without graphs
    """

    width: int
    dtype: torch.dtype
    tokens_per_row: int = 1
    window: int | None = None
    pages: int = 1
    page_rows: int | None = 1

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


class RowCache(NamedTuple):
    """The memory of a layer's rows of one kind.

    rows:           [num_rows, width]: all memory of the cache, the same for layers of one width
                    and dtype
    first_row:      index of the first row of the layer's page in block 0
    rows_per_block: distance in rows between the layer's pages in two consecutive blocks
    """

    rows: torch.Tensor
    first_row: int
    rows_per_block: int

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.rows,)

    @classmethod
    def in_memory(
        cls, memory: torch.Tensor, kind: RowKind, first_byte: int, block_bytes: int
    ) -> "RowCache":
        """first_byte: offset of the page in block 0; block_bytes: from one page to the next"""
        size = kind.row_bytes
        assert first_byte % size == 0 and block_bytes % size == 0, (first_byte, block_bytes, size)
        whole = memory[: memory.numel() // size * size].view(kind.dtype)
        return cls(whole.view(-1, kind.width), first_byte // size, block_bytes // size)


@dataclass
class RowCacheMetadata(AttentionMetadata):
    """Block tables and lengths of one cache group.

    block_table:  [num_reqs, max_blocks], int32
    starts:       first row of the step of each request, then the number of all rows
    seq_lens:     total tokens of each request
    slot_mapping: [num_tokens], int64, negative for padding
    on_device:    [num_reqs], int32, the lengths that graphs read
    host_lengths: set while a graph is captured; no launch here uses lengths from the host
    """

    block_table: torch.Tensor
    starts: list[int]
    seq_lens: list[int]
    slot_mapping: torch.Tensor
    on_device: torch.Tensor | None = None
    host_lengths: HostLengths | None = None

    def tokens(self, positions: torch.Tensor) -> StepTokens:
        """Returns the step's tokens. All cache groups return the same.

        positions: [num_tokens], int64. Read in graphs only; outside, computed from lengths. Rotary
                   ones, [3, num_tokens], are never read: an image's do not count tokens.
        """
        if self.host_lengths is None:
            return self._tokens
        count, num_tokens = len(self.seq_lens), positions.shape[-1]
        if positions.ndim == 2:
            assert self.on_device is not None
            newest = torch.arange(-num_tokens // count, 0, device=positions.device)
            # A padding request has no tokens.
            positions = (self.on_device.unsqueeze(1) + newest).flatten().clamp(min=0)
        return StepTokens.of_graph(positions, self.slot_mapping[:num_tokens], count)

    @cached_property
    def _tokens(self) -> StepTokens:
        return StepTokens.of_lengths(self.starts, self.seq_lens, self.block_table.device)

    def step_lengths(self) -> tuple[list[int], list[int]]:
        return [], []


class RowCacheLayer(nn.Module, AttentionLayerBase):
    """Rows of one kind and layer, registered under a name of its own in vLLM's cache plan."""

    supports_dcp = False

    def __init__(self, kind: RowKind, prefix: str) -> None:
        super().__init__()
        self.kind, self.prefix = kind, prefix
        config = get_current_vllm_config()
        layers = config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"Two layers have the name {prefix}.")
        layers[prefix] = self
        self._block_size = config.cache_config.block_size
        self.kv_cache: RowCache | None = None

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowCacheBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        kind = self.kind
        # The engine's block size is set after this layer is built.
        self._block_size = vllm_config.cache_config.block_size // kind.pages
        common: dict[str, Any] = {
            "block_size": self._block_size,
            "num_kv_heads": 1,
            "max_tp_shards": 1,
            "dcp_sharded": False,
            "head_size": kind.width,
            "head_size_v": 0,
            "dtype": kind.dtype,
            "tokens_per_state": kind.tokens_per_row,
            # Each block must begin with a whole row, or page of rows, of every kind.
            "block_stride_alignment": kind.row_bytes * (kind.page_rows or 1),
        }
        if kind.window is None:
            return MLAAttentionSpec(**common)
        # A receiver of a transferred prompt recomputes the last token, whose window begins one
        # token earlier. The window is one token longer here, because vLLM overwrites
        # extra_retained_tokens. Not with offloading: it stores whole windows, so a longer one would
        # never be found.
        asked = vllm_config.kv_transfer_config
        name = "" if asked is None else asked.kv_connector or ""
        again = int(name != "" and not name.endswith("OffloadingConnector"))
        return SlidingWindowMLASpec(sliding_window=kind.window + again, **common)

    def bind_kv_cache(self, kv_cache: RowCache) -> None:
        self.kv_cache = kv_cache

    @property
    def metadata(self) -> RowCacheMetadata | None:
        """The step's metadata; None in profile runs and in steps without requests."""
        by_layer: Any = get_forward_context().attn_metadata
        return by_layer.get(self.prefix) if isinstance(by_layer, dict) else None

    @property
    def rows(self) -> torch.Tensor:
        """[n, width]: all memory from the first row of the layer's page in block 0"""
        assert self.kv_cache is not None, f"{self.prefix} has no memory yet"
        return self.kv_cache.rows[self.first_row :]

    @property
    def first_row(self) -> int:
        """Index of the layer's first row in memory shared by layers of one width and dtype."""
        assert self.kv_cache is not None
        return self.kv_cache.first_row

    @property
    def has_pages(self) -> bool:
        """True if the rows of a block are whole pages of the operator that reads them in graphs."""
        rows = self._block_size // self.kind.tokens_per_row
        return self.kind.page_rows is not None and rows % self.kind.page_rows == 0

    @property
    def rows_of_request(self) -> int:
        """Most rows of a request, which has a block table as wide as this step's."""
        assert self.metadata is not None
        blocks = self.metadata.block_table.shape[1]
        return blocks * self._block_size // self.kind.tokens_per_row

    def page_parts(self, step: StepTokens) -> Iterator[PageParts]:
        """Pages in which an operator finds the rows of a graph's tokens, part by part.

        Here in one part: all memory as [num_pages, page_rows, 1, width], and [num_tokens,
        max_pages], int32.
        """
        assert self.kv_cache is not None and self.metadata is not None
        size, (rows, *places) = self.kind.page_rows, self.kv_cache
        assert size is not None and not any(place % size for place in places), (places, size)
        first, stride = (place // size for place in places)
        count = self._block_size // self.kind.tokens_per_row // size
        blocks = self.metadata.block_table.index_select(0, step.all.requests)
        within = torch.arange(first, first + count, dtype=torch.int32, device=blocks.device)
        whole = rows[: len(rows) // size * size].view(-1, size, 1, self.kind.width)
        yield slice(0, step.num_tokens), whole, (blocks.unsqueeze(-1) * stride + within).flatten(1)

    def of_request(
        self, step: StepTokens, request: int, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns 0 to num_rows - 1, int64, and the request's first rows [num_rows, width].

        request: row of the block table
        """

        def found() -> tuple[torch.Tensor, torch.Tensor]:
            places = torch.arange(num_rows, device=step.device)
            return places, self.numbers(places, torch.full_like(places, request))

        places, numbers = step.shared((self.key, request), found)
        return places, self.rows.index_select(0, numbers)

    def write(self, step: StepTokens, rows: torch.Tensor) -> torch.Tensor:
        """Writes the rows that the step's tokens complete. rows: [n, width]

        Returns their indices.
        """
        numbers = self.written(step)
        self.rows.index_copy_(0, numbers, rows.to(self.kind.dtype))
        return numbers

    def written(self, step: StepTokens) -> torch.Tensor:
        """Indices of the rows that the step's tokens complete, int64, for layers of this key.

        Rows to be skipped go to the null block, which belongs to no request.
        """
        found: torch.Tensor = step.shared((self.key, "written"), lambda: self._written(step))
        return found

    def _written(self, step: StepTokens) -> torch.Tensor:
        tokens, ratio = step.closing(self.kind.tokens_per_row), self.kind.tokens_per_row
        numbers = self.numbers(tokens.positions // ratio, tokens.requests)
        if tokens.is_written is not None:
            numbers.masked_fill_(~tokens.is_written, 0)
        return numbers

    def write_at(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows of single tokens at vLLM's slots: [n], int64, negative for rows to leave out.

        rows: [n, width]
        """
        assert self.kv_cache is not None and self.kind.tokens_per_row == 1
        blocks, places = slots // self._block_size, slots % self._block_size
        numbers = blocks * self.kv_cache.rows_per_block + places
        numbers.masked_fill_(slots < 0, 0)
        self.rows.index_copy_(0, numbers, rows.to(self.kind.dtype))

    def numbers(self, places: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Indices in `rows` of requests' rows, int64.

        places: [n, ...], int64, positions divided by the tokens of a row
        requests: rows of the block table, broadcastable to places
        """
        assert self.kv_cache is not None and self.metadata is not None
        find = fused_op(operators.row_numbers) or operators.row_numbers
        return find(
            places,
            requests,
            self.metadata.block_table,
            self._block_size // self.kind.tokens_per_row,
            self.kv_cache.rows_per_block,
        )

    @property
    def key(self) -> Hashable:
        """Layers with equal keys have rows at equal indices in this step."""
        assert self.kv_cache is not None
        return id(self.metadata), self.kind, self.kv_cache.rows_per_block


class RowCacheMetadataBuilder(MetadataBuilderBase[RowCacheMetadata]):
    """Uses block tables as they are. Never reads from the device."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Refuses graphs unless an operator that reads lengths on the device can read all rows."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        if all(each.has_pages for each in layers if isinstance(each, RowCacheLayer)):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RowCacheMetadata:
        common = common_attn_metadata
        return RowCacheMetadata(
            block_table=common.block_table_tensor[: common.num_reqs],
            starts=common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            seq_lens=host_seq_lens(common),
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            on_device=common.seq_lens[: common.num_reqs],
        )


class RowCacheBackend(LayersOwnBackendBase):
    """Rows in packed pages, read by the model's own attention."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up in its own enumeration of backends

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return RowCacheMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        if kv_cache_spec is None:
            return [MultipleOf(BLOCK_SIZE_TOKENS)]
        return [kv_cache_spec.block_size]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return (KVCacheLayout.BLNHC,)

    @classmethod
    def is_mla(cls) -> bool:
        return True
