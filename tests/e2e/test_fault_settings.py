"""Unsupported models and settings are refused with cause and remedy."""

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
Refusal = Callable[..., str]


@pytest.fixture
def refusal(start_engine: Callable[..., EngineProcess]) -> Refusal:
    """Starts an engine that must refuse its settings and end; returns its output."""

    def refused(model: Path, **options: Any) -> str:
        with pytest.raises(EngineError) as error:
            start_engine(model, **options)
        return str(error.value)

    return refused


def assert_says(text: str, *words: str) -> None:
    assert [word for word in words if word not in text] == [], text


# --- settings ------------------------------------------------------------------------------------


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


# --- models --------------------------------------------------------------------------------------


def changed(checkpoint: Path, directory: Path, **config: Any) -> Path:
    """Copies a checkpoint with changes to its configuration."""
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


def test_a_kv_cache_that_does_not_fit_names_the_missing_memory_and_a_size_that_fits(
    zoo: Zoo, start_engine: StartEngine, refusal: Refusal, tmp_path: Path
):
    # 2 KiB per token: one whole request needs a cache of 128 MiB, which is two thirds of the
    # device; operators' workspaces need the rest.
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


def test_a_prompt_longer_than_the_model_is_refused_and_the_engine_continues(zoo, start_engine):
    with start_engine(zoo(MODEL)) as engine:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        with pytest.raises(EngineError, match="256") as error:
            engine.generate([{"prompt_token_ids": [1] * 300}], sampling)
        assert re.search(r"prompt.*(300|longer)", str(error.value), re.DOTALL)
        (output,) = engine.generate([{"prompt_token_ids": [1] * 3}], sampling)
        assert len(output.outputs[0].token_ids) == 4
