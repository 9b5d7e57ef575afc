"""Tests the virtual NPU even if a chip is present, for which `activate` refuses."""

import vllm_davinci.vnpu

vllm_davinci.vnpu.activate()
