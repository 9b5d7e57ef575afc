"""Operators of the device: how tests call them, their operands, and their references."""
