"""Stands in for the exporter of CANN's msprof: torch_npu requires this file beside the command."""

import runpy

runpy.run_module("vllm_davinci.vnpu.msprof", run_name="__main__", alter_sys=True)
