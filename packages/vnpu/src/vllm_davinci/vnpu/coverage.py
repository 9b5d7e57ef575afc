"""Compares the operators that torch_npu looks up with those that vnpu exports."""

import dataclasses
import importlib.resources
import importlib.util
import json
import pathlib
import re
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from vllm_davinci.vnpu.errors import VirtualDeviceError
from vllm_davinci.vnpu.operator_rows import constraints, declared

_TIERS = {
    "T1": "plain PyTorch in model execution",
    "T2": "fused serving operators",
    "T3": "rare: LoRA, linear and sparse attention, other",
    "-": "training, vision, other accelerators' paths",
}


@dataclasses.dataclass(frozen=True)
class Operator:
    """An aclnn operator: its name without the prefix, its tier, and where it was found.

    priced: True if it has a cost, without which it cannot be launched under `--chip`
    """

    name: str
    tier: str
    asked: bool
    exported: bool
    priced: bool = False


def _asked_by_torch_npu() -> set[str]:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise VirtualDeviceError(
            "torch_npu is not installed. `pip install vllm-davinci-vnpu` installs the matching "
            "version."
        )
    names: set[str] = set()
    for library in sorted((pathlib.Path(spec.origin).parent / "lib").glob("lib*.so")):
        found = re.findall(rb"\0aclnn([A-Z][A-Za-z0-9]*)\0", library.read_bytes())
        names.update(name.decode() for name in found)
    suffix = "GetWorkspaceSize"
    return {name.removesuffix(suffix) for name in names if not name.endswith("GetMaxWorkspaceSize")}


def _absent() -> dict[str, str]:
    """Tiers of operators that models need and vnpu lacks."""
    text = importlib.resources.files("vllm_davinci.vnpu").joinpath("operators_absent.json")
    tiers: dict[str, list[str]] = json.loads(text.read_text())
    return {name: tier for tier, names in tiers.items() for name in names}


def operators() -> list[Operator]:
    """All operators that torch_npu looks up or vnpu exports, sorted by tier and name."""
    asked, absent = _asked_by_torch_npu(), _absent()
    rows = {row.operator.removeprefix("aclnn"): row for row in declared()}
    found = [
        Operator(name, row.tier, name in asked, exported=True, priced=row.priced)
        for name, row in rows.items()
    ]
    found += [
        Operator(name, absent.get(name, "-"), name in asked, exported=False)
        for name in (asked | absent.keys()) - rows.keys()
    ]
    order = list(_TIERS)
    return sorted(found, key=lambda op: (order.index(op.tier), op.name))


def _explain(name: str, known: dict[str, Operator]) -> str:
    operator = known.get(name.removeprefix("aclnn"))
    if operator is None:
        return f"{name}: torch_npu has no operator of this name."
    state = "present" if operator.exported else "missing"
    hint = (
        ""
        if operator.exported
        else " docs/guides/add_an_operator.md says how to add its row to packages/vnpu/csrc/ops."
    )
    if operator.exported and not operator.priced:
        hint = " Its row has no `.cost`: the timing model refuses it."
    return f"{operator.name}: {state}, tier {operator.tier} ({_TIERS[operator.tier]}).{hint}"


def report(names: Iterable[str], *, missing: bool, as_json: bool) -> int:
    """Prints the comparison; returns the exit status."""
    everything = operators()
    wanted = list(names)
    if wanted:
        known = {operator.name: operator for operator in everything}
        for name in wanted:
            print(_explain(name, known))
        return 0
    if as_json:
        json.dump([dataclasses.asdict(operator) for operator in everything], sys.stdout, indent=1)
        print()
        return 0
    table = Table(title="aclnn operators")
    for column in ("tier", "meaning", "known", "present", "share"):
        table.add_column(column, justify="left" if column == "meaning" else "right")
    for tier, meaning in _TIERS.items():
        of_tier = [operator for operator in everything if operator.tier == tier]
        present = sum(operator.exported for operator in of_tier)
        share = f"{100 * present / len(of_tier):.1f} %" if of_tier else ""
        table.add_row(tier, meaning, str(len(of_tier)), str(present), share)
    Console().print(table)
    rows = constraints()
    different = len({(row.argument, row.rule, row.source) for row in rows})
    constrained = len({row.operator for row in rows})
    print(
        f"{constrained} operators have {len(rows)} constraints from CANN's documents, "
        f"{different} of them different: `nox -s docs` lists them"
    )
    free = [operator.name for operator in everything if operator.exported and not operator.priced]
    if free:
        print(f"without a cost, so refused by the timing model: {' '.join(free)}")
    if missing:
        for tier in _TIERS:
            absent = [o.name for o in everything if o.tier == tier and not o.exported]
            if absent:
                print(f"{tier} missing: {' '.join(absent)}")
    return 0
