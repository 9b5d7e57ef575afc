"""Every test here needs torch_npu, which needs CANN's libraries: a chip's, or else vnpu's."""

import contextlib

import vllm_davinci.vnpu

# Before torch. Refused where a real CANN is present, which then serves the tests.
with contextlib.suppress(vllm_davinci.vnpu.ActivationError):
    vllm_davinci.vnpu.activate()
