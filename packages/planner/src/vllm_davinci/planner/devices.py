"""Virtual devices of a process that dry-runs."""

MOST_DEVICES = 32  # of torch_npu in a process; phantom ranks need none
