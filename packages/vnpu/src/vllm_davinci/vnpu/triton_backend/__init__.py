"""A Triton backend that runs kernels on virtual NPUs, with no compiler.

Triton finds it by the entry point `vnpu` in the group `triton.backends`. It is active with
VNPU_TRITON=1. `ttir` parses Triton's intermediate representation, `program` lowers it to
instructions, and vnpu's C++ (csrc/triton) executes them as a task of the stream.
"""
