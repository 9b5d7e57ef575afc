import dataclasses
import json
import pathlib

import pytest

from vllm_davinci.vnpu import _C, VirtualDeviceConfig
from vllm_davinci.vnpu.errors import MachineError
from vllm_davinci.vnpu.timing import chip_files, chip_names, load_machine, topology_names
from vllm_davinci.vnpu.timing import machine as timing_machine
from vllm_davinci.vnpu.timing.machine import MODELLED_CALLS
from vllm_davinci_testing.operators import modelled_calls
from vllm_davinci_testing.processes.forked import run_together

CHIP = chip_files.FOLDER / "ascend910b2.toml"


def test_every_chip_goes_with_every_topology():
    for chip in chip_names():
        for topology in topology_names():
            machine = load_machine(chip, topology)
            names = {n for n in machine.figures if not n.startswith("tier")}
            assert names == set(_C.figure_names())
    assert {"ascend910b1", "ascend910b2", "ascend910b3", "ascend910b4", "ascend910c"} <= {
        *chip_names()
    }


def test_figures_are_exact_integers_of_base_units():
    figures = load_machine("ascend910b2", "two-meshes-of-8").figures
    assert figures["cube_bfloat16"] == 353_900_000_000_000
    assert figures["hbm_share"] == 600_000
    assert figures["event_wait"] == 750_000  # in ps
    assert figures["tier1_bandwidth"] == 25_000_000_000


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("Ascend910B3", "ascend910b3"),  # as `vllm-davinci doctor` prints it
        ("ASCEND910C", "ascend910c"),
        ("Ascend910_9382", "ascend910c"),
        ("ascend910b5", None),
        ("ascend", None),
    ],
)
def test_a_chip_is_found_by_the_name_of_its_soc(spoken, name):
    found = chip_files.chip_and_soc(spoken)
    assert (found and found[0]) == name
    if name is not None:
        assert load_machine(spoken, "node-of-8") == load_machine(name, "node-of-8")
        assert VirtualDeviceConfig(soc=spoken).environment()["VNPU_SOC"] == found[1]
        reference = VirtualDeviceConfig(soc=f"reference:{spoken}").environment()
        assert reference["VNPU_SOC"] == f"reference:{found[1]}"


def test_an_unknown_chip_is_refused_with_the_nearest_name():
    with pytest.raises(MachineError, match=r"no chip '910B2'. Did you mean 'ascend910b2'\?"):
        load_machine("910B2", "node-of-8")
    with pytest.raises(MachineError, match="Did you mean 'two-meshes-of-8'"):
        load_machine("ascend910b2", "two-mesh-of-8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('unit = "TB/s"', 'unit = "GHz"', "hbm_bandwidth is in 'GHz', but a bandwidth is needed"),
        ("hbm_bandwidth", "hbm_bandwith", "'hbm_bandwith', which is not a figure. Did you mean"),
        ("cube_cores = {", "# {", "lacks the figure cube_cores"),
        ("value = 0.7,", "value = 1.2,", "is not a share"),
        ("value = 24,", 'value = "24",', "Expected a number"),
        ('soc = "Ascend910B2"', 'soc = "910"', "State what the runtime reports"),
        ("value = 1.6,", "value = ,", "ascend.toml"),
        (", low = 0.55", "", "matmul_share = 0.7 share is assumed without low. State its range"),
        ("low = 0.55", "low = 0.75", "is outside its range, low 0.75 to high 0.85"),
        ("high = 0.85", "high = 1.5", "high of matmul_share = 1.5 is not a share"),
    ],
)
def test_a_file_that_is_not_valid_is_refused(tmp_path, old, new, message):
    text = CHIP.read_text()
    file = tmp_path / "ascend.toml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(MachineError, match=message):
        load_machine(str(file), "node-of-8")


def test_a_chip_may_be_based_on_one_that_is_based_on_another(tmp_path):
    file = tmp_path / "mine.toml"
    shorter = 'host_event_call = { value = 2, unit = "us", source = "measured" }'
    file.write_text(f'based_on = "ascend910b3"\nsoc = "Ascend910B3"\n[figures]\n{shorter}\n')
    machine = load_machine(str(file), "node-of-8")
    assert machine.figures["host_event_call"] == 2_000_000
    assert machine.figures["cube_cores"] == 20  # ascend910b3's figure
    assert machine.figures["l2_bytes"] == 192 << 20  # ascend910b2's figure


def test_ranks_that_do_not_fit_name_topologies_that_have_room():
    machine = load_machine("ascend910b2", "node-of-8")
    machine.require_ranks(8)
    with pytest.raises(MachineError, match=r"16 ranks .* which has 8.*two-meshes-of-8"):
        machine.require_ranks(16)


def test_the_hash_depends_on_the_figures_alone():
    machine = load_machine("ascend910b2", "node-of-8")
    assert machine.hash == load_machine("ascend910b2", "node-of-8").hash
    slower = {**machine.figures, "hbm_bandwidth": 1}
    assert dataclasses.replace(machine, figures=slower).hash != machine.hash
    assert dataclasses.replace(machine, chip="another").hash == machine.hash


def test_the_hash_depends_on_the_recorded_times(tmp_path, monkeypatch):
    machine = load_machine("ascend910b2", "node-of-8")
    before = machine.hash
    recorded = MODELLED_CALLS.read_text()
    copy = tmp_path / "modelled_calls.json"
    monkeypatch.setattr(timing_machine, "MODELLED_CALLS", copy)
    copy.write_text(recorded)
    assert machine.hash == before
    copy.write_text(recorded.replace('"aclnnMm": {"any": ', '"aclnnMm": {"any": 1'))
    assert machine.hash != before


def test_recorded_times_are_what_the_model_does():
    """Engines find step-time tables by the recorded times. Adding or removing an operator changes
    these only when they are recorded again.
    """
    [ended] = run_together([pathlib.Path(modelled_calls.__file__)], [{}])
    assert ended.status == 0, ended.output[-4000:]
    recorded, found = (
        json.loads(text)["times"] for text in (MODELLED_CALLS.read_text(), ended.stdout)
    )
    assert len(recorded) > 500 and None not in recorded.values()
    assert len(recorded.keys() & found.keys()) > 450
    changed = [name for name in recorded.keys() & found.keys() if recorded[name] != found[name]]
    assert not changed, (
        f"the model gives other times to {changed}. If that is meant, record them (`vnpu run -- "
        "python -m vllm_davinci_testing.operators.modelled_calls --record`), and step-time tables "
        "have to be made again (`nox -s step_costs`)."
    )


def test_assumed_figures_are_listed():
    assumptions = load_machine("ascend910b2", "node-of-8").assumptions
    [share] = [a for a in assumptions if a.figure == "ascend910b2: matmul_share"]
    assert share.bounds == "0.55 to 0.85 share"
    assert not any("cube_int8" in a.figure for a in assumptions)
