"""Metadata is computed from host copies, without reading the device."""

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_davinci.core.attention.metadata import NPUAttentionMetadataBuilder
from vllm_davinci.core.errors import UnsupportedFeatureError

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)


def common(**changes: object) -> CommonAttentionMetadata:
    # Device tensors are on `meta`: reading one of them would raise.
    values = {
        "query_start_loc": torch.empty(4, dtype=torch.int32, device="meta"),
        "query_start_loc_cpu": torch.tensor([0, 1, 9, 10], dtype=torch.int32),
        "seq_lens": torch.empty(3, dtype=torch.int32, device="meta"),
        "num_reqs": 3,
        "num_actual_tokens": 10,
        "max_query_len": 8,
        "max_seq_len": 130,
        "block_table_tensor": torch.empty(4, 2, dtype=torch.int32, device="meta"),
        "slot_mapping": torch.empty(16, dtype=torch.int64, device="meta"),
        "seq_lens_cpu_upper_bound": torch.tensor([130, 8, 64, 0], dtype=torch.int32),
    }
    return CommonAttentionMetadata(**{**values, **changes})


@pytest.fixture
def builder(vllm_config: VllmConfig) -> NPUAttentionMetadataBuilder:
    return NPUAttentionMetadataBuilder(SPEC, ["layer"], vllm_config, torch.device("meta"))


def test_lengths_are_host_lists_of_the_real_requests(builder: NPUAttentionMetadataBuilder):
    metadata = builder.build(0, common())
    assert metadata.actual_seq_lengths_q == [1, 9, 10]
    assert metadata.seq_lens == [130, 8, 64]
    assert metadata.block_table.shape == (3, 2)
    assert metadata.slot_mapping.shape == (10,)
    assert metadata.causal


def test_a_bidirectional_batch_keeps_its_direction(builder: NPUAttentionMetadataBuilder):
    assert not builder.build(0, common(causal=False)).causal


def test_missing_host_lengths_are_refused_with_the_flag_to_change(builder):
    with pytest.raises(UnsupportedFeatureError, match="--no-async-scheduling"):
        builder.build(0, common(seq_lens_cpu_upper_bound=None))


def test_a_batch_of_mixed_direction_is_refused(builder: NPUAttentionMetadataBuilder):
    with pytest.raises(UnsupportedFeatureError, match="mixes causal and bidirectional"):
        builder.build(0, common(causal=torch.tensor([True, False, True])))
