"""A pytest plugin that prepares a process like the worker before it creates the runner.

Tests construct runners without a worker. vLLM's runner uses `torch.cuda.Stream` and a load format
that a plugin registers; its rejection sampler launches kernels that have stand-ins.
"""

from vllm.plugins import load_general_plugins

from vllm_davinci.core.device import torch_cuda_names
from vllm_davinci.core.runner.buffers import leave_out_uva
from vllm_davinci.core.triton_kernels import registration

load_general_plugins()
torch_cuda_names.install()
registration.register()
leave_out_uva()
