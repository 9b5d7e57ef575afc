"""A backend of Triton for NPUs that compiles nothing: vLLM's V2 runner asks for one.

Triton finds it by the entry point `npu` in the group `triton.backends`. It is active where vLLM is
to use V2 on an NPU, a chip's or a virtual one, and no other backend is; vLLM then takes Triton for
usable. The kernels on the paths that are served have stand-ins (`core.triton_kernels`), so that
none is compiled; one without a stand-in ends with its name here.
"""
