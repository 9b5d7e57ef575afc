"""One rank of test_token_shards.py, run with torchrun's variables."""

import os

import torch
import torch_npu  # noqa: F401  registers the hccl backend
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from vllm_davinci.core.layers.quantized_activation import QuantizedActivation
from vllm_davinci.models.token_shards import TokenShards


def main(rank: int, world_size: int) -> None:
    torch.npu.set_device(rank)
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=world_size))
    with set_current_vllm_config(config):
        init_distributed_environment(world_size, rank, "env://", local_rank=rank, backend="hccl")
        initialize_model_parallel(world_size)
    for num_tokens in (1, world_size, 2 * world_size + 1, 7 * world_size):
        rows = torch.randn(num_tokens, 6, generator=torch.Generator().manual_seed(num_tokens))
        shards = TokenShards.of_step(num_tokens)
        shard = shards.shard(rows.npu())
        assert shard.shape == (shards.size, 6)
        own = rows[rank * shards.size : (rank + 1) * shards.size]
        assert torch.equal(shard.cpu()[: len(own)], own)
        assert torch.equal(shards.all_gather(shard).cpu(), rows)
        total = shards.all_gather(shards.reduce_scatter(rows.npu() * (rank + 1))).cpu()
        torch.testing.assert_close(total, rows * (world_size * (world_size + 1) / 2))
        integers = torch.arange(6 * num_tokens, dtype=torch.int8).view(num_tokens, 6)
        scales = torch.arange(num_tokens, dtype=torch.float32)
        own_integers, own_scales = shards.shard(integers.npu()), shards.shard(scales.npu()[:, None])
        norm = QuantizedActivation(own_integers, own_scales[:, 0], torch.bfloat16)
        gathered = shards.all_gather(norm)
        assert isinstance(gathered, QuantizedActivation)
        assert gathered.shape == (num_tokens, 6) and gathered.dtype == torch.bfloat16
        assert torch.equal(gathered.integers.cpu(), integers)
        assert gathered.scales is not None and torch.equal(gathered.scales.cpu(), scales)
    print(f"rank {rank} agrees")


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
