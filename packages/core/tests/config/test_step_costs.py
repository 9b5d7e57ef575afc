"""Files of durations of steps: those of another engine are refused by what differs."""

import json
from pathlib import Path

import pytest
from vllm.config import DeviceConfig, ModelConfig, VllmConfig

from vllm_davinci.core.config.step_costs import engine_of_costs, refuse_costs_of_others
from vllm_davinci.core.errors import ConfigurationError

MODEL = Path(__file__).parents[4] / "checkpoints" / "tiny_llama"


@pytest.fixture
def asked(vllm_config: VllmConfig) -> VllmConfig:
    return VllmConfig(
        device_config=DeviceConfig(device="npu"), model_config=ModelConfig(str(MODEL))
    )


def test_a_file_for_this_engine_is_taken(asked: VllmConfig, tmp_path: Path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"engine": engine_of_costs(asked), "steps": []}))
    refuse_costs_of_others(str(file), asked)


@pytest.mark.parametrize(
    ("name", "value"),
    [("chip", "Ascend310P3"), ("tensor_parallel_size", 16), ("architecture", "LlamaForever")],
)
def test_a_file_for_another_is_refused_by_what_differs(
    asked: VllmConfig, tmp_path: Path, name: str, value: object
):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"engine": engine_of_costs(asked) | {name: value}}))
    with pytest.raises(ConfigurationError, match=f"another engine: {name} {value!r}, here"):
        refuse_costs_of_others(str(file), asked)


@pytest.mark.parametrize("content", ["", "[]", '{"steps": []}', '{"engine": 3}'])
def test_a_file_that_does_not_say_whom_it_is_for_is_refused(
    asked: VllmConfig, tmp_path: Path, content: str
):
    file = tmp_path / "costs.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="does not say what engine it was made for"):
        refuse_costs_of_others(str(file), asked)


def test_a_missing_file_is_told(asked: VllmConfig, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="is no file"):
        refuse_costs_of_others(str(tmp_path / "none.json"), asked)
