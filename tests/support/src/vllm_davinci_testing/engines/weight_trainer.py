"""A trainer's program: joins a server's workers over HCCL and sends them checkpoints in turn.

Arguments: the server's URL, number of its workers, device of the trainer, checkpoints in turn.
After each checkpoint it prints a line and waits for one, so that the test can query the server.
"""

import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from vllm_davinci.core.weight_transfer.hccl_engine import HCCLTrainerInitInfo
from vllm_davinci_testing.processes.ranks import free_port

BUFFER_BYTES = 1 << 20  # smaller than the largest tensor, larger than many others


class CheckpointSource(WeightSource):
    """A directory's tensors on the host; `read` loads other tensors with the same names."""

    def __init__(self, checkpoint: Path) -> None:
        self.read(checkpoint)

    def read(self, checkpoint: Path) -> None:
        files = sorted(checkpoint.glob("*.safetensors"))
        self._tensors: dict[str, torch.Tensor] = {
            name: each for file in files for name, each in load_file(file).items()
        }

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def main(url: str, num_workers: str, device: str, *checkpoints: str) -> None:
    torch.npu.set_device(int(device))
    source = CheckpointSource(Path(checkpoints[0]))
    trainer = WeightTransferTrainerFactory.trainer_init(
        HCCLTrainerInitInfo("127.0.0.1", free_port(), 1 + int(num_workers), BUFFER_BYTES, rank=0),
        client=HTTPVLLMWeightSyncClient(url),
        source=source,
    )
    for checkpoint in checkpoints:
        source.read(Path(checkpoint))
        trainer.send_weights()
        print(checkpoint, flush=True)
        sys.stdin.readline()
    trainer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
