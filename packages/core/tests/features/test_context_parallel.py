"""Options and models that exclude context parallelism."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.config.options import DavinciConfig, DualBatchConfig
from vllm_davinci.core.features.context_parallel import FEATURES
from vllm_davinci.core.features.feature import Engine
from vllm_davinci_testing.engines.refusals import refused_by


def engine(ranks: int = 2, prefill_ranks: int = 1, overlap: bool = False, **changes: Any) -> Any:
    parallel = {
        "dcp_q_replicate": False,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_expert_parallel": False,
    }
    cache = {"kv_offloading_size": changes.pop("kv_offloading_size", None)}
    text = {"index_topk": 2048} if changes.pop("is_sparse", False) else {}
    names = ("speculative_config", "lora_config", "kv_transfer_config")
    has_states = changes.get("has_states", False)
    vllm: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks,
            prefill_context_parallel_size=prefill_ranks,
            **{name: changes.get(name, value) for name, value in parallel.items()},
        ),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**text),
            architectures=["AForCausalLM"],
            use_mla=changes.get("use_mla", True),
            is_multimodal_model=changes.get("is_multimodal_model", False),
            is_hybrid=has_states,
            has_inner_state=has_states,
            is_mm_prefix_lm=changes.get("is_mm_prefix_lm", False),
            is_encoder_decoder=changes.get("is_encoder_decoder", False),
        ),
        **{name: changes.get(name) for name in names},
    )
    return Engine(vllm, DavinciConfig(dbo=DualBatchConfig(enabled=overlap)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ranks": 32}, "--decode-context-parallel-size 32 .*Use at most 16"),
        ({"overlap": True}, "dbo.enabled"),
        ({"dcp_q_replicate": True}, "--dcp-q-replicate"),
        ({"speculative_config": object()}, "--speculative-config"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
            "--kv-transfer-config",
        ),
        ({"kv_offloading_size": 1}, "--kv-offloading-size"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"is_mm_prefix_lm": True}, "bidirectional attention"),
        ({"has_states": True}, "recurrent states"),
        ({"is_sparse": True}, "sparse attention"),
    ],
)
def test_it_is_refused_by_name(changes: dict[str, Any], named: str):
    assert re.search(named, refused_by(FEATURES, engine(**changes)))
    # If every rank holds all tokens, no feature is refused.
    assert not refused_by(FEATURES, engine(**{**changes, "ranks": 1}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_mla": False}, "--prefill-context-parallel-size 2.*latent attention"),
        ({"enable_expert_parallel": True}, "Remove --enable-expert-parallel"),
        ({"ranks": 2}, "--decode-context-parallel-size"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"overlap": True}, "dbo.enabled"),
        ({"speculative_config": object()}, "--speculative-config"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"kv_offloading_size": 1}, "--kv-offloading-size"),
        ({"is_multimodal_model": True}, "images, videos or sound"),
        ({"is_sparse": True}, "sparse attention"),
    ],
)
def test_divided_prefills_are_refused_by_name(changes: dict[str, Any], named: str):
    divided = {"ranks": 1, "prefill_ranks": 2, **changes}
    assert re.search(named, refused_by(FEATURES, engine(**divided)))


def test_a_plain_engine_is_served():
    assert not refused_by(FEATURES, engine())
    assert not refused_by(FEATURES, engine(ranks=1, prefill_ranks=2))
