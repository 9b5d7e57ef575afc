"""Times one engine that stores prompts' blocks on the host and loads them again."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams

from serving.decode_engine import decode_engine
from vllm_davinci.core.kv_offload.host_rows import HostRows
from vllm_davinci.core.kv_offload.transfers import Direction, Pairs

# Like Qwen3-8B's cache in bf16: 36 layers' keys and values, 8 heads of 128, in blocks of 128
# tokens.
REGIONS, ROW_BYTES, BLOCKS = 72, 128 * 8 * 128 * 2, 8
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
WARM_UP_ROUNDS = 2


def measure(options: dict[str, Any]) -> dict[str, Any]:
    length = options["prompt_tokens"]
    llm = decode_engine(
        options["model"],
        4,
        max_model_len=length + 128,
        enable_prefix_caching=True,
        kv_offloading_size=1.0,
    )
    chosen = random.Random(0)

    def seconds_to_first_token(prompt: list[int]) -> tuple[float, int]:
        begin = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], FIRST_TOKEN, use_tqdm=False)
        return time.perf_counter() - begin, output.num_cached_tokens

    computed, loaded, loaded_tokens = [], [], 0
    for number in range(WARM_UP_ROUNDS + options["rounds"]):
        prompt = [chosen.randrange(5, 60) for _ in range(length)]
        fresh_s, hits = seconds_to_first_token(prompt)
        assert hits == 0
        # Blocks are stored one step after they are computed.
        seconds_to_first_token([chosen.randrange(5, 60) for _ in range(8)])
        assert llm.reset_prefix_cache()
        again_s, loaded_tokens = seconds_to_first_token(prompt)
        assert loaded_tokens >= length - 128, f"{loaded_tokens} tokens came from the host"
        if number >= WARM_UP_ROUNDS:
            computed.append(fresh_s)
            loaded.append(again_s)
    return {
        "computed_s": computed,
        "loaded_s": loaded,
        "loaded_tokens": loaded_tokens,
        **transfer_rates(),
    }


def transfer_rates() -> dict[str, float]:
    """Returns bytes per second of loads, stores and one copy of the same size: medians of 9, in
    turn.

    The loaded blocks are scattered on the device and adjacent on the host.
    """
    num_bytes = REGIONS * BLOCKS * ROW_BYTES
    regions = [
        torch.zeros(2 * BLOCKS, ROW_BYTES, dtype=torch.int8, device="npu") for _ in range(REGIONS)
    ]
    host = HostRows([ROW_BYTES] * REGIONS, [BLOCKS], 1)
    pairs = [Pairs([*range(REGIONS)], np.arange(0, 2 * BLOCKS, 2), np.arange(BLOCKS))]
    store, load = (Direction(regions, host, to_host=to_host) for to_host in (True, False))
    whole = torch.zeros(num_bytes, dtype=torch.int8, pin_memory=True)
    device = torch.zeros(num_bytes, dtype=torch.int8, device="npu")
    calls: dict[str, Callable[[], object]] = {
        "store_rate": lambda: store.submit(0, pairs),
        "load_rate": lambda: load.submit(0, pairs),
        "copy_rate": lambda: device.copy_(whole, non_blocking=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(9):
        for name, call in calls.items():
            torch.npu.synchronize()
            begin = time.perf_counter()
            call()
            torch.npu.synchronize()
            rates[name].append(num_bytes / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in rates.items()}
