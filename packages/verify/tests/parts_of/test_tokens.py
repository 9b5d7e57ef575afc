"""The cases of each checkpoint."""

from pathlib import Path

from vllm_davinci.verify.parts_of.tokens import cases
from vllm_davinci.verify.settings import Settings

CHECKPOINTS = Path(__file__).parents[4] / "checkpoints"


def test_sparse_attention_is_compared_without_the_overlaps_that_it_excludes(tmp_path: Path) -> None:
    models = ("tiny_llama", "tiny_deepseek_v4")
    settings = Settings(checkpoints=tuple(str(CHECKPOINTS / name) for name in models))
    assert [case.name for case in cases(settings, tmp_path)] == [
        "tokens/tiny_llama",
        "tokens/tiny_llama with overlap",
        "tokens/tiny_deepseek_v4",
    ]
