"""One rank of test_hccl_buffers.py: `hccl_buffers_rank.py CHECKPOINT`, torchrun's variables.

The layout has two DP ranks of two TP ranks, and two ranks per expert. Prints the device memory that
each group's first collective takes after communicators exist.
"""

import json
import os
import sys

import torch
import torch_npu  # noqa: F401  registers the hccl backend
from vllm.config import (
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.distributed.hccl_buffers import make_communicators
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.core.fused_moe.process_groups import (
    expert_group,
    groups_of_experts,
    init_expert_groups,
)


def main(rank: int, port: int, checkpoint: str) -> None:
    dp_rank, tp_rank = divmod(rank, 2)
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    config = VllmConfig(
        model_config=ModelConfig(checkpoint),
        device_config=DeviceConfig(device="npu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=2,
            data_parallel_size=2,
            data_parallel_rank=dp_rank,
            data_parallel_size_local=2,
            data_parallel_master_ip="127.0.0.1",
            _data_parallel_master_port_list=[port],
            distributed_executor_backend="mp",
        ),
        additional_config={"expert_tensor_parallel_size": 2},
    )
    with set_current_vllm_config(config):
        init_distributed_environment(2, tp_rank, f"tcp://127.0.0.1:{port}", rank, backend="hccl")
        initialize_model_parallel(2, 1)
        init_expert_groups(config, "hccl")
        whole = torch.npu.mem_get_info()[0]
        make_communicators(config, device, groups_of_experts())
        groups = {
            "tp": get_tp_group(),
            "dp": get_dp_group(),
            "ep": get_ep_group(),
            "experts": expert_group(expert_layout(config.parallel_config, get_config(config))),
        }
        made = torch.npu.mem_get_info()[0]
        taken = {"made": whole - made}
        for name, group in groups.items():
            before = torch.npu.mem_get_info()[0]
            torch.distributed.all_reduce(torch.zeros(1, device=device), group=group.device_group)
            torch.npu.synchronize()
            taken[name] = before - torch.npu.mem_get_info()[0]
        for group in groups.values():
            torch.distributed.barrier(group.cpu_group)
    print(f"taken {json.dumps(taken)}", flush=True)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), sys.argv[1])
