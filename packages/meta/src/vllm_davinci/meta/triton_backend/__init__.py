"""A Triton backend for NPUs that compiles nothing; vLLM's V2 runner requires one.

Triton finds it by the entry point `npu` in the group `triton.backends`. It is active if vLLM uses
V2 on an NPU, real or virtual, and no other backend is active; vLLM then considers Triton usable.
Kernels on served paths are replaced by `core.triton_kernels`, so that none is compiled; launching
any other one raises an error with its name.
"""
