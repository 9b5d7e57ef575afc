"""The command `verify`, which `vllm-davinci` finds by its entry point."""

from vllm_davinci.meta.commands import Command
from vllm_davinci.verify import command

VERIFY = Command("does a device compute, refuse and cost what we expect?", command)
