"""An unsupported model or setting is refused with the cause and the remedy."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.ended_process import (
    assert_explained,
    run_server_to_its_end,
    run_to_its_end,
)
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.fixture_types import StartEngine, Zoo
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.server_process import SMALL, VLLM

MODEL = "llama_head64_gqa4"
EXPERTS_MODEL = "qwen3_moe_softmax_top2_of_8"
TWO_RANKS: dict[str, Any] = {
    "distributed_executor_backend": "mp",
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
}

Refusal = Callable[..., str]


@pytest.fixture
def refusal(start_engine: Callable[..., EngineProcess]) -> Refusal:
    """Starts an engine, which must refuse and end; returns its output."""

    def refused(model: Path, **options: Any) -> str:
        with pytest.raises(EngineError) as error:
            start_engine(model, **options)
        return str(error.value)

    return refused


def assert_says(text: str, *words: str) -> None:
    assert [word for word in words if word not in text] == [], text


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"ascend_scheduler_confg": {"enabled": True}},
            ["'ascend_scheduler_confg'", "Did you mean 'ascend_scheduler_config'?"],
        ),
        ({"dbo": {"enable": True}}, ["'dbo.enable'", "Did you mean 'dbo.enabled'?"]),
        (
            {"enable_cpu_binding": "yes"},
            ["'enable_cpu_binding' is 'yes' (str)", "expected a valid boolean"],
        ),
        ({"torchair_graph_config": 3}, ["'torchair_graph_config' is 3 (int)", "expected"]),
    ],
    ids=["unknown_key", "unknown_inner_key", "ill_typed", "ill_typed_section"],
)
def test_an_additional_config_that_cannot_be_read_is_refused(config, words, zoo):
    assert_says(refusal_of(zoo(MODEL), additional_config=config), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(
            {"additional_config": {"torchair_graph_config": {"enable_multistream_moe": True}}},
            ["'torchair_graph_config.enable_multistream_moe'", "has no shared experts"],
            id="no_shared_experts",
        ),
        pytest.param(
            {
                "max_num_batched_tokens": 64,
                "additional_config": {"dbo": {"enabled": True, "num_ubatches": 65}},
            },
            ["dbo.num_ubatches = 65 is too large", "steps have at most 64 tokens"],
            id="more_parts_than_tokens",
        ),
        pytest.param(
            {
                "max_num_batched_tokens": 64,
                "additional_config": {
                    "dbo": {"enabled": True, "split": "token", "token_alignment": 48}
                },
            },
            ["dbo.token_alignment = 48 is too large: steps of at most 64 tokens"],
            id="no_cut",
        ),
        pytest.param(
            {"additional_config": {"sequence_parallel": {"enabled": True}}},
            ["sequence_parallel.enabled = true is not possible because there is one tensor-"],
            id="no_sequence_parallel",
        ),
        pytest.param(
            {
                "tensor_parallel_size": 2,
                "distributed_executor_backend": "mp",
                "hf_overrides": {"architectures": ["GemmaForCausalLM"]},
                "additional_config": {"sequence_parallel": {"enabled": True}},
            },
            [
                "sequence_parallel.enabled = true is not possible because the definition of Gemma",
                "ForCausalLM is not sequence parallel; those of DeepseekV2ForCausalLM, ",
                ", LlamaForCausalLM, MistralForCausalLM, ",
                "are. Remove it.",
            ],
            id="no_sequence_parallel_of_this_model",
        ),
    ],
)
def test_overlap_that_cannot_be_is_refused(options: dict[str, Any], words: list[str], zoo: Zoo):
    assert_says(refusal_of(zoo(MODEL), **options), *words)


def test_the_server_refuses_an_unknown_key_and_ends(zoo: Zoo, tmp_path: Path):
    ended = run_server_to_its_end(
        zoo(MODEL), *SMALL, "--additional-config", json.dumps({"refesh": True}),
        log=tmp_path / "log.txt",
    )  # fmt: skip
    assert_explained(ended, "no key 'refesh'", "Did you mean 'refresh'?")


def test_a_quantization_that_is_not_supported_is_refused(zoo: Callable[[str], Path]):
    text = refusal_of(zoo(MODEL), quantization="awq")
    assert_says(text, "--quantization 'awq'", "unquantized checkpoint")


@pytest.mark.nightly("refusals")
def test_more_ranks_than_devices_are_refused(zoo: Zoo, tmp_path: Path):
    ended = run_to_its_end(
        *VLLM, "serve", zoo(MODEL), *SMALL, "--tensor-parallel-size=4",
        log=tmp_path / "log.txt",
        environment={**os.environ, "VNPU_DEVICES": "2"},
    )  # fmt: skip
    assert_explained(ended, "4 NPUs are needed", "2 are visible", "Lower --tensor-parallel-size")


def test_an_expert_map_without_a_place_for_an_expert_is_refused(zoo: Zoo, tmp_path: Path):
    devices = [
        {"device_id": 0, "device_expert": [0, 1, 2, 3]},
        {"device_id": 1, "device_expert": [4, 5, 6, 3]},
    ]
    layers = [{"layer_id": layer, "device_count": 2, "device_list": devices} for layer in range(2)]
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"moe_layer_count": 2, "layer_list": layers}))
    text = refusal_of(
        zoo(EXPERTS_MODEL), **TWO_RANKS, additional_config={"expert_map_path": str(file)}
    )
    named = "layer_list.0.device_list has no place for the experts [7]"
    assert_says(text, f"Expert map '{file}'", named, "expert_map_path")


def test_experts_that_do_not_divide_among_the_ranks_are_refused(zoo: Zoo, tmp_path: Path):
    model = changed(zoo(EXPERTS_MODEL), tmp_path / "m", num_local_experts=7)
    text = refusal_of(model, **TWO_RANKS)
    assert_says(text, "7 experts do not divide among 2 ranks", "--tensor-parallel-size")


# --- models --------------------------------------------------------------------------------------


def changed(checkpoint: Path, directory: Path, **config: Any) -> Path:
    """A copy of a checkpoint with changes in its configuration."""
    shutil.copytree(checkpoint, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return directory


def test_an_unknown_architecture_is_refused(zoo: Zoo, tmp_path: Path):
    model = changed(zoo(MODEL), tmp_path / "m", architectures=["AbacusForCausalLM"])
    assert_says(refusal_of(model), "AbacusForCausalLM", "not supported")


def test_a_model_with_recurrent_state_is_refused(tmp_path: Path):
    transformers.OlmoHybridConfig(
        vocab_size=model_zoo.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        architectures=["BailingMoeV2_5ForCausalLM"],
    ).save_pretrained(tmp_path)
    model_zoo.write_tokenizer(tmp_path)
    text = refusal_of(tmp_path)
    assert_says(text, "recurrent state", "BailingMoeV2_5ForCausalLM", "Choose a")


def test_a_dtype_that_the_chip_lacks_is_refused(tiny_llama: Path, refusal: Refusal):
    chip = {"VNPU_SOC": "Ascend310P3"}
    text = refusal(tiny_llama, dtype="bfloat16", environment=chip)
    assert_says(text, "Ascend310P3 does not compute in bfloat16", "--dtype", "float16")


def test_a_kv_cache_that_does_not_fit_says_what_is_missing_and_what_would_fit(
    zoo: Zoo, start_engine: StartEngine, refusal: Refusal, tmp_path: Path
):
    # 2 KiB per token: the cache of one whole request is 128 MiB, two thirds of the device, which
    # has room for operators' workspaces beside it.
    model = changed(zoo(MODEL), tmp_path / "m", max_position_embeddings=65536)
    options = {
        "environment": {"VNPU_MEMORY": "192MiB"},
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.6,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
    }
    text = refusal(model, max_model_len=65536, **options)
    assert re.search(r"needs 128.25 MiB, \S+ MiB are left on npu:0, \S+ MiB are missing", text)
    fitting_len = re.search(r"lower --max-model-len to (\d+) or less", text)
    assert fitting_len, text
    with start_engine(model, max_model_len=int(fitting_len[1]), **options) as engine:
        assert len(engine.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=1))) == 1


def test_a_corrupt_checkpoint_is_refused(zoo: Zoo, refusal: Refusal, tmp_path: Path):
    model = changed(zoo(MODEL), tmp_path / "m")
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100] + b"\xff" * 100 + content[200:])
    assert_says(refusal(model), str(weights), "are damaged", "Download or copy")


@pytest.mark.nightly("refusals")
def test_a_truncated_checkpoint_is_refused_by_every_rank_and_ends_the_server(zoo, tmp_path):
    model = changed(zoo(MODEL), tmp_path / "m")
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    ended = run_server_to_its_end(
        model, *SMALL, "--tensor-parallel-size=2", log=tmp_path / "log.txt"
    )
    assert_explained(ended, str(weights), f"({len(content) // 2} bytes)", "Download or copy")


# --- requests ------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_model_is_refused_and_the_engine_goes_on(zoo, start_engine):
    with start_engine(zoo(MODEL)) as engine:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        with pytest.raises(EngineError, match="256") as error:
            engine.generate([{"prompt_token_ids": [1] * 300}], sampling)
        assert re.search(r"prompt.*(300|longer)", str(error.value), re.DOTALL)
        (output,) = engine.generate([{"prompt_token_ids": [1] * 3}], sampling)
        assert len(output.outputs[0].token_ids) == 4
