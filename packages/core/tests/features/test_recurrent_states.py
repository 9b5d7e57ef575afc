"""Models with recurrent state: features that the start refuses or turns off."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.setting import Setting
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.recurrent_states import FEATURES
from vllm_davinci_testing.engines.refusals import refused_by

CHANGES: dict[str, tuple[str, str, Any]] = {
    "--enable-lora": ("", "lora_config", SimpleNamespace()),
    "--kv-transfer-config": (
        "",
        "kv_transfer_config",
        SimpleNamespace(kv_connector="NixlConnector"),
    ),
    "--kv-offloading-size": ("cache_config", "kv_offloading_size", 1.0),
    "--runner pooling": ("model_config", "runner_type", "pooling"),
    "--use-replayssm": ("cache_config", "use_replayssm", True),
    "--enable-mamba-cache-stochastic-rounding": (
        "mamba_config",
        "enable_stochastic_rounding",
        True,
    ),
}


def configuration(is_hybrid: bool = True) -> Any:
    return SimpleNamespace(
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(
            is_hybrid=is_hybrid,
            has_inner_state=is_hybrid,
            multimodal_config=None,
            architectures=["Qwen3NextForCausalLM"],
            runner_type="generate",
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(
            kv_offloading_size=None,
            use_replayssm=False,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            mamba_block_size=128,
        ),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=False),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )


def refused(config: Any) -> str:
    return refused_by(FEATURES, Engine(config, DavinciConfig()))


def settle_states(config: Any) -> list[Setting]:
    """Returns the changes made by the feature row of recurrent states."""
    engine, row = Engine(config, DavinciConfig()), FEATURES[0]
    assert row.settle is not None
    if row.is_asked(engine):
        row.settle(engine)
    return engine.changes


@pytest.mark.parametrize("named", CHANGES)
def test_an_unsupported_request_is_refused_by_its_option(named: str):
    config = configuration()
    part, field, value = CHANGES[named]
    setattr(getattr(config, part) if part else config, field, value)
    said = refused(config)
    assert named in said and ("recurrent state" in said or "states)" in said)


def test_drafts_made_after_acceptance_is_known_are_supported():
    config = configuration()
    config.speculative_config = SimpleNamespace(method="ngram")
    assert not refused(config)
    config.speculative_config.method = "eagle"
    said = refused(config)
    assert "--speculative-config of method 'eagle'" in said and "Use one of ngram" in said


def test_drafts_of_a_model_turn_asynchronous_scheduling_off():
    config = configuration()
    config.speculative_config = SimpleNamespace(method="mtp")
    config.scheduler_config = SimpleNamespace(async_scheduling=True)
    _, setting = settle_states(config)
    assert not config.scheduler_config.async_scheduling
    config.model_config.multimodal_config = SimpleNamespace(
        get_limit_per_prompt=lambda kind: kind == "image"
    )
    assert "takes images" in refused(config)
    config.model_config.multimodal_config = None
    assert setting.told().startswith("async_scheduling = false (instead of true: the host")
    assert not settle_states(config)


def test_prefix_caching_of_states_is_turned_off_once_with_the_reason():
    config = configuration()
    (setting,) = settle_states(config)
    assert setting.told().startswith("enable_prefix_caching = false (instead of true: not avail")
    cache = config.cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (False, "none")
    assert cache.mamba_block_size == 4096
    assert not settle_states(config)


def test_other_models_keep_their_settings():
    config = configuration(is_hybrid=False)
    config.lora_config = SimpleNamespace()
    assert not settle_states(config)
    assert config.cache_config.enable_prefix_caching
