"""Speculative decoding: what the start refuses, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeMethod

from vllm_davinci.core.config.speculation import SERVED, check_speculation
from vllm_davinci.core.errors import ConfigurationError


def asked(method: str, pipeline: int = 1, **changes: Any) -> VllmConfig:
    options = {"method": method, "rejection_sample_method": "standard"}
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**options | changes),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
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
    ],
)
def test_options_that_are_not_served_are_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigurationError, match=f"not available.*{said}"):
        check_speculation(asked("ngram", **changes))


def test_without_speculation_nothing_is_said(vllm_config: VllmConfig):
    check_speculation(vllm_config)
