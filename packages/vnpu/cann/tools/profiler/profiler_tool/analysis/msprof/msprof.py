"""Where CANN's msprof has its exporter: torch_npu wants this file beside the command."""

import runpy

runpy.run_module("vllm_davinci.vnpu.msprof", run_name="__main__", alter_sys=True)
