"""These tests are of the virtual NPU, whether or not a chip is present: then activate refuses."""

import vllm_davinci.vnpu

vllm_davinci.vnpu.activate()
