"""The source of each value in an engine's configuration."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_davinci.core.config.described import described_only
from vllm_davinci.core.config.setting import Setting, Source
from vllm_davinci.core.features.report import feature_settings, option_settings, vllm_settings

MODEL = Path(__file__).parents[4] / "checkpoints" / "tiny_deepseek"


def made(additional_config: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
    with described_only():
        return EngineArgs(
            **{"model": str(MODEL), "additional_config": additional_config or {}, **options}
        ).create_engine_config()


def by_key(settings: list[Setting]) -> dict[str, Setting]:
    assert len({setting.key for setting in settings}) == len(settings)
    return {setting.key: setting for setting in settings}


def test_every_option_is_there_and_a_default_without_being_asked_for():
    found = by_key(option_settings(made()))
    one_rank = found.pop("sequence_parallel.enabled")
    assert one_rank[1:] == (False, Source.MODEL, "there is one tensor-parallel rank")
    assert {setting.source for setting in found.values()} == {Source.DEFAULT}
    assert {"dbo.enabled", "overlap", "torchair_graph_config.graph_batch_sizes"} <= set(found)


def test_features_that_the_engine_has_are_there_with_their_flag():
    found = by_key(feature_settings(made(enable_lora=True)))
    assert found["LoRA adapters"][1:] == (True, Source.FLAG, "--enable-lora")
    assert "dual-batch overlap" not in found


def test_a_feature_names_the_source_of_its_setting():
    graphs, overlap = "graphs of decode steps", "dual-batch overlap"
    config = made({"dbo": {"enabled": True}}, max_cudagraph_capture_size=4)
    found = by_key(feature_settings(config))
    assert found[graphs][1:] == (True, Source.DEFAULT, "-cc.cudagraph_mode")
    assert found[overlap][1:] == (True, Source.ADDITIONAL_CONFIG, "dbo.enabled")
    typed = {"cudagraph_mode": "typed", "max_cudagraph_capture_size": "--max... 4"}
    assert by_key(feature_settings(config, typed))[graphs].source == Source.FLAG
    sizes = by_key(vllm_settings(config, typed))["cudagraph_capture_sizes"]
    assert sizes[1:] == ([1, 2, 4], Source.FLAG, "doubling up to --max... 4")


def test_options_know_who_asked_for_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_DBO", "1")
    monkeypatch.setenv("VLLM_ENABLE_FUSED_EXPERTS_ALLGATHER_EP", "1")
    found = by_key(
        option_settings(
            made(
                {
                    "dbo": {"split": "token", "num_micro_batches": 2},
                    "overlap": "auto",
                    "step_costs": None,
                },
                tensor_parallel_size=2,
                dbo_prefill_token_threshold=99,
            )
        )
    )
    flag = "--dbo-prefill-token-threshold 99"
    assert found["dbo.min_total_tokens_to_split"][1:] == (99, Source.FLAG, flag)
    assert found["dbo.enabled"][1:] == (True, Source.VARIABLE, "VLLM_ASCEND_ENABLE_DBO=1")
    assert found["dbo.split"][1:] == ("token", Source.ADDITIONAL_CONFIG, "")
    assert found["dbo.num_ubatches"].reason == "as dbo.num_micro_batches"
    assert found["moe_communication"].source == Source.VARIABLE
    multistream = found["torchair_graph_config.enable_multistream_mla"]
    assert multistream.source == Source.MODEL
    assert multistream.reason.startswith("overlap = 'auto': ")


def test_other_keys_and_variables_in_use_are_shown_with_their_effect(monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_MLAPO", "0")
    found = by_key(option_settings(made({"refresh": True, "enable_graph_mode": True})))
    source = Source.ADDITIONAL_CONFIG
    assert found["refresh"][1:3] == (True, source)
    assert found["refresh"].reason.startswith("has no effect: ")
    assert found["torchair_graph_config.enabled"][1:] == (True, source, "as enable_graph_mode")
    assert found["VLLM_ASCEND_ENABLE_MLAPO"][1:3] == ("0", Source.VARIABLE)


def test_vllm_s_values_know_who_changed_them():
    config = made(
        {"ascend_scheduler_config": {"enabled": True, "max_num_seqs": 3}},
        load_format="safetensors",
        block_size=64,
        max_num_batched_tokens=2048,
    )
    flags = {"block_size": "--block-size 64", "max_num_batched_tokens": "typed"}
    found = by_key(vllm_settings(config, flags, {}))
    assert found["block_size"][1:3] == (128, Source.RELEASE)
    assert found["block_size"].reason.startswith("instead of 64: ")
    assert found["block_size"].reason.endswith("asked for: --block-size 64")
    assert found["max_num_batched_tokens"][1:] == (2048, Source.FLAG, "typed")
    assert found["max_num_seqs"][1:3] == (3, Source.ADDITIONAL_CONFIG)
    assert found["watermark"][1:3] == (0.01, Source.RELEASE)
    assert found["scheduler_cls"].source == Source.ADDITIONAL_CONFIG
    assert found["cudagraph_mode"][1:3] == ("FULL_DECODE_ONLY", Source.DEFAULT)
    assert found["cudagraph_capture_sizes"][1] == [1, 2, 3]
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    assert found[method][1:3] == ("spawn", Source.DEFAULT)
    forks = by_key(vllm_settings(config, flags, {method: "fork"}))
    assert forks[method][1:3] == ("fork", Source.VARIABLE)
    assert by_key(vllm_settings(made(enforce_eager=True), {}))["cudagraph_mode"][1:] == (
        "NONE",
        Source.FLAG,
        "--enforce-eager",
    )


@pytest.mark.parametrize(
    ("graph", "sizes", "reason"),
    [
        ({"graph_batch_sizes": [4]}, [4, 8], "torchair_graph_config.graph_batch_sizes"),
        ({"graph_batch_sizes_init": True}, [4, 8], "graph_batch_sizes_init"),
        ({}, [1, 8], "torchair_graph_config.enabled: one, and"),
    ],
)
def test_sizes_of_graphs_know_their_option(graph: dict[str, Any], sizes: list[int], reason: str):
    config = made({"torchair_graph_config": {"enabled": True, **graph}}, max_num_seqs=8)
    setting = by_key(vllm_settings(config, {}))["cudagraph_capture_sizes"]
    assert setting[1:3] == (sizes, Source.ADDITIONAL_CONFIG)
    assert reason in setting.reason


@pytest.mark.parametrize("enabled", [False, True])
def test_a_server_s_engine_derives_the_same_configuration_again(enabled: bool):
    graph = {"enabled": enabled, **({"graph_batch_sizes": [4]} if enabled else {})}
    config = made(
        {
            "torchair_graph_config": graph,
            "ascend_scheduler_config": {"enabled": True, "max_num_seqs": 8},
        }
    )
    expected = option_settings(config), vllm_settings(config, {}, {})
    again = pickle.loads(pickle.dumps(config))
    with described_only():
        again.__post_init__()
    assert (option_settings(again), vllm_settings(again, {}, {})) == expected


def test_heads_of_two_sizes_keep_the_platforms_attention(tmp_path: Path):
    """For Gemma 4's heads of two sizes, vLLM would choose Triton kernels."""
    transformers.Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        per_layer_config={"1": {"head_dim": 512}},
        layer_types=["sliding_attention", "full_attention"],
    ).save_pretrained(tmp_path)
    config = made(model=str(tmp_path), skip_tokenizer_init=True)
    assert config.attention_config.backend is None
