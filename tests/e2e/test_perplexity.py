"""Shipped checkpoints have the perplexity on held-out text that their READMEs state."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import transformers

from vllm_davinci.meta.perplexity import Score, score, windows_of
from vllm_davinci_testing.engines.server_process import FORKED_WORKERS
from vllm_davinci_testing.processes.forked import run_command
from vllm_davinci_testing.processes.programs import run_to_end

COMMAND = "vllm_davinci.meta"
LIMIT_S = 900
WINDOW, TOKENS = 512, 16_384
OVERLAP = {"dbo": {"enabled": True}}
# Maximum perplexity relative to the float checkpoint.
AT_MOST = {"FLOAT": 1.0, "W8A16": 1.01, "W8A8_DYNAMIC": 1.01, "W8A8": 1.02}

CHEAPEST = {
    ("tiny_llama", "W8A16"),
    ("tiny_deepseek", "W8A8"),
    ("tiny_deepseek_v4", "W8A8_DYNAMIC"),
}  # at night; the command's test is there, too
NIGHTLY = pytest.mark.nightly("planning")


@pytest.fixture(scope="module")
def texts(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Returns held-out files, and a part of the training text for calibration."""
    directory = tmp_path_factory.mktemp("texts")
    program = (
        "import sys, pathlib, corpus; out = pathlib.Path(sys.argv[1]);"
        "[(out / f'{n}.txt').write_text(f.text) for n, f in enumerate(corpus.held_out_files())];"
        "share = 65536 // len(corpus.training_files()) + 1;"
        "(out / 'training').write_text("
        "chr(10).join(f.text[:share] for f in corpus.training_files()))"
    )
    subprocess.run(
        [sys.executable, "-c", program, directory], cwd=repository / "checkpoints", check=True,
        timeout=60,
    )  # fmt: skip
    return sorted(directory.glob("*.txt"), key=lambda path: int(path.stem)), directory / "training"


@pytest.fixture(scope="module")
def checkpoint(
    repository: Path, texts: tuple[list[Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    @cache
    def of_type(name: str, kind: str) -> Path:
        source = repository / "checkpoints" / name
        if kind == "FLOAT":
            return source
        made = tmp_path_factory.mktemp(name) / kind
        options = ["--calibrate", texts[1]] if kind == "W8A8" else []
        ended = run_command(COMMAND, "quantize", source, made, "--type", kind, *options)
        assert ended.status == 0, ended.output[-2000:]
        return made

    return of_type


def bound(repository: Path, name: str) -> float:
    """Returns the README's perplexity of the slice scored here."""
    card = (repository / "checkpoints" / name / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^\| perplexity, slice of 16384 tokens \| ([\d.]+) \|$", card, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.fixture
def require_stated(repository: Path) -> Callable[[str, str, Score], None]:
    def require(name: str, kind: str, found: Score) -> None:
        # The engine rounds to bf16, unlike the computation of the README's figure.
        at_most = bound(repository, name) * AT_MOST[kind] * 1.005
        assert found.tokens > 12_000
        assert found.perplexity <= at_most
        # the slice is the README's: other text would give another figure
        assert found.perplexity > at_most * 0.95

    return require


CASES = [
    pytest.param(name, kind, options, id=f"{name}-{kind}-{label}", marks=marks)
    for name, kinds in (
        ("tiny_llama", AT_MOST),
        ("tiny_deepseek", AT_MOST),
        ("tiny_deepseek_v4", ("FLOAT", "W8A8_DYNAMIC")),
    )
    for kind in kinds
    for label, options, marks in (
        ("whole", {}, NIGHTLY if (name, kind) in CHEAPEST else pytest.mark.thorough),
        ("overlap", OVERLAP, pytest.mark.thorough),
    )
    if (name, label) != ("tiny_deepseek_v4", "overlap")  # refused with sparse attention
]


@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_perplexity_equals_the_card(
    name, kind, options, texts, checkpoint, start_engine, require_stated
):
    model = checkpoint(name, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    windows = windows_of(tokenizer, [path.read_text() for path in texts[0]], WINDOW, TOKENS)
    options = {"additional_config": options} if options else {}
    with start_engine(model, dtype="bfloat16", max_model_len=1024, **options) as engine:
        require_stated(name, kind, score(engine, windows))


@NIGHTLY
def test_the_command_scores_the_same_text(texts, checkpoint, require_stated):
    name, kind = "tiny_llama", "W8A8"
    engine = ["--dtype=bfloat16", "--enforce-eager", f"--kv-cache-memory-bytes={96 << 20}"]
    options = [f"--tokens={TOKENS}", f"--window={WINDOW}", "--json"]
    done = run_to_end(
        [
            *(sys.executable, "-m", COMMAND, "perplexity", checkpoint(name, kind), *texts[0]),
            *(*options, "--", *engine),
        ],
        LIMIT_S,
        env={**os.environ, **FORKED_WORKERS},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    require_stated(name, kind, Score(**json.loads(done.stdout.splitlines()[-1])))
