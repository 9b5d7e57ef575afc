"""Checkpoints and engines that the end-to-end tests share."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest

from vllm_davinci.vnpu import activate

# These tests run on virtual NPUs, however pytest was started.
activate()

import torch  # noqa: E402 - with torch_npu
import transformers  # noqa: E402

from vllm_davinci_testing.engines import model_zoo, speculating  # noqa: E402
from vllm_davinci_testing.engines.engine_process import EngineProcess  # noqa: E402
from vllm_davinci_testing.engines.fixture_types import Engines  # noqa: E402
from vllm_davinci_testing.engines.generating import assert_generates  # noqa: E402
from vllm_davinci_testing.engines.int8_checkpoint import write_int8  # noqa: E402
from vllm_davinci_testing.engines.likelihood import likelihood  # noqa: E402
from vllm_davinci_testing.engines.server_process import ServerProcess  # noqa: E402
from vllm_davinci_testing.engines.transformers_reference import TransformersReference  # noqa: E402
from vllm_davinci_testing.processes.hosts import Host, two_hosts  # noqa: E402


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a checkpoint of model_zoo.ZOO, written at its first use."""
    directory = tmp_path_factory.mktemp("zoo")

    @cache
    def checkpoint(name: str) -> Path:
        return model_zoo.write_checkpoint(model_zoo.BY_NAME[name], directory / name)

    return checkpoint


@pytest.fixture(scope="session")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the directory of a checkpoint of vision_zoo, written at its first use."""
    from vllm_davinci_testing.engines import vision_zoo  # imports transformers' processors

    directory = tmp_path_factory.mktemp("vision")
    return cache(lambda name: vision_zoo.write_vision_checkpoint(name, directory / name))


@pytest.fixture(scope="session")
def tiny_llama(repository: Path) -> Path:
    return repository / "checkpoints" / "tiny_llama"


@pytest.fixture(scope="session")
def tiny_deepseek(repository: Path) -> Path:
    return repository / "checkpoints" / "tiny_deepseek"


@pytest.fixture(scope="session")
def reference(zoo: Callable[[str], Path]) -> Callable[[str], TransformersReference]:
    """Returns a model of the zoo as transformers runs it."""
    return cache(lambda name: TransformersReference(zoo(name)))


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Starts engines in separate processes; the module's end stops them."""
    started: list[EngineProcess] = []

    def start(model: Path, **options: Any) -> EngineProcess:
        log = tmp_path_factory.mktemp("engine") / "log.txt"
        engine = EngineProcess(model, log, **options)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="module")
def exact_engine(
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
) -> Engines:
    """Starts an engine with a model of the zoo; checks that its tokens equal transformers'."""

    @contextmanager
    def start(
        model: str, prompts: list[list[int]], max_tokens: int, **options: Any
    ) -> Iterator[EngineProcess]:
        with start_engine(zoo(model), **options) as engine:
            assert_generates(engine, reference(model), prompts, max_tokens)
            yield engine

    return start


@pytest.fixture(scope="module")
def alone(start_engine: Callable[..., EngineProcess]) -> Callable[..., Any]:
    """Returns a single engine's answers, which a disaggregated pair must repeat."""
    from vllm_davinci_testing.engines.disaggregated_checks import answers_of_one  # starts servers

    return answers_of_one(start_engine)


@pytest.fixture(scope="module")
def undrafted(start_engine: Callable[..., EngineProcess]) -> Callable[[Path], list[list[int]]]:
    """Returns the tokens of `speculating`'s requests without drafts, computed once per
    checkpoint.
    """

    @cache
    def tokens(checkpoint: Path) -> list[list[int]]:
        with start_engine(checkpoint, **speculating.SMALL) as engine:
            return speculating.generate(engine)

    return tokens


@pytest.fixture(scope="module")
def drafting_engine(
    start_engine: Callable[..., EngineProcess], undrafted: Callable[[Path], list[list[int]]]
) -> Engines:
    """Starts an engine with drafts and race detection; checks that drafts change no token.

    plain: checkpoint of the engine without drafts, if different
    """

    @contextmanager
    def start(
        checkpoint: Path, options: dict[str, Any], plain: Path | None = None, **environment: str
    ) -> Iterator[EngineProcess]:
        expected = undrafted(plain or checkpoint)
        environment = {**speculating.RACES, **environment}
        with start_engine(checkpoint, environment=environment, **options) as engine:
            assert speculating.generate(engine) == expected
            yield engine

    return start


@pytest.fixture(scope="session")
def text(tiny_llama: Path) -> list[int]:
    """Tokens of a source file that both trained checkpoints can read."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    source = Path(json.__file__).read_text(encoding="utf-8")[6000:]
    return [tokenizer.bos_token_id, *tokenizer(source, add_special_tokens=False).input_ids[:400]]


@pytest.fixture(scope="session")
def quantize(tmp_path_factory: pytest.TempPathFactory, text: list[int]) -> Callable[..., Path]:
    """Writes an int8 copy of a float checkpoint, once per set of arguments; returns its path."""

    @cache
    def write(
        source: Path, kind: str, dtype: torch.dtype = torch.bfloat16, name: str = "shared"
    ) -> Path:
        return write_int8(source, tmp_path_factory.mktemp(name) / kind, kind, text, dtype)

    return write


@pytest.fixture(scope="module")
def likelihood_of(
    start_engine: Callable[..., EngineProcess], text: list[int]
) -> Callable[..., float]:
    """Starts an engine in bf16 and scores the text."""

    def score(model: Path, text: list[int] = text, **options: Any) -> float:
        with start_engine(
            model, **{"dtype": "bfloat16", "max_model_len": 512, **options}
        ) as engine:
            return likelihood(engine, text)

    return score


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    """A client of the module's server."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """64 prompts of 1 to 150 tokens, with lengths around a cache block of 128."""
    generator = random.Random(2)
    lengths = [1, 2, 127, 128, 129, 150] + [generator.randint(1, 150) for _ in range(58)]
    return [[generator.randrange(model_zoo.NUM_BYTES) for _ in range(n)] for n in lengths]
