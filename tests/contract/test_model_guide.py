"""The guide to new models shows a real one: one file and one row, served by vLLM."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import copied, insert, said_in

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "add_a_model.md").read_text(encoding="utf-8")
MODELS = ROOT / "packages" / "models" / "src" / "vllm_davinci" / "models"
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_davinci.models import registry

def generated(**fields):
    engine = LLM(sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True,
                 hf_overrides=fields, num_gpu_blocks_override=8)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    tokens = engine.generate([{"prompt_token_ids": [5, 6, 7]}], greedy)[0].outputs[0].token_ids
    del engine
    return list(tokens)

def toy(limit):
    return generated(architectures=["ToyForCausalLM"], swiglu_limit=limit)

if __name__ == "__main__":
    limits = [json.loads(limit) for limit in sys.argv[2:]]
    print(json.dumps({"file": registry.__file__, "llama": generated(),
                      "toys": [toy(limit) for limit in limits]}))
"""


@pytest.mark.nightly("layouts")
def test_a_model_is_one_file_and_one_row(tmp_path: Path) -> None:
    definition, row = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    copy = copied(MODELS, tmp_path)
    (copy / "toy.py").write_text(definition, encoding="utf-8")
    insert(copy / "registry.py", "MODELS = {", "\n" + row.rstrip())
    seen = said_in(tmp_path, PROGRAM, str(ROOT / "checkpoints" / "tiny_llama"), "1e9", "1e-3")
    unlimited, limited = seen["toys"]
    assert unlimited == seen["llama"] != limited


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:packages|tests|docs)/[\w./]+)`", GUIDE)))
)
def test_names_in_the_guide_exist(path: str) -> None:
    assert (ROOT / path).exists()
