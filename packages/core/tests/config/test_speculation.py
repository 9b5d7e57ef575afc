"""Speculative decoding: what the start refuses, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeMethod

from vllm_davinci.core.config.speculation import SERVED, check_speculation
from vllm_davinci.core.errors import ConfigurationError


def model(**changes: Any) -> Any:
    sizes = {"vocabulary": 4096, "hidden": 256, "architectures": ["DeepSeekMTPModel"]} | changes
    return SimpleNamespace(
        model="a/model",
        architectures=sizes["architectures"],
        get_vocab_size=lambda: sizes["vocabulary"],
        get_hidden_size=lambda: sizes["hidden"],
    )


def asked(method: str, pipeline: int = 1, data: int = 1, **changes: Any) -> VllmConfig:
    options = {
        "method": method,
        "rejection_sample_method": "standard",
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "use_local_argmax_reduction": False,
        "num_speculative_tokens_per_batch_size": None,
        "enable_adaptive_verification": False,
        "draft_model_config": model(),
        "target_model_config": model(),
        "draft_parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "target_parallel_config": SimpleNamespace(tensor_parallel_size=2),
    }
    beside = {
        "lora_config": None,
        "kv_transfer_config": None,
        "cache_config": SimpleNamespace(kv_offloading_size=None),
        "model_config": SimpleNamespace(enable_sleep_mode=False),
    }
    beside |= {name: changes.pop(name) for name in beside if name in changes}
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**options | changes),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline, data_parallel_size=data),
        **beside,
    )
    return config


@pytest.mark.parametrize("method", SERVED)
def test_methods_that_are_served_start(method: str):
    check_speculation(asked(method))
    check_speculation(asked(method, rejection_sample_method="synthetic"))


def methods() -> list[str]:
    def leaves(of: Any) -> list[str]:
        return [name for part in get_args(of) for name in leaves(part)] or [of]

    return leaves(SpeculativeMethod)


@pytest.mark.parametrize("method", sorted({*methods()} - {*SERVED}))
def test_every_other_method_of_vllm_is_refused_with_its_name(method: str):
    with pytest.raises(ConfigurationError, match=rf"not available.*'{method}'.*Use one of ngram"):
        check_speculation(asked(method))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rejection_sample_method": "block"}, "rejection_sample_method 'block'"),
        ({"pipeline": 2}, "over pipeline stages"),
        ({"data": 2}, "'mtp', whose drafter runs a model, with data parallelism"),
        ({"lora_config": SimpleNamespace()}, "with LoRA adapters"),
        ({"kv_transfer_config": SimpleNamespace()}, "KV cache that goes on elsewhere"),
        ({"cache_config": SimpleNamespace(kv_offloading_size=1)}, "--kv-offloading-size"),
        ({"model_config": SimpleNamespace(enable_sleep_mode=True)}, "with sleep mode"),
        ({"draft_model_config": model(architectures=["Glm4MoeMTPModel"])}, "of Glm4MoeMTPModel"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2, 3]]}, "tokens_per_batch_size"),
        ({"enable_adaptive_verification": True}, "enable_adaptive_verification"),
    ],
)
def test_options_that_are_not_served_are_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=f"not available.*{said}"):
        check_speculation(asked("mtp", **changes))


def test_drafters_without_a_model_serve_data_parallel_engines():
    check_speculation(asked("ngram", data=2))


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("eagle3", {"draft_model_config": model(vocabulary=9)}, "a vocabulary of 9.*has 4096"),
        ("draft_model", {"draft_model_config": model(vocabulary=9)}, "a vocabulary of 9"),
        ("eagle", {"draft_model_config": model(hidden=64)}, "hidden size of 64.*has 256"),
        (
            "draft_model",
            {"draft_parallel_config": SimpleNamespace(tensor_parallel_size=1)},
            "draft_tensor_parallel_size to 2",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused(method: str, changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=said):
        check_speculation(asked(method, **changes))


def test_a_draft_model_may_be_smaller():
    check_speculation(asked("draft_model", draft_model_config=model(hidden=64)))


def test_without_speculation_nothing_is_said(vllm_config: VllmConfig):
    check_speculation(vllm_config)
