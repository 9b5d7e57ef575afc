"""Expert placement from a file: a valid map is applied; an invalid map is refused, naming the
field.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

from vllm_davinci.core.config.parsing import parse_config
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe.expert_map_file import placement_of_layer, redundant_experts
from vllm_davinci.core.fused_moe.expert_map_manager import NPUExpertMapManager
from vllm_davinci.core.fused_moe.placement import Placement

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
        (with_experts([5, 2], [1, 3, 0]), r"layer_list\.0\.device_list has 5 experts in total"),
        (with_experts([5, 2], [1, 3, 0, 4]), "device_id 0, device_expert has 2 .* needs 3"),
        (with_experts([5, 2, 4], [1, 3, 0, 5]), "device_id 0, device_expert has 3 .* needs 3.5"),
        (with_experts([5, 2, 6], [1, 3, 0]), "has expert 6, not in 0 to 5"),
        (with_experts([5, 2, 4], [1, 2, 0]), r"device_list has no slot for the experts \[3\]"),
        (with_experts([5, 2, 5], [1, 3, 0]), "device_id 0, device_expert has expert 5 twice"),
        (with_experts([5, 2, "4"], [1, 3, 0]), r"device_expert\.2 .*integer"),
    ],
)
def test_a_bad_file_is_an_error_with_its_name_and_the_field(content, named, tmp_path):
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
    num_slots = NUM_EXPERTS
    if placement is not None:
        num_slots = len(placement.physical_to_logical)
    return NPUExpertMapManager(in_order, parallel, None, "linear", placement, num_slots)


@pytest.mark.parametrize(
    "placement",
    [Placement(((5, 2, 4), (1, 3, 0))), Placement(((5, 2, 4, 0), (1, 3, 0, 2)))],
    ids=["each_once", "replicas"],
)
def test_weights_of_an_expert_go_to_its_slot_on_every_rank(placement: Placement):
    for rank, experts in enumerate(placement.experts_of_rank):
        placed = manager(rank, placement)
        assert placed.local_num_experts == len(experts)
        assert [placed.map_global_to_local(each) for each in experts] == [*range(len(experts))]
        # vLLM's loader also asks for redundant experts, which are loaded by their logical ids.
        beyond = range(NUM_EXPERTS, len(placement.physical_to_logical))
        assert [placed.map_global_to_local(each) for each in beyond] == [-1] * len(beyond)
        assert placed.physical_to_logical() == placement.physical_to_logical


def test_experts_are_in_order_by_default():
    assert manager(1, None).physical_to_logical() == [0, 1, 2, 3, 4, 5]
    assert manager(0, None, ep_size=1).physical_to_logical() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(
        manager(1, None).expert_map, torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32)
    )
    assert Placement.in_order(6, 2, 2).experts_of_rank == ((0, 1, 2, 3), (4, 5, 0, 1))


def options(path: str, num_redundant: int = 0) -> Any:
    balance = {"dynamic_eplb": True, "num_redundant_experts": num_redundant}
    return parse_config({"expert_map_path": path, "eplb_config": balance})


def test_a_file_says_how_many_experts_are_redundant(tmp_path: Path):
    path = written(tmp_path, with_experts([5, 2, 4, 0], [1, 3, 0, 2]))
    assert redundant_experts(options(path), NUM_EXPERTS, EP_SIZE) == 2
    assert redundant_experts(options(path, 2), NUM_EXPERTS, EP_SIZE) == 2
    assert redundant_experts(options(path), NUM_EXPERTS, ep_size=1) == 0
    with pytest.raises(ConfigurationError, match=r"has 2 redundant .* is 4\. Remove the key"):
        redundant_experts(options(path, 4), NUM_EXPERTS, EP_SIZE)
