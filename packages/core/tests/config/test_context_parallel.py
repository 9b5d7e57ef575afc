"""Options and models that a context divided among ranks does not go with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.config import context_parallel
from vllm_davinci.core.config.context_parallel import refused_with_context_parallel


def config(ranks: int = 2, overlap: bool = False, **changes: Any) -> Any:
    parallel = {"prefill_context_parallel_size": 1, "dcp_q_replicate": False}
    cache = {"kv_offloading_size": changes.pop("kv_offloading_size", None)}
    text = {"index_topk": 2048} if changes.pop("is_sparse", False) else {}
    names = ("speculative_config", "lora_config", "kv_transfer_config")
    return SimpleNamespace(
        overlap=overlap,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks,
            **{name: changes.get(name, value) for name, value in parallel.items()},
        ),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**text),
            has_states=changes.get("has_states", False),
            is_mm_prefix_lm=changes.get("is_mm_prefix_lm", False),
            is_encoder_decoder=changes.get("is_encoder_decoder", False),
        ),
        **{name: changes.get(name) for name in names},
    )


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_engine(engine: Any) -> Any:
        return SimpleNamespace(dbo=SimpleNamespace(enabled=engine.overlap))

    monkeypatch.setattr(context_parallel, "get_config", of_engine)
    monkeypatch.setattr(context_parallel, "keeps_states", lambda model: model.has_states)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ranks": 32}, "more than 16 ranks"),
        ({"overlap": True}, "overlap of ubatches"),
        ({"dcp_q_replicate": True}, "--dcp-q-replicate"),
        ({"speculative_config": object()}, "--speculative-config"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"kv_offloading_size": 1}, "--kv-offloading-size"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"is_mm_prefix_lm": True}, "both ways"),
        ({"has_states": True}, "recurrent states"),
        ({"is_sparse": True}, "sparse attention"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
    ],
)
def test_it_is_refused_by_name(changes: dict[str, Any], named: str):
    refused = refused_with_context_parallel(config(**changes))
    (reason,) = [name for name, is_asked in refused.items() if is_asked]
    assert named in reason
    # Nothing of it is refused where every rank keeps all tokens.
    whole = refused_with_context_parallel(config(**{**changes, "ranks": 1}))
    assert sum(whole.values()) == (named == "--prefill-context-parallel-size")


def test_a_plain_engine_is_served():
    assert not any(refused_with_context_parallel(config()).values())
