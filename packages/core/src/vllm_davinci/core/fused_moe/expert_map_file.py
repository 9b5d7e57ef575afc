"""Which rank has which experts, as a file says.

A rank's experts have slots 0, 1, ...; slots numbered over all ranks are the physical experts, in
whose numbers routing results are used once they have been chosen.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_davinci.core.errors import ConfigurationError


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DeviceEntry(_Entry):
    """Experts of one rank of the expert-parallel group, in the order of their slots."""

    device_id: int = Field(ge=0)
    device_expert: list[int]


class LayerEntry(_Entry):
    """One layer, by its number in the names of the model's weights."""

    layer_id: int = Field(ge=0)
    device_count: int = Field(gt=0)
    device_list: list[DeviceEntry]


class ExpertMapFile(_Entry):
    """The file that `expert_map_path` names."""

    moe_layer_count: int = Field(gt=0)
    layer_list: list[LayerEntry]


@dataclass(frozen=True)
class Placement:
    """experts_of_rank: for each expert-parallel rank the experts in its slots."""

    experts_of_rank: tuple[tuple[int, ...], ...]

    def slots(self, rank: int, num_experts: int) -> torch.Tensor:
        """[num_experts], int32: each expert's slot on a rank, or -1."""
        slots = torch.full((num_experts,), -1, dtype=torch.int32)
        experts = list(self.experts_of_rank[rank])
        slots[experts] = torch.arange(len(experts), dtype=torch.int32)
        return slots


@cache
def read_expert_map(path: str) -> ExpertMapFile:
    """Raises ConfigurationError, naming the file and the field, when it is not such a file."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"additional_config key 'expert_map_path' = {path!r} cannot be read: "
            f"{error.strerror}. Give the path of a JSON file."
        ) from None
    try:
        file = ExpertMapFile.model_validate_json(text)
    except ValidationError as error:
        detail = error.errors()[0]
        field = ".".join(str(part) for part in detail["loc"]) or "the file"
        raise _fault(path, field, detail["msg"]) from None
    if file.moe_layer_count != len(file.layer_list):
        raise _fault(
            path, "moe_layer_count", f"is {file.moe_layer_count} for {len(file.layer_list)} layers"
        )
    return file


def placement_of_layer(path: str, layer_id: int, num_experts: int, ep_size: int) -> Placement:
    """A layer's entry, checked against the model and the number of ranks."""
    file = read_expert_map(path)
    entries = [
        (index, entry) for index, entry in enumerate(file.layer_list) if entry.layer_id == layer_id
    ]
    if len(entries) != 1:
        known = [entry.layer_id for entry in file.layer_list]
        raise _fault(
            path,
            "layer_list",
            f"has {len(entries)} entries with layer_id {layer_id}, and needs one. Layers carry "
            f"the numbers in the names of the weights; the file has {known}",
        )
    index, entry = entries[0]
    where = f"layer_list.{index}"
    if entry.device_count != ep_size or len(entry.device_list) != ep_size:
        raise _fault(
            path,
            f"{where}.device_count",
            f"is {entry.device_count} with {len(entry.device_list)} entries in device_list, and "
            f"the experts are dealt out among {ep_size} ranks",
        )
    devices = {device.device_id: device.device_expert for device in entry.device_list}
    if sorted(devices) != list(range(ep_size)):
        raise _fault(
            path, f"{where}.device_list", f"has device_id {sorted(devices)}, not 0 to {ep_size - 1}"
        )
    seats: dict[int, int] = {}
    for device_id in range(ep_size):
        experts = devices[device_id]
        field = f"{where}.device_list, device_id {device_id}, device_expert"
        if len(experts) != num_experts // ep_size:
            raise _fault(
                path, field, f"has {len(experts)} experts, and needs {num_experts // ep_size}"
            )
        for expert in experts:
            if not 0 <= expert < num_experts:
                raise _fault(path, field, f"has expert {expert}, not in 0 to {num_experts - 1}")
            if expert in seats:
                raise _fault(
                    path,
                    field,
                    f"has expert {expert}, which device_id {seats[expert]} has too: every expert "
                    "has one place",
                )
            seats[expert] = device_id
    return Placement(tuple(tuple(devices[rank]) for rank in range(ep_size)))


def _fault(path: str, field: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expert map {path!r}: {field} {what}. Correct the file, or remove additional_config key "
        "'expert_map_path' to deal experts out in order."
    )
