"""One rank of test_completeness_ranks.py: `completeness_rank.py SETTING`, a JSON.

Loads several checkpoints into the rank's part of a model; prints "said: " and the errors as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from vllm_davinci.core.errors import CoreError
from vllm_davinci.core.out_of_tree import register
from vllm_davinci_testing.engines.loaded_model import LoadedModel


def main(setting: dict[str, list[str]]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    layout = setting["layout"]
    torch.npu.set_device(rank)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="npu"))):
        init_distributed_environment(world, rank, "env://", rank, "gloo")
        initialize_model_parallel(
            layout.get("tensor_parallel_size", 1), layout.get("pipeline_parallel_size", 1)
        )
    register()
    said = {}
    model = LoadedModel(Path(setting["checkpoints"][0]), device=rank, **layout)
    for checkpoint in setting["checkpoints"]:
        try:
            model.load(Path(checkpoint))
        except CoreError as error:
            said[Path(checkpoint).name] = str(error)
    print(f"said: {json.dumps(said)}", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
