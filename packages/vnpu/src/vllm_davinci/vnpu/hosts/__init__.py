"""Connects ranks on several hosts, through torch's TCPStore and gloo.

Only the device calls these modules, when it creates a group of ranks.
"""
