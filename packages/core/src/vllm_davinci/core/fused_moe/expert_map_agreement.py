"""Checks that all ranks that exchange tokens read the same expert map.

Each rank reads the file under that path on its own host. With different maps, tokens would go to
ranks without their expert and return wrong results, without an error.
"""

import hashlib
import os
import socket
from typing import Any

import torch.distributed as dist

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_map_file import read_expert_map


def check_expert_maps(path: str | None, group: dist.ProcessGroup) -> None:
    """Compares the expert map of this rank with the other ranks', which call this too.

    path:  `expert_map_path`, None if experts are divided in order
    group: ranks that exchange tokens, with a backend for the host

    Raises ConfigurationError on all ranks if one has another map than the first or cannot read its
    own, naming ranks and hosts.
    """
    own_error: ConfigurationError | None = None
    own = "experts are divided in order"
    if path is not None:
        try:
            text = read_expert_map(path).model_dump_json()
            own = f"SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        except ConfigurationError as error:
            own_error, own = error, str(error)
    who = f"rank {dist.get_rank()} (pid {os.getpid()} on {socket.gethostname()})"
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (who, path, own), group=group)
    if own_error is not None:
        raise own_error
    if len({what for _, _, what in gathered}) == 1:
        return
    raise ConfigurationError(
        "Ranks that exchange tokens have different expert maps: "
        + "; ".join(f"{who} has {path or 'none'}: {what}" for who, path, what in gathered)
        + ". Give additional_config key 'expert_map_path' the same file on every host."
    )
