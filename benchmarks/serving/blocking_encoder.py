"""Baseline for encoders: each block reads lengths back from the device."""

from typing import Any

import torch


def read_lengths_in_every_block(encoder: torch.nn.Module) -> list[Any]:
    """Makes each block read its attention lengths from the device; returns removable hooks.

    encoder: like Qwen3-VL's, whose blocks call `attn.attn`
    """

    def forget(module: torch.nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
        lengths = options["cu_seqlens"].clone()
        return arguments, {**options, "cu_seqlens": lengths, "sequence_lengths": None}

    blocks: Any = encoder.blocks
    return [block.attn.attn.register_forward_pre_hook(forget, with_kwargs=True) for block in blocks]


class BlockingEncoder:
    """Worker extension (`--worker-extension-cls`) that switches this baseline on and off."""

    _hooks: tuple[Any, ...] = ()

    def read_lengths_in_every_block(self) -> None:
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        self._hooks = tuple(read_lengths_in_every_block(model.visual))

    def keep_lengths_on_the_host(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
