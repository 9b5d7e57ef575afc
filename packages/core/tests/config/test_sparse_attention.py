"""Models with sparse MLA: what the start refuses beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.config.sparse_attention import refuse_beside_sparse_attention
from vllm_davinci.core.errors import ConfigurationError

CHANGES: dict[str, tuple[str, Any]] = {
    "--enable-lora": ("lora_config", SimpleNamespace()),
    "dbo.enabled": ("additional_config", {"dbo": {"enabled": True}}),
    "enable_multistream_mla": (
        "additional_config",
        {"torchair_graph_config": {"enable_multistream_mla": True}},
    ),
    "weight_prefetch_config.enabled": (
        "additional_config",
        {"weight_prefetch_config": {"enabled": True}},
    ),
    "--kv-transfer-config": ("kv_transfer_config", SimpleNamespace(kv_connector="NixlConnector")),
}


def configuration(stages: int = 1, **text: Any) -> Any:
    return SimpleNamespace(
        additional_config={},
        lora_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            architectures=["DeepseekV32ForCausalLM"], hf_text_config=SimpleNamespace(**text)
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


@pytest.mark.parametrize("named", CHANGES)
def test_what_is_asked_for_is_refused_by_its_option(named: str):
    config = configuration(index_topk=2048)
    field, value = CHANGES[named]
    setattr(config, field, value)
    with pytest.raises(ConfigurationError, match="whose attention is sparse") as seen:
        refuse_beside_sparse_attention(config)
    assert named in str(seen.value)


@pytest.mark.parametrize("text", [{"index_topk_freq": 4}, {"index_topk_pattern": "FSF"}])
def test_a_choice_is_not_shared_between_stages(text: dict[str, Any]):
    refuse_beside_sparse_attention(configuration(stages=2, index_topk=2048))
    with pytest.raises(ConfigurationError, match="2 pipeline stages"):
        refuse_beside_sparse_attention(configuration(stages=2, index_topk=2048, **text))


def test_other_models_keep_their_options():
    config = configuration(stages=2)
    config.lora_config = SimpleNamespace()
    refuse_beside_sparse_attention(config)


def test_blocks_may_go_on_in_the_hosts_memory():
    config = configuration(index_topk=2048)
    config.kv_transfer_config = SimpleNamespace(kv_connector="NPUOffloadingConnector")
    refuse_beside_sparse_attention(config)
