"""Operators of the device: how tests call them, on what, and what they compare results with."""
