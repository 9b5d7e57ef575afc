"""Operators as layers call them, beside their definitions in plain torch on the CPU.

A family is a module whose `calls(model)` yields the operators of one model's layers.
"""
