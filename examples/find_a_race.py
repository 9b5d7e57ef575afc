"""Finds a missing wait: `VNPU_RACES=report vnpu run -- python examples/find_a_race.py`.

A side stream reads a tensor that the main stream is still writing. On a chip the result is
sometimes wrong; the virtual NPU always reports both lines.
"""

import torch


def overlapped_sum(wait: bool) -> torch.Tensor:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    weights = torch.randn(512, 512, device="npu")
    product = weights @ weights
    if wait:
        side.wait_stream(main)
    with torch.npu.stream(side):
        total = product.sum()  # this line races without a wait
    product.record_stream(side)
    main.wait_stream(side)
    return total


if __name__ == "__main__":
    print("with the wait:", float(overlapped_sum(wait=True)))
    print("without it:   ", float(overlapped_sum(wait=False)))
