"""Calls of operators as layers make them, with their definitions, in any model's sizes.

A family is a module whose `calls(model)` yields the calls of one model's layers. The virtual NPU's
tests make them in small sizes, `vllm-davinci verify` in released models' sizes.
"""
