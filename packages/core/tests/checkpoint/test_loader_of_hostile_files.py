"""A checkpoint that is made to mislead loads as it is, or is refused by the name of a file."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_davinci.core.checkpoint.load_errors import explained
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.weight_files.files import INDEX_NAME
from vllm_davinci_testing.engines.loaded_model import LoadedModel

# In place of every value of a header or an index.
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**12, 2**62, 2**64, 2**70, 0.5, 1e400, "", "../x", "a\0b", "F16",
    "model-00001-of-00002.safetensors", [], [None], [0, 0], {}, {"a": 1},
)  # fmt: skip
PARTS = 24
LIMIT_S = 20

Mutation = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two files."""
    config = transformers.Qwen2Config(
        num_hidden_layers=1, num_key_value_heads=1, vocab_size=64, hidden_size=64,
        intermediate_size=96, num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("whole")
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    network.save_pretrained(directory, max_shard_size="40KB")
    assert len(files_of(directory)) > 1
    return directory


@pytest.fixture(scope="module")
def told() -> Iterator[Counter[str]]:
    """Counts of outcomes, which the last test prints (`pytest -s`)."""
    counts: Counter[str] = Counter()
    yield counts
    print("\nhostile checkpoints:", dict(sorted(counts.items())))


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def read(path: Path) -> tuple[Any, bytes]:
    """Header and content of a file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(header: Any, name: str, directory: Path) -> None:
    _, content = read(directory / name)
    data = json.dumps(header).encode()
    (directory / name).write_bytes(struct.pack("<Q", len(data)) + data + content)


def write_length(length: int, name: str, directory: Path) -> None:
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(struct.pack("<Q", length) + data[8:])


def write_index(index: Any, directory: Path) -> None:
    (directory / INDEX_NAME).write_text(json.dumps(index))


def cut(size: int, name: str, directory: Path) -> None:
    os.truncate(directory / name, size)


def replace_by(make: Callable[[Path], None], name: str, directory: Path) -> None:
    (directory / name).unlink()
    make(directory / name)


def spoilt(content: Any) -> Iterator[Any]:
    """The value with an odd one in each place, without each entry, and with its entries swapped."""
    for key in list(content if isinstance(content, dict) else range(len(content))):
        for odd in ODD:
            yield (
                {**content, key: odd}
                if isinstance(content, dict)
                else [odd if at == key else each for at, each in enumerate(content)]
            )
        without = copy.copy(content)
        del without[key]
        yield without
        if isinstance(content[key], dict | list):
            for inner in spoilt(content[key]):
                changed = copy.copy(content)
                changed[key] = inner
                yield changed


REPLACEMENTS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "an empty file": Path.touch,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a folder": lambda path: path.symlink_to("/"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
}


def mutations(whole: Path) -> Iterator[tuple[str, Mutation]]:
    """Kind of each, and what makes it of a copy."""
    file = files_of(whole)[-1]
    header, content = read(file)
    for changed in spoilt(header):
        yield "header", partial(write_header, changed, file.name)
    for odd in (None, [], 5, "text", {}):
        yield "header", partial(write_header, odd, file.name)
    length = file.stat().st_size - len(content) - 8
    for number in (0, 1, length - 1, length + 1, 10**8, 10**8 + 1, 60 << 30, 2**63, 2**64 - 1):
        yield "length of a header", partial(write_length, number, file.name)
    ends = {entry["data_offsets"][at] for entry in header.values() for at in (0, 1)
            if "data_offsets" in entry}  # fmt: skip
    begin = 8 + length
    for size in sorted({0, 1, 7, 8, 9, begin - 1, begin, *(begin + end for end in ends)}):
        for near in (size - 1, size, size + 1):
            if 0 <= near < file.stat().st_size:
                yield "truncation", partial(cut, near, file.name)
    index = json.loads((whole / INDEX_NAME).read_text())
    for changed in spoilt(index):
        yield "index", partial(write_index, changed)
    for odd in (None, [], 5, "text", {}):
        yield "index", partial(write_index, odd)
    for name in (file.name, INDEX_NAME):
        for make in REPLACEMENTS.values():
            yield "in place of a file", partial(replace_by, make, name)


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError where the work in it hangs."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not loaded after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(model: LoadedModel, directory: Path, right: dict[str, torch.Tensor]) -> str:
    for value in model.network.parameters():
        value.data.fill_(float("nan"))
    refusal = ""
    try:
        with limited(), explained(str(directory), None):
            model.load(directory)
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        line, named = refusal.splitlines()[0], [*directory.iterdir(), directory]
        assert any(path.name in line for path in named), f"names no file: {refusal}"
        return "refused by name"
    loaded = model.parameters()
    assert loaded.keys() == right.keys()
    assert all(torch.equal(loaded[name], right[name]) for name in right), "loaded other weights"
    return "loaded equal"


@pytest.mark.usefixtures("one_rank", "vllm_config")
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hostile_checkpoint_loads_equal_or_is_refused_by_name(
    part: int, whole: Path, told: Counter[str], tmp_path: Path
):
    register()
    model = LoadedModel(whole, torch.float16)
    model.load(whole)
    right = model.parameters()
    wrong = []
    for number, (kind, mutate) in enumerate(mutations(whole)):
        if number % PARTS != part:
            continue
        directory = tmp_path / str(number)
        shutil.copytree(whole, directory)
        mutate(directory)
        try:
            told[f"{kind}: {outcome(model, directory, right)}"] += 1
        except Exception as error:
            wrong.append(f"{number} {kind}: {type(error).__name__} {error}, {mutate}"[:900])
        shutil.rmtree(directory)
    assert not wrong, "\n".join(wrong)
