"""Placement of experts by a file: a good one is followed, a bad one is named with its field."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_map_file import Placement, placement_of_layer
from vllm_davinci.core.fused_moe.expert_map_manager import NPUExpertMapManager

NUM_EXPERTS, EP_SIZE, LAYER = 6, 2, 3


def good_map() -> dict[str, Any]:
    return {
        "moe_layer_count": 1,
        "layer_list": [
            {
                "layer_id": LAYER,
                "device_count": EP_SIZE,
                "device_list": [
                    {"device_id": 1, "device_expert": [1, 3, 0]},
                    {"device_id": 0, "device_expert": [5, 2, 4]},
                ],
            }
        ],
    }


def written(directory: Path, content: object) -> str:
    path = directory / "map.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def read(path: str) -> Placement:
    return placement_of_layer(path, LAYER, NUM_EXPERTS, EP_SIZE)


def test_a_file_says_which_rank_has_which_experts(tmp_path: Path):
    placement = read(written(tmp_path, good_map()))
    assert placement.experts_of_rank == ((5, 2, 4), (1, 3, 0))
    assert placement.slots(0, NUM_EXPERTS).tolist() == [-1, -1, 1, -1, 2, 0]
    assert placement.slots(1, NUM_EXPERTS).tolist() == [2, 0, -1, 1, -1, -1]


def without(key: str) -> dict[str, Any]:
    content = good_map()
    del content["layer_list"][0][key]
    return content


def with_experts(first: list[Any], second: list[Any]) -> dict[str, Any]:
    content = good_map()
    devices = content["layer_list"][0]["device_list"]
    devices[1]["device_expert"], devices[0]["device_expert"] = first, second
    return content


def with_value(key: str, value: object) -> dict[str, Any]:
    content = good_map()
    content["layer_list"][0][key] = value
    return content


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "the file .*JSON"),
        ([], "the file .*"),
        (without("device_list"), r"layer_list\.0\.device_list .*required"),
        ({**good_map(), "layers": 1}, r"layers .*not permitted"),
        ({**good_map(), "moe_layer_count": 2}, "moe_layer_count is 2 for 1 layers"),
        (with_value("device_count", "2"), r"layer_list\.0\.device_count .*integer"),
        (with_value("device_count", 4), r"layer_list\.0\.device_count is 4 .*among 2 ranks"),
        (with_value("layer_id", 0), rf"layer_list has 0 entries with layer_id {LAYER}"),
        (with_experts([5, 2], [1, 3, 0]), "device_id 0, device_expert has 2 experts, and needs 3"),
        (with_experts([5, 2, 6], [1, 3, 0]), "has expert 6, not in 0 to 5"),
        (with_experts([5, 2, 4], [1, 2, 0]), "has expert 2, which device_id 0 has too"),
        (with_experts([5, 2, "4"], [1, 3, 0]), r"device_expert\.2 .*integer"),
    ],
)
def test_a_bad_file_is_an_error_with_its_name_and_the_field(
    content: object, named: str, tmp_path: Path
):
    path = written(tmp_path, content)
    with pytest.raises(ConfigurationError, match=f"Expert map .*map.json.*{named}"):
        read(path)


def test_two_entries_of_one_rank_are_an_error(tmp_path: Path):
    content = good_map()
    content["layer_list"][0]["device_list"][0]["device_id"] = 0
    with pytest.raises(ConfigurationError, match=r"device_list has device_id \[0\], not 0 to 1"):
        read(written(tmp_path, content))


def test_a_missing_file_is_an_error_that_names_the_option(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"'expert_map_path' = .*No such file"):
        read(str(tmp_path / "absent.json"))


def manager(ep_rank: int, placement: Placement | None, ep_size: int = 2) -> NPUExpertMapManager:
    parallel = FusedMoEParallelConfig.make_no_parallel()
    in_order = ExpertMapManager(64, 2, NUM_EXPERTS, 0, None, parallel, "linear", False)
    parallel.ep_size, parallel.ep_rank, parallel.use_ep = ep_size, ep_rank, ep_size > 1
    return NPUExpertMapManager(in_order, parallel, None, "linear", placement)


def test_weights_go_to_their_slots_and_choices_to_their_physical_numbers():
    placement = Placement(((5, 2, 4), (1, 3, 0)))
    for rank, experts in enumerate(placement.experts_of_rank):
        placed = manager(rank, placement)
        assert placed.local_num_experts == 3
        assert [placed.map_global_to_local(expert) for expert in experts] == [0, 1, 2]
        physical = placed.physical_experts()
        assert physical is not None
        assert physical[list(experts)].tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]


def test_experts_in_order_need_no_translation():
    assert manager(1, None).physical_experts() is None
    assert manager(0, None, ep_size=1).physical_experts() is None
    assert torch.equal(
        manager(1, None).expert_map, torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32)
    )
