"""Reads the placement of experts on ranks from a file.

A rank holds its experts in slots 0, 1, ... The slots of all ranks, numbered consecutively, are the
physical experts, to which routing results are translated. An expert may have slots on several
ranks: the redundant experts are the slots beyond one per expert.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.placement import Placement

if TYPE_CHECKING:
    from vllm_davinci.core.config.options import DavinciConfig


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DeviceEntry(_Entry):
    """Experts of one rank of the expert-parallel group, in slot order."""

    device_id: int = Field(ge=0)
    device_expert: list[int]


class LayerEntry(_Entry):
    """One layer, by its number in the model's weight names."""

    layer_id: int = Field(ge=0)
    device_count: int = Field(gt=0)
    device_list: list[DeviceEntry]


class ExpertMapFile(_Entry):
    """Content of the file at `expert_map_path`."""

    moe_layer_count: int = Field(gt=0)
    layer_list: list[LayerEntry]


@cache
def read_expert_map(path: str) -> ExpertMapFile:
    """Reads the file. Raises ConfigurationError, naming file and field, if it is not valid."""
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


def redundant_experts(config: "DavinciConfig", num_experts: int, ep_size: int) -> int:
    """Number of slots beyond one per expert, from the file if given, otherwise from the key.

    ep_size: ranks among which experts are divided; a single rank has no use for a second slot
    Raises ConfigurationError for an invalid file, or one that contradicts the key.
    """
    asked = config.eplb_config.num_redundant_experts
    path = config.expert_map_path
    if path is None:
        return 0 if ep_size == 1 else asked
    in_file = _redundant_experts_of_file(path, num_experts)
    if ep_size == 1:
        return 0
    if asked not in (0, in_file):
        raise ConfigurationError(
            f"Expert map {path!r} has {in_file} redundant experts, and additional_config key "
            f"'eplb_config.num_redundant_experts' is {asked}. Remove the key, or give {in_file}."
        )
    return in_file


def _redundant_experts_of_file(path: str, num_experts: int) -> int:
    """Number of slots beyond one per expert in each layer of the file.

    Raises ConfigurationError if layers differ, or have fewer slots than the model has experts.
    """
    file = read_expert_map(path)
    slots = [
        sum(len(device.device_expert) for device in entry.device_list) for entry in file.layer_list
    ]
    for index, count in enumerate(slots):
        where = f"layer_list.{index}.device_list"
        if count < num_experts:
            raise _fault(
                path, where, f"has {count} experts in total, and the model has {num_experts}"
            )
        if count != slots[0]:
            raise _fault(
                path, where, f"has {count} experts in total, and layer_list.0 has {slots[0]}"
            )
    return slots[0] - num_experts


def check_expert_map(path: str, num_experts: int, ep_size: int) -> None:
    """Raises ConfigurationError for an entry that does not fit the model or the ranks."""
    for entry in read_expert_map(path).layer_list:
        placement_of_layer(path, entry.layer_id, num_experts, ep_size)


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
            f"has {len(entries)} entries with layer_id {layer_id}, and needs one. Layers have the "
            f"numbers of the weight names; the file has {known}",
        )
    index, entry = entries[0]
    where = f"layer_list.{index}"
    if entry.device_count != ep_size or len(entry.device_list) != ep_size:
        raise _fault(
            path,
            f"{where}.device_count",
            f"is {entry.device_count} with {len(entry.device_list)} entries in device_list, and "
            f"the experts are divided among {ep_size} ranks",
        )
    devices = {device.device_id: device.device_expert for device in entry.device_list}
    if sorted(devices) != list(range(ep_size)):
        raise _fault(
            path, f"{where}.device_list", f"has device_id {sorted(devices)}, not 0 to {ep_size - 1}"
        )
    num_slots = num_experts + _redundant_experts_of_file(path, num_experts)
    for device_id in range(ep_size):
        field = f"{where}.device_list, device_id {device_id}, device_expert"
        _check_experts(path, field, devices[device_id], num_experts, num_slots / ep_size)
    placed = {expert for experts in devices.values() for expert in experts}
    if missing := sorted(set(range(num_experts)) - placed):
        raise _fault(path, f"{where}.device_list", f"has no slot for the experts {missing}")
    return Placement(tuple(tuple(devices[rank]) for rank in range(ep_size)))


def _check_experts(
    path: str, field: str, experts: list[int], num_experts: int, wanted: float
) -> None:
    """Checks one rank's experts. wanted: number of experts per rank"""
    if len(experts) != wanted:
        raise _fault(path, field, f"has {len(experts)} experts, and needs {wanted:g}")
    for place, expert in enumerate(experts):
        if not 0 <= expert < num_experts:
            raise _fault(path, field, f"has expert {expert}, not in 0 to {num_experts - 1}")
        if expert in experts[:place]:
            raise _fault(
                path, field, f"has expert {expert} twice: a replica is useful only on another rank"
            )


def _fault(path: str, field: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expert map {path!r}: {field} {what}. Correct the file, or remove additional_config "
        "key 'expert_map_path' to divide experts in order."
    )
