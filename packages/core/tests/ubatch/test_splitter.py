"""Steps that cannot be cut because part of them belongs to the whole step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
)

from vllm_davinci.core.ubatch.splitter import attends_causally
from vllm_davinci.core.ubatch.step_facts import BatchFacts

CACHE = {"block_size": 128, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


def can_be_cut(
    features: list[Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    splits_multimodal_steps: bool = False,
) -> bool:
    """True if a step of two requests can be cut."""
    batch = SimpleNamespace(
        req_ids=["a", "b"],
        num_reqs=2,
        num_computed_tokens_cpu=np.zeros(4),
        block_table=SimpleNamespace(block_tables=[]),
    )
    requests = {
        "a": SimpleNamespace(mm_features=[]),
        "b": SimpleNamespace(mm_features=features or []),
    }
    model = SimpleNamespace(splits_multimodal_steps=splits_multimodal_steps)
    facts = BatchFacts.of(batch, requests, model, model_kwargs or {})
    assert len(facts.prefixes.num_computed_tokens) == 2
    return facts.can_be_cut


def test_text_can_be_cut():
    assert can_be_cut()


def test_images_of_a_model_that_takes_its_rows_can_be_cut():
    assert can_be_cut(features=["image"], splits_multimodal_steps=True)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"features": ["image"]}, id="images_of_one_request"),
        pytest.param({"model_kwargs": {"token_type_ids": torch.zeros(4)}}, id="model_arguments"),
    ],
)
def test_data_of_the_whole_step_keeps_it_whole(parts: dict[str, Any]):
    assert not can_be_cut(**parts)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param([FullAttentionSpec], True, id="causal"),
        pytest.param([FullAttentionSpec, EncoderOnlyAttentionSpec], False, id="bidirectional"),
        pytest.param([], False, id="no_attention"),
    ],
)
def test_only_layers_that_attend_in_one_direction_can_be_cut(specs: list[Any], expected: bool):
    groups = [KVCacheGroupSpec(["layer"], spec(**CACHE)) for spec in specs]
    assert attends_causally(SimpleNamespace(kv_cache_groups=groups)) is expected
