"""Imports what a dry-run needs, for processes forked afterwards."""

import os

from vllm_davinci.planner.devices import MOST_DEVICES
from vllm_davinci.vnpu import VirtualDeviceConfig, activate

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
activate(VirtualDeviceConfig(devices=MOST_DEVICES, compute=False))

import vllm_davinci.planner.dry_run.engine  # noqa: E402, F401  (imports torch_npu)
