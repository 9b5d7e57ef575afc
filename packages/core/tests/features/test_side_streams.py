"""Side-stream options without an effect end the start with the reason."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import ATTENTION, side_stream
from vllm_davinci.core.errors import ComponentError, ConfigurationError
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.side_streams import FEATURES

PREFETCH = {"weight_prefetch_config": {"enabled": True}}
OPTION = {"torchair_graph_config": {"enable_multistream_mla": True}}


def check_streams(vllm_config: VllmConfig) -> None:
    engine = Engine(vllm_config, get_config(vllm_config))
    for row in FEATURES:
        if row.settle is not None and row.is_asked(engine):
            row.settle(engine)


def test_without_the_package_the_error_names_it(vllm_config, monkeypatch):
    monkeypatch.setattr(components, "stream_scheduler", lambda: None)
    check_streams(vllm_config)
    assert side_stream(vllm_config, ATTENTION) is None
    vllm_config.additional_config = OPTION
    with pytest.raises(ComponentError, match="pip install vllm-davinci-multistream"):
        check_streams(vllm_config)


class DenseModel:
    model = "some/dense-model"
    use_mla = False
    hf_text_config = SimpleNamespace(n_shared_experts=None)


def test_a_model_without_shared_experts_is_refused(vllm_config: VllmConfig):
    vllm_config.additional_config = {"torchair_graph_config": {"enable_multistream_moe": True}}
    vllm_config.model_config = DenseModel()
    with pytest.raises(ConfigurationError, match=r"has no shared experts\. Remove the key"):
        check_streams(vllm_config)


@pytest.mark.parametrize("option", [OPTION, PREFETCH], ids=["side_stream", "prefetch"])
def test_a_model_without_mla_is_refused(option: dict[str, Any], vllm_config: VllmConfig):
    vllm_config.additional_config = option
    vllm_config.model_config = DenseModel()
    with pytest.raises(ConfigurationError, match=r"some/dense-model has none\. Remove the key"):
        check_streams(vllm_config)
