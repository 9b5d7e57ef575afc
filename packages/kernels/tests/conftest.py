"""Every test needs torch_npu, which needs CANN's libraries: a chip's, or else vnpu's."""

import contextlib

from hypothesis import HealthCheck, settings

import vllm_davinci.vnpu

# A chip's libraries stay in place: the operators find their symbols in either.
with contextlib.suppress(vllm_davinci.vnpu.ActivationError):
    vllm_davinci.vnpu.activate()

settings.register_profile(
    "kernels",
    derandomize=True,  # a failure repeats on every machine
    deadline=None,
    max_examples=15,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kernels")
