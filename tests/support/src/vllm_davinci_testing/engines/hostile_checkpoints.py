"""Malicious checkpoints: every field, index value, length and kind of file is changed in turn.

A mutation changes a copy of the two-file checkpoint of `write_whole_checkpoint`.
"""

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

import torch
import transformers

from vllm_davinci.core.weight_files.files import INDEX_NAME

CONFIG_NAME = "config.json"
# Values that replace each value of a header or index.
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 10**12, 2**62, 2**64, 2**70, 0.5, 1e400, "", "../x", "a\0b", "F16",
    "model-00001-of-00002.safetensors", [], [None], [0, 0], {}, {"a": 1},
)  # fmt: skip
# Settings of every quantization method.
SECTION: dict[str, Any] = {
    "bits": 4, "group_size": 32, "dynamic": {"a": {"b": 1}}, "weight_block_size": [8, 8],
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "targets": ["Linear"],
        }
    },
}  # fmt: skip
# Cases of a test; each tests its share of the mutations.
PARTS = 24
LIMIT_S = 20

Mutation = Callable[[Path], None]


def write_whole_checkpoint(directory: Path) -> None:
    """Writes a checkpoint of one layer in two files."""
    config = transformers.Qwen2Config(
        num_hidden_layers=1, num_key_value_heads=1, vocab_size=64, hidden_size=64,
        intermediate_size=96, num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    network.save_pretrained(directory, max_shard_size="40KB")
    assert len(files_of(directory)) > 1


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def read(path: Path) -> tuple[Any, bytes]:
    """Reads header and content of a file."""
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


def write_json(name: str, content: Any, directory: Path) -> None:
    (directory / name).write_text(json.dumps(content))


def cut(size: int, name: str, directory: Path) -> None:
    os.truncate(directory / name, size)


def replace_by(make: Callable[[Path], None], name: str, directory: Path) -> None:
    (directory / name).unlink()
    make(directory / name)


def spoilt(content: Any) -> Iterator[Any]:
    """Yields copies of the value: an invalid value in each position, entries missing or swapped."""
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
    "a link out of the checkpoint": lambda path: path.symlink_to("/etc/passwd"),
    "nothing": lambda path: None,
}


def mutations(whole: Path) -> Iterator[tuple[str, Mutation]]:
    """Yields each mutation's kind, and a function that applies it to a copy."""
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
        yield "index", partial(write_json, INDEX_NAME, changed)
    for odd in (None, [], 5, "text", {}):
        yield "index", partial(write_json, INDEX_NAME, odd)
    for name in (file.name, INDEX_NAME):
        for make in REPLACEMENTS.values():
            yield "in place of a file", partial(replace_by, make, name)


def config_mutations(whole: Path) -> Iterator[tuple[str, Mutation]]:
    """Yields mutations of the configuration, which an engine reads before it loads."""
    config = json.loads((whole / CONFIG_NAME).read_text())
    for changed in spoilt(config):
        yield "configuration", partial(write_json, CONFIG_NAME, changed)
    for method in ("fp8", "awq", "gptq", "compressed-tensors"):
        for changed in spoilt({**SECTION, "quant_method": method}):
            content = {**config, "quantization_config": changed}
            yield "configuration", partial(write_json, CONFIG_NAME, content)
    for odd in (None, [], 5, "text", {}):
        yield "configuration", partial(write_json, CONFIG_NAME, odd)
    size = (whole / CONFIG_NAME).stat().st_size
    for near in (0, 1, size // 2, size - 2, size - 1):
        yield "truncation", partial(cut, near, CONFIG_NAME)
    for make in REPLACEMENTS.values():
        yield "in place of a file", partial(replace_by, make, CONFIG_NAME)


def copies(
    whole: Path, mutations: Iterator[tuple[str, Mutation]], part: int, room: Path
) -> Iterator[tuple[str, Path]]:
    """Yields kind and directory of each mutated copy; deletes the copy afterwards."""
    for number, (kind, mutate) in enumerate(mutations):
        if number % PARTS != part:
            continue
        directory = room / str(number)
        shutil.copytree(whole, directory)
        mutate(directory)
        yield kind, directory
        shutil.rmtree(directory)


def names_a_file_of(directory: Path, message: str) -> bool:
    """True if a message's first line names the checkpoint or one of its files."""
    line = message.splitlines()[0] if message else ""
    named = {directory.name, CONFIG_NAME, INDEX_NAME, *(p.name for p in directory.iterdir())}
    return any(name in line for name in named)


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError if the work in this context hangs."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def counted_outcomes(what: str) -> Iterator[Counter[str]]:
    """Yields counts of outcomes, and prints them afterwards (`pytest -s`)."""
    counts: Counter[str] = Counter()
    yield counts
    print(f"\nhostile checkpoints, {what}:", dict(sorted(counts.items())))
