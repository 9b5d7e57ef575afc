"""The process of one engine: `python -m vllm_davinci.verify.engine_process JSON`.

The engine computes in this process, so that the device's clock and the profiler cover it. Prints
JSON: tokens of each prompt, and seconds.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from vllm_davinci.verify.ranks import ANSWER

PROMPTS = ("def ", "import ", "class ", "    for name in ", "if __name__ == ", "return self.")
TOKENS = 24
# Splits every step that can be split, to check that tokens stay the same.
OVERLAP = {
    "overlap": "published",
    "dbo": {
        "decode": True,
        "min_total_tokens_to_split": 2,
        "min_prefill_tokens_to_split": 1,
        "min_decode_tokens_to_split": 2,
        "imbalance_ratio": 0.5,
    },
}


@dataclass(frozen=True)
class EngineRun:
    """
    overlaps: True: with every overlap that the model supports; False: with none
    profile:  directory for torch_npu's profiler; "" for none
    ranks:    tensor-parallel ranks; each is a process of this program, identified by RANK and
              WORLD_SIZE, with its part of the engine
    """

    model: str
    overlaps: bool
    profile: str = ""
    ranks: int = 1

    def encoded(self) -> str:
        return json.dumps(asdict(self))


def main(run: EngineRun) -> dict[str, Any]:
    """Generates once to warm up, once for tokens and time, and three tokens under the profiler."""
    from vllm import LLM, SamplingParams

    from vllm_davinci.verify.device import Device

    rank = int(os.environ.get("RANK", "0"))

    llm = LLM(
        model=run.model,
        dtype="bfloat16",
        seed=0,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        tensor_parallel_size=run.ranks,
        distributed_executor_backend="external_launcher" if run.ranks > 1 else None,
        additional_config=OVERLAP if run.overlaps else {"overlap": "off"},
    )

    def generate(tokens: int) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return llm.generate(list(PROMPTS), sampling, use_tqdm=False)

    generate(2)
    device = Device(rank)
    found: list[Any] = []
    begin = time.monotonic()
    seconds = device.seconds_of(lambda: found.extend(generate(TOKENS)))
    answer = {
        "prompts": [list(each.prompt_token_ids) for each in found],
        "tokens": [list(each.outputs[0].token_ids) for each in found],
        "seconds": seconds,
        "host_seconds": time.monotonic() - begin,
    }
    if run.profile and rank == 0:
        _profile(run.profile, lambda: generate(3))
    elif run.profile:  # takes part in the collectives
        generate(3)
    return answer


def _profile(directory: str, work: Any) -> None:
    from torch_npu import npu
    from torch_npu.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.NPU],
        on_trace_ready=tensorboard_trace_handler(directory),
    ):
        work()
        npu.synchronize()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    print(ANSWER + json.dumps(main(EngineRun(**json.loads(sys.argv[1])))), flush=True)
    # Skips the engine's exit handlers, which would destroy groups that torch has destroyed.
    os._exit(0)
