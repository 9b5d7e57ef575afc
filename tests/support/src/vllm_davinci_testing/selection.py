"""Selects cases: daily cases by default; others run at night or on request.

Cases marked `thorough` form grids that take minutes. Cases marked `nightly("GROUP")` form groups of
GROUPS; at least one case of each group is daily. `--all` runs everything, `--group GROUP` one
group, and `-m` selects by marks as usual.
"""

import datetime
from collections import Counter

import pytest

THOROUGH = "thorough"
NIGHTLY = "nightly"
TODAY = "today"
ALL, DAILY = "all", "daily"
# Groups of cases, with their subject. On certain days, continuous integration also runs one group.
GROUPS = {
    "planning": "dry-runs, verify, perplexity, published commands, examples, tools",
    "hosts": "several hosts, disaggregated serving, Ray",
    "faults": "engines, ranks and servers that are killed or fail",
    "refusals": "settings, chips and checkpoints that do not fit, each with an engine of its own",
    "weights": "weights that are transferred, updated, offloaded or moved among ranks",
    "layouts": "matrices of parallel sizes, overlap and models",
    "operators": "operators that no served model calls",
}


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run every case: thorough and nightly ones too"
    )
    parser.addoption(
        "--group",
        choices=[*GROUPS, TODAY],
        help=f"run the nightly cases of a group, and no others; {TODAY}: the group of this date",
    )


def group_of_the_day(day: datetime.date) -> str:
    return list(GROUPS)[day.toordinal() % len(GROUPS)]


class Selection:
    """Removes cases that are not selected. left_out: number of removed cases, by group or
    THOROUGH
    """

    def __init__(self, config: pytest.Config) -> None:
        self.left_out: Counter[str] = Counter()
        self._is_all = config.getoption("all")
        self._group = config.getoption("group")
        if self._group == TODAY:
            self._group = group_of_the_day(datetime.datetime.now(datetime.UTC).date())
        marks = config.getoption("markexpr") or ""
        self._is_by_marks = THOROUGH in marks or NIGHTLY in marks
        # Naming a file also selects its nightly cases.
        self._named = {
            (config.invocation_params.dir / argument.split("::")[0]).resolve()
            for argument in config.invocation_params.args
            if isinstance(argument, str) and argument.split("::")[0].endswith(".py")
        }

    @property
    def name(self) -> str:
        """Names the selection: `daily`, `all`, a group, or `marked`."""
        if self._is_all:
            return ALL
        return self._group or ("marked" if self._is_by_marks else DAILY)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [(item, group) for item in items if (group := self._reason_against(item))]
        if not left_out:
            return
        config.hook.pytest_deselected(items=[item for item, _ in left_out])
        self.left_out.update(group for _, group in left_out)
        gone = {item for item, _ in left_out}
        items[:] = [item for item in items if item not in gone]

    def _reason_against(self, item: pytest.Item) -> str | None:
        """Returns the group that leaves a case out; None if the case runs."""
        group = group_of(item)
        if self._is_all or self._is_by_marks:
            return None
        if self._group:
            return None if group == self._group else group or DAILY
        is_named = group != THOROUGH and item.path.resolve() in self._named
        return None if is_named else group

    def lines(self) -> list[str]:
        """Returns a line for each group that was left out: its number of cases, and how to run
        them.
        """
        text = {THOROUGH: "grids of shapes and paths", DAILY: "what users do daily", **GROUPS}
        how = {THOROUGH: f"-m {THOROUGH}", DAILY: "without --group"}
        return [
            f"{count:5} {group:10} {how.get(group, f'--group {group}'):20} {text[group]}"
            for group, count in sorted(self.left_out.items())
        ]


def group_of(item: pytest.Item) -> str | None:
    """Returns THOROUGH, a group of GROUPS, or None for a daily case."""
    if item.get_closest_marker(THOROUGH):
        return THOROUGH
    mark = item.get_closest_marker(NIGHTLY)
    if mark is None:
        return None
    if len(mark.args) != 1 or mark.args[0] not in GROUPS:
        raise pytest.UsageError(
            f"{item.nodeid}: {NIGHTLY}{mark.args} names no group; there are {', '.join(GROUPS)}"
        )
    return str(mark.args[0])
