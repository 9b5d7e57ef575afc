"""Machines of the timing model: a chip and the links between chips, read from TOML files.

A file of `chips/` or `topologies/` states every figure as `{ value, unit, source }`; `source` is
where the figure was read, or begins with "assumed". An assumed figure also states its range, `low`
and `high`; others may, if sources differ. `--chip` and `--topology` take a name from these folders
or the path of any such file. With `based_on = "OTHER"` a chip states only what differs.
"""

import dataclasses
import difflib
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from vllm_davinci.vnpu.errors import MachineError
from vllm_davinci.vnpu.timing.chip_files import FOLDER, chip_and_soc, read_chip, read_table
from vllm_davinci.vnpu.timing.figures import Assumption, FigureReader

FORMAT = 4
"""Version of the model and of its files; part of each machine's hash."""
MODELLED_CALLS = pathlib.Path(__file__).parent / "modelled_calls.json"
"""Modelled times of a fixed sample of work on a fixed machine, part of each machine's hash: the
hash changes when the model's code changes times. A test compares them with the library's.
"""

_FOLDERS = {"chip": FOLDER, "topology": FOLDER.parent / "topologies"}
_MOST_TIERS = 3

# Figures of a chip that libvnpu reads, with their dimensions.
_CHIP_FIGURES: dict[str, str] = {
    "cube_cores": "number",
    "vector_cores": "number",
    "cube_int8": "rate of operations",
    "cube_float16": "rate of operations",
    "cube_bfloat16": "rate of operations",
    "cube_float32": "rate of operations",
    "vector_16bit": "rate of operations",
    "vector_32bit": "rate of operations",
    "matmul_share": "share",
    "attention_share": "share",
    "vector_share": "share",
    "hbm_bandwidth": "bandwidth",
    "hbm_share": "share",
    "l2_bytes": "size",
    "l2_bandwidth": "bandwidth",
    "copy_in_bandwidth": "bandwidth",
    "copy_out_bandwidth": "bandwidth",
    "vector_static": "time",
    "matmul_static": "time",
    "attention_static": "time",
    "collective_static": "time",
    "task_jitter": "time",
    "copy_static": "time",
    "ai_cpu_static": "time",
    "event_record": "time",
    "event_wait": "time",
    "graph_node": "time",
    "queue_depth": "number",
    "hardware_queues": "number",
    "queue_change": "time",
    "host_operator_launch": "time",
    "host_collective_launch": "time",
    "host_copy_launch": "time",
    "host_graph_launch": "time",
    "host_event_call": "time",
    "host_synchronize": "time",
    "host_step": "time",
    "host_step_request": "time",
}
_TIER_FIGURES: dict[str, str] = {
    "ranks": "number",
    "bandwidth": "bandwidth",
    "share": "share",
    "all_to_all_share": "share",
    "latency": "time",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A chip in a topology.

    soc:          SoC name that the runtime reports
    memory_bytes: memory per device
    ranks:        maximum number of devices in the topology
    figures:      in base units: operations, bytes, ranks, or these per second; picoseconds;
                  millionths
    ranges:       ranges of figures that are assumed or that sources state differently
    """

    chip: str
    topology: str
    soc: str
    memory_bytes: int
    ranks: int
    figures: Mapping[str, int]
    assumptions: tuple[Assumption, ...]
    ranges: Mapping[str, tuple[int, int]]

    @property
    def hash(self) -> str:
        """Hash of everything that determines modelled times: the figures, and the modelled times of
        a sample of work. A change of the model's code that changes no time keeps the hash.
        """
        text = f"{FORMAT}\n{MODELLED_CALLS.read_text(encoding='utf-8')}\n{self.encoded()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """Names, version and hash, for reports."""
        return f"{self.chip} in {self.topology} (model {FORMAT}, figures {self.hash})"

    def encoded(self) -> str:
        """The figures encoded for VNPU_TIMING."""
        return ";".join(f"{name}={value}" for name, value in self.figures.items())

    def require_ranks(self, ranks: int) -> None:
        """Raises MachineError if the topology has fewer devices."""
        if ranks > self.ranks:
            fitting = [n for n in topology_names() if _ranks_of(n) >= ranks]
            hint = f"Topologies with room: {', '.join(fitting)}." if fitting else ""
            raise MachineError(
                f"{ranks} ranks do not fit into topology {self.topology}, which has {self.ranks}. "
                f"Choose smaller parallel sizes or a larger topology. {hint}".rstrip()
            )


def chip_names() -> list[str]:
    """Names of the chips with a complete file, whose time can be modelled."""
    return [
        name
        for name in _names("chip")
        if _CHIP_FIGURES.keys() <= _read("chip", name)["figures"].keys()
    ]


def topology_names() -> list[str]:
    """Names of the topologies."""
    return _names("topology")


def load_machine(chip: str, topology: str) -> Machine:
    """Loads the machine of a chip and a topology, each a name or a TOML file's path.

    A chip's SoC name works as well; case does not matter. Raises MachineError with what to change
    for an unknown name or a missing, unknown or wrong figure.
    """
    if not chip.endswith(".toml"):
        chip, _ = chip_and_soc(chip) or (chip, "")
    chip_table = _read("chip", chip)
    topology_table = _read("topology", topology)
    chip_name, topology_name = _name(chip), _name(topology)

    read = FigureReader()
    memory = read(chip_name, "memory", chip_table, "size")
    soc = chip_table.get("soc")
    if not isinstance(soc, str) or not soc.startswith("Ascend"):
        raise MachineError(
            f"chip {chip_name}: soc={soc!r}. State what the runtime reports, as in "
            'soc = "Ascend910B2".'
        )
    stated = chip_table.get("figures", {})
    _refuse_unknown(f"chip {chip_name}", stated, _CHIP_FIGURES)
    figures = {
        name: read(chip_name, name, stated, dimension, has_range=True)
        for name, dimension in _CHIP_FIGURES.items()
    }
    tiers = topology_table.get("tiers", [])
    if not 1 <= len(tiers) <= _MOST_TIERS:
        raise MachineError(
            f"topology {topology_name} has {len(tiers)} [[tiers]]; 1 to {_MOST_TIERS} are "
            "possible, innermost first."
        )
    ranks = 1
    for number, tier in enumerate(tiers):
        where = f"{topology_name}, tier {number}"
        links = {name: value for name, value in tier.items() if name != "name"}
        _refuse_unknown(f"topology {where}", links, _TIER_FIGURES)
        for name, dimension in _TIER_FIGURES.items():
            figures[f"tier{number}_{name}"] = read(
                where, name, links, dimension, f"tier{number}_", has_range=name != "ranks"
            )
        ranks *= figures[f"tier{number}_ranks"]
    return Machine(
        chip_name, topology_name, soc, memory, ranks, figures, tuple(read.assumptions), read.ranges
    )


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in _FOLDERS[kind].glob("*.toml"))


def _name(name_or_path: str) -> str:
    return pathlib.Path(name_or_path).stem if name_or_path.endswith(".toml") else name_or_path


def _ranks_of(topology: str) -> int:
    ranks = 1
    for tier in _read("topology", topology)["tiers"]:
        ranks *= int(tier["ranks"]["value"])
    return ranks


def _read(kind: str, name: str) -> dict[str, Any]:
    """Reads a file's table; kind is "chip" or "topology"."""
    if name.endswith(".toml"):
        path = pathlib.Path(name)
    else:
        known = _names(kind)
        if name not in known:
            nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0)[0]
            raise MachineError(
                f"there is no {kind} {name!r}. Did you mean {nearest!r}? Known: "
                f"{', '.join(known)}; the path of a file of your own ends in .toml."
            )
        path = _FOLDERS[kind] / f"{name}.toml"
    try:
        return read_chip(path) if kind == "chip" else read_table(path)
    except (OSError, ValueError) as error:
        raise MachineError(f"{kind} file {path}: {error}.") from error


def _refuse_unknown(where: str, stated: Mapping[str, Any], known: Mapping[str, str]) -> None:
    for name in stated:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise MachineError(
                f"{where} states {name!r}, which is not a figure. Did you mean {nearest!r}?"
            )
