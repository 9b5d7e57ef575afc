"""Compares what a device computes, refuses and costs with what vllm-davinci expects.

`vllm-davinci verify` runs the parts of `parts.py` one after another, each in a process of its own,
and stores their results in a directory. Every result is a named `Finding`, so that two reports can
be compared name by name.
"""
