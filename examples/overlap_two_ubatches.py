"""Runs two ubatches of a plain torch model: one computes while the other communicates.

On any accelerator of torch, or none: `vnpu run -- python examples/overlap_two_ubatches.py`.
"""

import torch

from vllm_davinci.multistream import Interleave, StreamPool, communicate

device = torch.accelerator.current_accelerator() or torch.device("cpu")


class Model(torch.nn.Module):  # an ordinary model without streams
    def __init__(self, num_layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, device=device) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            partial = layer(x)
            total = torch.empty_like(partial)
            communicate(lambda: total.copy_(partial))  # noqa: B023  stands for an all-reduce
            x = torch.relu(total)
        return x


with torch.inference_mode():
    model, batch = Model(), torch.randn(64, 256, device=device)
    run = Interleave(StreamPool())
    outputs = run.run([lambda half=half: model(half) for half in batch.chunk(2)])
    difference = (torch.cat(outputs) - torch.cat([model(half) for half in batch.chunk(2)])).abs()
print(f"{run.num_switches} turns on {device}, largest difference {difference.max().item()}")
