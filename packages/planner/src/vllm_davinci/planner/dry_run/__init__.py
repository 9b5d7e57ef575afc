"""`vllm-davinci dry-run`: a model at its full size on a modelled machine, with no NPU.

vLLM's engine, torch_npu and our code run as they are, as one rank of the group; the virtual NPU
reserves memory without touching it, computes nothing, and models when a chip would have done each
task. The other ranks are phantoms, which at every moment do what this rank does.
"""
