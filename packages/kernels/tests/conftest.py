"""Registers the operators that the tests call as `torch.ops.vllm_davinci`."""

import vllm_davinci.kernels  # noqa: F401
