"""HY-V4: two names for a tensor in files, and refused configurations."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.models.hy_v4 import _is_of_model, _refuse_other_kinds, _single_experts


def test_experts_in_one_tensor_are_those_of_single_experts():
    joint = torch.arange(24.0).view(2, 4, 3)
    named = dict(_single_experts("model.layers.1.mlp.experts.gate_up_proj", joint))
    prefix = "model.layers.1.mlp.experts."
    assert list(named) == [
        f"{prefix}{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")
    ]
    assert torch.equal(torch.cat(list(named.values())), joint.flatten(0, 1))
    single = "model.layers.1.mlp.experts.1.down_proj.weight"
    assert list(_single_experts(single, joint)) == [(single, joint)]


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("model.layers.2.input_layernorm.weight", True),
        ("model.layers.3.input_layernorm.weight", False),
        ("model.mtp_layers.0.eh_proj.weight", False),
        ("lm_head.weight", True),
    ],
)
def test_tensors_of_multi_token_prediction_are_not_read(name: str, is_read: bool):
    assert _is_of_model(name, 3) == is_read


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layer_types", ["full_attention"], "layer_types"),
        ("enable_ihc", False, "enable_ihc"),
        ("gated_mla", False, "gated_mla"),
        ("gating_type", "headwise", "gating_type"),
        ("learnable_sink", False, "learnable_sink"),
        ("soft_logits_capping", True, "soft_logits_capping"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
    ],
)
def test_other_configurations_are_refused_by_name(key: str, value: Any, said: str):
    served = {"layer_types": ["deepseek_sparse_attention"], "tie_word_embeddings": False}
    _refuse_other_kinds(SimpleNamespace(**served))
    with pytest.raises(UnsupportedFeatureError, match=said):
        _refuse_other_kinds(SimpleNamespace(**{**served, key: value}))
