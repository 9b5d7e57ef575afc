"""The guide's published commands equal rows of the deployments table, word by word."""

import re
import shlex
from pathlib import Path

import pytest

from vllm_davinci.planner.deployments.table import deployment

SERVER = "vllm.entrypoints.openai.api_server"


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each server command on a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    prompts = [
        shlex.split(each) for block in blocks for each in re.split(r"^\$ ", block, flags=re.M)
    ]
    return [words for words in prompts if SERVER in words]


@pytest.mark.parametrize(
    ("number", "name"), [(0, "deepseek-r1-mla-multistream"), (1, "deepseek-r1-dual-batch-overlap")]
)
def test_a_published_command_equals_its_deployment(number, name, repository):
    words = commands(repository / "docs" / "guides" / "published_commands.md")[number]
    at = words.index(SERVER)
    variables = dict(word.split("=", 1) for word in words[: at - 2])
    options = [word for word in words[at + 1 :] if not word.startswith("--model=")]
    row = deployment(name)
    assert row.arguments() == options
    assert row.environment == variables
    assert not row.left_out
