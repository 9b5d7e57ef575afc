"""Steps that cannot be cut, because a part of them belongs to the whole step."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, FullAttentionSpec, KVCacheGroupSpec

from vllm_davinci.core.ubatch.splitter import attends_causally

CACHE = {"block_size": 128, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param([FullAttentionSpec], True, id="causal"),
        pytest.param([FullAttentionSpec, EncoderOnlyAttentionSpec], False, id="bidirectional"),
        pytest.param([partial(FullAttentionSpec, non_causal=True)], False, id="prompts"),
        pytest.param([], False, id="no_attention"),
    ],
)
def test_only_layers_that_attend_in_one_direction_can_be_cut(specs: list[Any], expected: bool):
    groups = [KVCacheGroupSpec(["layer"], spec(**CACHE)) for spec in specs]
    assert attends_causally(SimpleNamespace(kv_cache_groups=groups)) is expected
