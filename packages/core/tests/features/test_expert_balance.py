"""Expert balancing: the settings that vLLM gets, and refusals by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig
from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.setting import Setting
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.expert_balance import FEATURES, settle
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.resolution import resolve
from vllm_davinci_testing.engines.refusals import refused_by

DYNAMIC = {"dynamic_eplb": True}


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Returns the configuration of a model with experts."""
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def engine(mixture: Path, balance: dict[str, Any], **ranks: Any) -> VllmConfig:
    made = VllmConfig(device_config=DeviceConfig(device="npu"))
    made.model_config = ModelConfig(str(mixture), skip_tokenizer_init=True)
    made.parallel_config = ParallelConfig(
        **{"tensor_parallel_size": 2, "enable_expert_parallel": True, **ranks}
    )
    made.additional_config = {"eplb_config": balance}
    resolve(made)
    return made


def settle_expert_balance(made: VllmConfig) -> list[Setting]:
    asked = Engine(made, get_config(made))
    if FEATURES[0].is_asked(asked):
        settle(asked)
    return asked.changes


def refused(made: VllmConfig) -> str:
    return refused_by(FEATURES, Engine(made, get_config(made)))


def test_vllm_gets_the_requested_settings(mixture: Path):
    asked = {**DYNAMIC, "num_redundant_experts": 2, "step_interval": 40, "window_size": 30}
    made = engine(mixture, asked)
    (setting,) = settle_expert_balance(made)
    assert setting.value == "torch_nccl"
    assert made.parallel_config.enable_eplb
    vllms = made.parallel_config.eplb_config
    assert (vllms.num_redundant_experts, vllms.step_interval, vllms.window_size) == (2, 40, 30)
    assert settle_expert_balance(made) == [], "in another process it is settled"


def test_asynchronous_weights_are_sent_through_hosts(mixture: Path):
    (setting,) = settle_expert_balance(engine(mixture, {**DYNAMIC, "use_async": True}))
    assert setting.value == "torch_gloo"


def test_nothing_is_set_unless_asked(mixture: Path):
    made = engine(mixture, {})
    assert settle_expert_balance(made) == []
    assert not made.parallel_config.enable_eplb


@pytest.mark.parametrize(
    ("balance", "ranks", "told"),
    [
        ({}, {"enable_expert_parallel": False}, "add --enable-expert-parallel"),
        ({}, {"tensor_parallel_size": 1}, "there is only one. Raise --tensor-parallel-size"),
        ({"use_async": True, "communicator": "torch_nccl"}, {}, "Use 'torch_gloo'"),
    ],
)
def test_impossible_balancing_is_reported(balance, ranks, told, mixture):
    with pytest.raises(ConfigurationError, match=told):
        settle_expert_balance(engine(mixture, {**DYNAMIC, **balance}, **ranks))


@pytest.mark.parametrize(
    ("balance", "told"),
    [
        ({"num_redundant_experts": 2}, "num_redundant_experts.* needs eplb_config.dynamic_eplb"),
        ({"step_interval": 10}, "step_interval.* needs eplb_config.dynamic_eplb"),
        ({**DYNAMIC, "step_interval": 0}, "step_interval"),
        ({**DYNAMIC, "communicator": "nixl"}, "communicator"),
        ({**DYNAMIC, "eplb_policy_type": 3}, "vLLM's own policy decides"),
        ({**DYNAMIC, "expert_map_record_path": "x"}, "maps are not written"),
        ({**DYNAMIC, "interval": 3}, "Did you mean 'eplb_config"),
    ],
)
def test_a_key_without_effect_is_an_error(balance: dict[str, Any], told: str, mixture: Path):
    with pytest.raises(ConfigurationError, match=told):
        engine(mixture, balance)


@pytest.mark.parametrize(
    ("holder", "name", "value", "told"),
    [
        ("vllm_config", "lora_config", SimpleNamespace(), "--enable-lora"),
        ("vllm_config", "speculative_config", SimpleNamespace(), "--speculative-config"),
        ("parallel_config", "pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode"),
    ],
)
def test_what_excludes_it_is_refused_by_flag(holder, name, value, told, mixture):
    made = engine(mixture, DYNAMIC)
    assert not refused(made)
    setattr(made if holder == "vllm_config" else getattr(made, holder), name, value)
    said = refused(made)
    assert told in said
    assert "eplb_config.dynamic_eplb" in said
