"""Small engines for fault injection, and the program that runs each (see fault_points)."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vllm_davinci_testing.engines import vision_zoo
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
from vllm_davinci_testing.processes.ranks import free_port

# The checkout's folder, from which this package is installed.
CHECKPOINTS = Path(__file__).parents[5] / "checkpoints"
LLAMA, DEEPSEEK = CHECKPOINTS / "tiny_llama", CHECKPOINTS / "tiny_deepseek"

PROGRAM = """
import os
os.setsid()
file = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(file, 1)
os.dup2(file, 2)
print("session", os.getpid(), flush=True)
from vllm import LLM, SamplingParams

llm = LLM({model!r}, dtype="bfloat16", max_num_seqs=4, seed=0,
          kv_cache_memory_bytes=8 << 20, **{options!r})
{prompts}
greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
for output in llm.generate(prompts, greedy, use_tqdm=False):
    print("answer", list(output.outputs[0].token_ids), flush=True)
"""
TEXTS = 'prompts = [{"prompt_token_ids": [1, 2, 3 + i]} for i in range(3)]'
IMAGES = """
from vllm_davinci_testing.engines import pictures, vision_zoo
from vllm_davinci_testing.engines.split_settings import SPLIT_ALWAYS
prompts = [{"prompt": vision_zoo.prompt(1, "case"),
            "multi_modal_data": {"image": [pictures.image(56, 56, seed=i)]}} for i in range(3)]
"""


@cache
def vision_checkpoint() -> Path:
    """Writes a random image model that lasts as long as this process."""
    return vision_zoo.write_vision_checkpoint("qwen2_5_vl", Path(tempfile.mkdtemp()) / "vision")


@dataclass(frozen=True)
class Engine:
    """One engine, or data-parallel engines that step together.

    model:   a directory; None: an image model
    options: arguments of vllm.LLM
    engines: number of engines
    """

    options: Mapping[str, Any]
    model: Path | None = LLAMA
    engines: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def program(self, log: Path) -> str:
        """Returns the source of a program that logs to that file."""
        has_images = self.model is None
        options = {"max_model_len": 256 if has_images else 64, **self.options}
        return PROGRAM.format(
            log=str(log),
            model=str(vision_checkpoint() if self.model is None else self.model),
            options=options,
            prompts=IMAGES if has_images else TEXTS,
        )

    def places(self) -> list[dict[str, str]]:
        """Returns each program's variables: the index of its data-parallel engine."""
        port = free_port()
        if self.engines == 1:
            return [{}]
        return [
            {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": str(self.engines),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
            }
            for rank in range(self.engines)
        ]


EAGER = {"enforce_eager": True}
GRAPHS = {
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [4]}
}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
EXPERTS = {"enable_expert_parallel": True}
UBATCHES = {"additional_config": {"dbo": SPLIT_ALWAYS}}
DRAFTER = {
    "speculative_config": {
        "method": "eagle3",
        "model": str(CHECKPOINTS / "tiny_llama_eagle3"),
        "num_speculative_tokens": 2,
    }
}
ENGINES: dict[str, Engine] = {
    "one device, eager": Engine(EAGER),
    "one device, graphs": Engine(GRAPHS),
    "two devices, eager": Engine({**EAGER, **TWO_RANKS}),
    "two devices, graphs": Engine({**GRAPHS, **TWO_RANKS}),
    "two ubatches": Engine({**EAGER, **TWO_RANKS, **UBATCHES}),
    "two stages": Engine({**EAGER, **STAGES}),
    "two devices with experts": Engine({**EAGER, **TWO_RANKS, **EXPERTS}, DEEPSEEK),
    "two data-parallel engines": Engine({**EAGER, **EXPERTS}, DEEPSEEK, engines=2),
    "a drafter": Engine({**EAGER, **DRAFTER}),
    "images": Engine(EAGER, None),
}
