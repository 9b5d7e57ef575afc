"""Steps that cannot be cut, because something in them belongs to the step as a whole."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
)

from vllm_davinci.core.ubatch.deciding_runner import DecidingRunner

CACHE = {"block_size": 128, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


def runner(
    spec: Any = FullAttentionSpec,
    adapters: dict[int, Any] | None = None,
    features: list[Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    groups: int = 1,
    splits_multimodal_steps: bool = False,
) -> Any:
    """A runner's attributes at a step of two requests."""
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec(**CACHE))] * groups
        ),
        input_batch=SimpleNamespace(lora_id_to_lora_request=adapters or {}, req_ids=["a", "b"]),
        requests={
            "a": SimpleNamespace(mm_features=[]),
            "b": SimpleNamespace(mm_features=features or []),
        },
        _splits_multimodal_steps=splits_multimodal_steps,
        _init_model_kwargs=lambda: model_kwargs or {},
    )


def test_text_for_a_causal_model_can_be_cut():
    assert DecidingRunner._can_be_cut(runner())


def test_images_of_a_model_that_takes_its_rows_can_be_cut():
    assert DecidingRunner._can_be_cut(runner(features=["image"], splits_multimodal_steps=True))


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param({"spec": EncoderOnlyAttentionSpec}, id="bidirectional_attention"),
        pytest.param({"groups": 0}, id="no_attention"),
        pytest.param({"adapters": {1: "adapter"}}, id="adapters"),
        pytest.param({"features": ["image"]}, id="images_of_one_request"),
        pytest.param({"model_kwargs": {"token_type_ids": torch.zeros(4)}}, id="model_arguments"),
    ],
)
def test_what_belongs_to_the_whole_step_keeps_it_whole(parts: dict[str, Any]):
    assert not DecidingRunner._can_be_cut(runner(**parts))
