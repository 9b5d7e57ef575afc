"""Models with sparse MLA: features that the start refuses."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.sparse_attention import FEATURES
from vllm_davinci_testing.engines.refusals import refused_by

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
}


def configuration(stages: int = 1, **text: Any) -> Any:
    return SimpleNamespace(
        additional_config={},
        lora_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            architectures=["DeepseekV32ForCausalLM"], hf_text_config=SimpleNamespace(**text)
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, data_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(kv_offloading_size=None),
        speculative_config=None,
    )


def refused(config: Any) -> str:
    return refused_by(FEATURES, Engine(config, get_config(config)))


@pytest.mark.parametrize("named", CHANGES)
def test_an_unsupported_request_is_refused_by_its_option(named: str):
    config = configuration(index_topk=2048)
    field, value = CHANGES[named]
    setattr(config, field, value)
    said = refused(config)
    assert named in said and "for DeepseekV32ForCausalLM, with sparse attention" in said


@pytest.mark.parametrize(
    "text",
    [{"index_topk_freq": 4}, {"index_topk_pattern": "FSF"}, {"indexer_types": ["full", "shared"]}],
)
def test_a_selection_is_not_shared_between_stages(text: dict[str, Any]):
    assert not refused(configuration(stages=2, index_topk=2048))
    said = refused(configuration(stages=2, index_topk=2048, **text))
    assert said.startswith("--pipeline-parallel-size 2 (pipeline stages")


def test_other_models_keep_their_options():
    config = configuration(stages=2)
    config.lora_config = SimpleNamespace()
    assert not refused(config)


@pytest.mark.parametrize("connector", ["NPUOffloadingConnector", "NixlConnector"])
def test_blocks_may_be_offloaded_and_transferred(connector: str):
    for model_type in ("deepseek_v32", "deepseek_v4"):
        config = configuration(index_topk=2048, model_type=model_type)
        config.kv_transfer_config = SimpleNamespace(kv_connector=connector)
        config.cache_config.kv_offloading_size = 1.0
        assert not refused(config)


def test_an_indexers_keys_keep_the_models_dtype():
    config = configuration(index_topk=2048)
    config.attention_config = SimpleNamespace(indexer_kv_dtype="int8")
    engine = Engine(config, get_config(config))
    (settle,) = [each.settle for each in FEATURES if each.settle is not None]
    settle(engine)
    (change,) = engine.changes
    assert (change.key, change.value) == ("indexer_kv_dtype", "auto")
    assert "instead of 'int8'" in change.reason


@pytest.mark.parametrize(
    ("given", "described", "settled"),
    [
        ("auto", {}, "auto"),
        ("auto", {"indexer_quant_type": "INT8_DYNAMIC"}, "int8"),
        ("bf16", {"indexer_quant_type": "INT8_DYNAMIC"}, "bf16"),
        ("int8", {}, "int8"),
        ("fp8", {}, "bf16"),
    ],
)
def test_deepseek_v4_stores_an_indexers_keys_in_int8_if_asked(given, described, settled):
    config = configuration(index_topk=512, model_type="deepseek_v4", index_head_dim=128)
    config.attention_config = SimpleNamespace(indexer_kv_dtype=given)
    config.quant_config = SimpleNamespace(format=SimpleNamespace(options=described))
    (settle,) = [each.settle for each in FEATURES if each.settle is not None]
    for _ in range(2):
        settle(Engine(config, get_config(config)))
        assert config.attention_config.indexer_kv_dtype == settled


def test_keys_of_a_size_without_a_hadamard_matrix_are_refused():
    config = configuration(index_topk=512, model_type="deepseek_v4", index_head_dim=96)
    config.attention_config = SimpleNamespace(indexer_kv_dtype="int8")
    config.quant_config = None
    (settle,) = [each.settle for each in FEATURES if each.settle is not None]
    with pytest.raises(
        ConfigurationError, match=r"indexer_kv_dtype 'int8'.*index_head_dim\) is 96"
    ):
        settle(Engine(config, get_config(config)))


WITH_ROWS: dict[str, tuple[str, str, Any]] = {
    "eplb_config.dynamic_eplb": (
        "",
        "additional_config",
        {"eplb_config": {"dynamic_eplb": True}},
    ),
    "--quantization": ("model_config", "quantization", "compressed-tensors"),
    "--enable-prompt-embeds": ("model_config", "enable_prompt_embeds", True),
    "--tensor-parallel-size 16": ("parallel_config", "tensor_parallel_size", 16),
    "--decode-context-parallel-size": ("parallel_config", "decode_context_parallel_size", 2),
}


@pytest.mark.parametrize("named", [None, *WITH_ROWS])
def test_untested_features_with_compressed_rows_are_refused(named: str | None):
    config = configuration(index_topk=512, model_type="deepseek_v4", o_groups=8)
    if named is None:
        for quantization in (None, "ascend", "fp8"):
            config.model_config.quantization = quantization
            assert not refused(config)
        return
    part, field, value = WITH_ROWS[named]
    setattr(getattr(config, part) if part else config, field, value)
    assert named in refused(config)


@pytest.mark.parametrize("named", [each for each in WITH_ROWS if "tensor" not in each])
def test_untested_features_with_sinks_are_refused(named: str):
    config = configuration(index_topk=512, model_type="hy_v4")
    assert not refused(config)
    part, field, value = WITH_ROWS[named]
    setattr(getattr(config, part) if part else config, field, value)
    assert named in refused(config)


@pytest.mark.parametrize("named", ["--enable-lora", "dbo.enabled"])
def test_attention_to_chosen_blocks_is_served_alone(named: str):
    config = configuration(sparse_attention_config={})
    assert not refused(config)
    setattr(config, *CHANGES[named])
    said = refused(config)
    assert named in said and "with attention to chosen blocks" in said
