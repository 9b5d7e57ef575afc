"""Calls of operators as layers make them, each beside its definition, in any model's sizes.

A family is a module whose `calls(model)` yields the operators of one model's layers. The tests of
the virtual NPU make them in small sizes, `vllm-davinci verify` in those of released models.
"""
