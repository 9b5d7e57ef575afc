"""The kit for a chip: what a device computes, refuses and costs, held against what we believe.

`vllm-davinci verify` runs the parts of `parts.py` one after another, each in a process of its own,
and keeps what each has found in a directory. Everything a part finds is a `Finding` with a name, so
that two reports can be compared name by name.
"""
