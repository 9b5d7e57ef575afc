"""Puts the virtual NPU in place before any test imports torch."""

from hypothesis import HealthCheck, settings

import vllm_davinci.vnpu

vllm_davinci.vnpu.activate()

settings.register_profile(
    "vnpu",
    derandomize=True,  # a failure repeats on every machine
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("vnpu")
