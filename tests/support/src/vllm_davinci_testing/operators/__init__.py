"""The device's operators: how tests call them, operands, and references."""
