"""How int8 weights lie in device memory."""

from __future__ import annotations

import torch
import torch_npu

from vllm_davinci.core.errors import DeviceError

FRACTAL_NZ = 29  # aclFormat: 16 x 32 tiles, the matrix unit's own order


def arrange(weight: torch.Tensor, use_nz: bool) -> torch.Tensor:
    """The weight as the product takes it: [..., in, out].

    weight: [..., out, in] int8
    Returns a view of the same memory, or with `use_nz` a copy in the NZ layout. Raises DeviceError
    when the chip's libraries do not convert.
    """
    transposed = weight.detach().as_subclass(torch.Tensor).transpose(-1, -2)
    if not use_nz:
        return transposed
    try:
        tiles: torch.Tensor = torch_npu.npu_format_cast(transposed.contiguous(), FRACTAL_NZ)
        torch.accelerator.synchronize()  # the conversion's error comes with the next wait
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(
            "additional_config key 'enable_weight_nz_layout' is true, and this device's libraries "
            f"do not convert an int8 weight {list(weight.shape)} to the NZ layout: {reason}. "
            "Remove the key; the products take plain weights, too."
        ) from error
    return tiles
