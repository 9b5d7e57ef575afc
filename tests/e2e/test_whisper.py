"""Whisper: the decoder attends to an audio encoder. Tokens, limits, server."""

import io
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import soundfile
import torch
import transformers
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.generating import COMPOSED, FUZZED
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.model_zoo import write_tokenizer
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.rounding import first_wrong_token
from vllm_davinci_testing.engines.server_process import ServerProcess
from vllm_davinci_testing.engines.transformers_reference import CLOSE
from vllm_davinci_testing.engines.whisper_checkpoint import (
    SAMPLING_RATE,
    SECONDS,
    START_ID,
    sound,
    write_whisper,
)

MAX_TOKENS = 12
THOROUGH = pytest.mark.thorough
GRAPHS = decode_graphs(2, 8)
TENSOR2: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
OPTIONS = {"max_model_len": 448, "limit_mm_per_prompt": {"audio": 1}}
# Seconds of audio, and prompt tokens; shorter audio is padded with silence.
CASES = [(3.0, 1), (0.5, 4), (2.0, 130), (3.0, 126), (1.5, 60), (4.5, 2)]


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper") / "model")


class Reference:
    """transformers' Whisper on the CPU in fp32."""

    def __init__(self, checkpoint: Path) -> None:
        self.network: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._extractor = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)

    @torch.inference_mode()
    def logits(self, request: dict[str, Any], tokens: list[int]) -> torch.Tensor:
        """Returns [tokens, vocabulary]: the logits that choose each of `tokens`."""
        waves, rate = request["encoder_prompt"]["multi_modal_data"]["audio"]
        features = self._extractor(waves, sampling_rate=rate, return_tensors="pt").input_features
        prompt = request["decoder_prompt"]["prompt_token_ids"]
        rows: torch.Tensor = self.network(
            input_features=features, decoder_input_ids=torch.tensor([[*prompt, *tokens]])
        ).logits[0]
        return rows[len(prompt) - 1 : -1]

    def assert_chosen(self, requests: list[dict[str, Any]], outputs: list[Any]) -> None:
        for request, output in zip(requests, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            assert len(tokens) >= MAX_TOKENS
            wrong = first_wrong_token(
                self.network, lambda r=request, t=tokens: self.logits(r, t), tokens
            )
            assert wrong is None, wrong


@pytest.fixture(scope="module")
def reference(whisper: Path) -> Reference:
    return Reference(whisper)


def request(number: int, seconds: float, num_tokens: int) -> dict[str, Any]:
    tokens = [(31 * number + 7 * place) % 256 for place in range(num_tokens - 1)]
    return {
        "encoder_prompt": {
            "prompt": "",
            "multi_modal_data": {"audio": (sound(number, seconds), SAMPLING_RATE)},
        },
        "decoder_prompt": {"prompt_token_ids": [START_ID, *tokens]},
    }


def requests() -> list[dict[str, Any]]:
    return [request(number, *case) for number, case in enumerate(CASES)]


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        # Chunked prompts run beside decodes, some from graphs.
        pytest.param(
            {**GRAPHS, "max_num_batched_tokens": 448, "max_num_seqs": 4}, FUZZED, id="graphs_races"
        ),
        pytest.param({}, {}, id="eager", marks=THOROUGH),
        pytest.param({**TENSOR2, **GRAPHS}, FUZZED, id="tensor2_graphs_races", marks=THOROUGH),
        pytest.param({"async_scheduling": False}, FUZZED, id="synchronous", marks=THOROUGH),
        pytest.param(COMPOSED, {}, id="composed", marks=THOROUGH),
    ],
)
def test_tokens_equal_those_of_transformers(options, environment, whisper, reference, start_engine):
    asked = requests()
    with start_engine(whisper, environment=environment, **OPTIONS, **options) as engine:
        outputs = engine.generate(asked, greedy())
        again = engine.generate(asked[::-1], greedy())[::-1]
        replays = engine.on_workers("graph_replays")
    reference.assert_chosen(asked, outputs)
    assert [each.outputs[0].token_ids for each in again] == [
        each.outputs[0].token_ids for each in outputs
    ]
    # Each request has its own audio, and most texts differ.
    assert len({tuple(each.outputs[0].token_ids) for each in outputs}) >= len(asked) - 2
    if "compilation_config" in options:
        assert all(sum(of_worker.values()) > 5 for of_worker in replays)


@THOROUGH
def test_a_preempted_request_answers_as_one_that_was_not(whisper, reference, start_engine):
    """A preempted request's encoder runs again, together with new requests' encoders."""
    asked = [request(number, 3.0, 100 + 5 * (number % 6)) for number in range(12)]
    few_blocks = {"kv_cache_memory_bytes": 24 * (256 << 10), "disable_log_stats": False}
    with start_engine(whisper, environment=FUZZED, **OPTIONS, **few_blocks) as engine:
        outputs = engine.generate(asked, greedy(60))
        preempted = engine.metrics()["vllm:num_preemptions"]
    assert preempted > 0
    reference.assert_chosen(asked, outputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@THOROUGH
def test_16_bits_on_a_strict_chip_choose_as_well(dtype, whisper, reference, start_engine):
    asked = requests()
    with start_engine(whisper, dtype=dtype, **OPTIONS, **GRAPHS) as engine:
        outputs = engine.generate(asked, greedy())
    gaps = []
    for each, output in zip(asked, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        rows = reference.logits(each, tokens)
        chosen = rows.gather(1, torch.tensor([tokens]).T)[:, 0]
        gaps.append((rows.max(dim=1).values - chosen) / rows.std(dim=1))
    found = torch.cat(gaps)
    assert found.max() <= CLOSE
    assert (found > 0).float().mean() < 0.1


@THOROUGH
def test_what_an_encoder_decoder_does_not_do_is_turned_off_or_refused(whisper, tmp_path):
    asked = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    with EngineProcess(whisper, tmp_path / "log.txt", **OPTIONS, **asked) as engine:
        outputs = [engine.generate(requests()[2:3], greedy(4)) for _ in range(2)]
        with pytest.raises(EngineError, match=r"(?i)audio"):
            engine.generate(
                [
                    {
                        "encoder_prompt": {
                            "prompt": "",
                            "multi_modal_data": {"audio": [(sound(0), SAMPLING_RATE)] * 2},
                        },
                        "decoder_prompt": {"prompt_token_ids": [START_ID]},
                    }
                ],
                greedy(4),
            )
        engine.abort_all()
        after = engine.generate(requests()[2:3], greedy(4))
        said = engine.log_text()
    assert "do not support chunked prefill nor prefix caching; disabling both" in said
    assert all(output.num_cached_tokens in (0, None) for [output] in outputs)
    assert after[0].outputs[0].token_ids == outputs[0][0].outputs[0].token_ids


def test_another_model_of_this_kind_is_refused_by_name(tmp_path: Path) -> None:
    """The configuration is minimal, because the engine reads nothing else before it refuses."""
    architecture = "NemotronParseForConditionalGeneration"
    transformers.BartConfig(architectures=[architecture]).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    said = rf"{architecture} of .* needs cross-attention \(encoder-decoder other than Whisper\)"
    assert re.search(said, refusal_of(tmp_path / "model"))


@THOROUGH
def test_a_server_transcribes(whisper: Path, reference: Reference, tmp_path: Path) -> None:
    file = io.BytesIO()
    soundfile.write(file, sound(1, 2 * SECONDS), SAMPLING_RATE, format="WAV", subtype="FLOAT")
    server = ServerProcess(
        whisper,
        tmp_path / "log.txt",
        "--dtype=float32",
        "--max-model-len=448",
        f"--kv-cache-memory-bytes={96 << 20}",
    )
    try:
        server.wait_until_ready()
        url = f"{server.url}/v1/audio/transcriptions"
        form = {"model": str(whisper), "language": "en", "temperature": "0"}
        answers = [
            httpx.post(
                url, data=form, files={"file": ("a.wav", file.getvalue())}, timeout=240
            ).raise_for_status()
            for _ in range(2)
        ]
        broken = httpx.post(url, data=form, files={"file": ("a.wav", b"nothing")}, timeout=240)
        assert broken.status_code == 400
    finally:
        server.kill()
    assert answers[0].json()["text"]
    assert answers[0].json()["text"] == answers[1].json()["text"]
