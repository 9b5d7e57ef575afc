"""Imports what a dry-run needs, for processes forked afterwards."""

import os

from vllm_davinci.planner.dry_run.layout import MOST_DEVICES
from vllm_davinci.vnpu import VirtualDeviceConfig, activate

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
_VIRTUAL = VirtualDeviceConfig(devices=MOST_DEVICES, compute=False)
os.environ.update(_VIRTUAL.environment())  # under `vnpu run` the virtual NPU is active already
activate(_VIRTUAL)

import vllm_davinci.planner.dry_run.engine  # noqa: E402, F401  (imports torch_npu)
