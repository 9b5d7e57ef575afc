"""Puts the virtual NPU in place before any test imports torch."""

import pathlib
import sys

from hypothesis import HealthCheck, settings

import vllm_davinci.vnpu

vllm_davinci.vnpu.activate()
# Test modules import `comparison` and `strategies` by name, whatever directory pytest starts in.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

settings.register_profile(
    "vnpu",
    derandomize=True,  # a failure repeats on every machine
    deadline=None,
    max_examples=25,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("vnpu")
