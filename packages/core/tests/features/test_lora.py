"""Unsupported adapters end the start with the option's name."""

from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

MODEL = Path(__file__).parents[4] / "checkpoints" / "tiny_deepseek"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fully_sharded_loras": True}, "--fully-sharded-loras"),
        ({"lora_dtype": "bfloat16"}, "--lora-dtype bfloat16"),
        ({"enable_tower_connector_lora": True}, "--enable-tower-connector-lora"),
        ({"runner": "pooling"}, "--runner pooling is not supported with --enable-lora"),
        (
            {"lora_target_modules": ["experts"], "data_parallel_size": 2},
            "--lora-target-modules experts with --data-parallel-size",
        ),
        ({"enable_moe_shared_loras": True}, "--enable-moe-shared-loras"),
        ({"enable_mixed_moe_lora_format": True}, "--enable-mixed-moe-lora-format"),
    ],
)
def test_options_unsupported_with_adapters_are_refused_in_one_line(options, told):
    arguments = EngineArgs(model=str(MODEL), dtype="float32", enable_lora=True, **options)
    with pytest.raises(ValueError, match=told) as caught:
        arguments.create_engine_config()
    lines = [line for line in str(caught.value).splitlines() if "not supported" in line]
    assert len(lines) == 1
    assert "vllm-davinci-core" in lines[0] and "Remove" in lines[0]


def test_adapters_of_other_layers_start_between_data_parallel_ranks():
    config = EngineArgs(
        model=str(MODEL),
        enable_lora=True,
        lora_target_modules=["q_proj", "o_proj"],
        data_parallel_size=2,
    ).create_engine_config()
    assert config.lora_config.target_modules == ["q_proj", "o_proj"]
