"""Renders a report as one HTML page: unexpected findings first, then each part with a picture."""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from vllm_davinci.verify import drawings
from vllm_davinci.verify.report import Report, failed_of, value_of
from vllm_davinci.verify.trace import PROFILE, tasks_of

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62em; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td, th { padding: .15em .8em .15em 0; text-align: left;
  vertical-align: top; }
.good { color: #2a7d4f; } .bad { color: #c0392b; font-weight: 600; }
pre { background: #f6f6f6; padding: .6em; font-size: 12px; white-space: pre-wrap; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; }
summary { cursor: pointer; color: #2d6cab; } .note { color: #666; }
"""
MOST_FAILURES = 60
MOST_CHARACTERS = 4000


def page(report: Report, directory: Path) -> str:
    """Renders the page. directory: the run's directory, with its profiles."""
    failed = list(failed_of(report))
    soc = value_of(report, "environment/chip/SoC") or "a device"
    body = f"<h1>{escape(str(soc))}, compared with what vllm-davinci expects</h1>\n"
    body += f"<p>{_verdict(report, len(failed))}</p>\n{_overview(report)}"
    if failed:
        body += "<h2>Unexpected</h2>\n" + "".join(map(_failure, failed[:MOST_FAILURES]))
        if len(failed) > MOST_FAILURES:
            body += f"<p>{len(failed) - MOST_FAILURES} more are in report.json.</p>\n"
    for part in report["parts"]:
        body += f'<h2 id="{part["name"]}">{escape(part["asks"])}</h2>\n'
        body += _picture(part, directory)
        body += _table(part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>vllm-davinci verify</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}</body></html>\n"
    )


def _verdict(report: Report, failed: int) -> str:
    clock = value_of(report, "environment/chip/clock") or "not told"
    right = sum(part["passed"] for part in report["parts"])
    said = (
        f'<span class="bad">{failed} findings are unexpected</span>, {right} are as expected'
        if failed
        else f'<span class="good">All {right} findings are as expected</span>'
    )
    return (
        f"{said}. Written {escape(report['written'])}, after {report['seconds'] / 60:.1f} minutes. "
        f"Times are {escape(str(clock))}."
    )


def _overview(report: Report) -> str:
    rows = "".join(
        f'<tr><td><a href="#{part["name"]}">{part["name"]}</a></td>'
        f'<td class="good">{part["passed"] or ""}</td><td class="bad">{part["failed"] or ""}</td>'
        f"<td>{len(part['findings'])}</td><td>{part['seconds']:.0f} s</td></tr>\n"
        for part in report["parts"]
    )
    head = "<tr><th>part</th><th>as expected</th><th>not</th><th>findings</th><th>took</th></tr>"
    return f"<table>{head}\n{rows}</table>\n"


def _failure(finding: dict[str, Any]) -> str:
    details = json.dumps(finding.get("details", {}), indent=1)[:MOST_CHARACTERS]
    bound = f", bound {finding['bound']}" if "bound" in finding else ""
    value = escape(str(finding["value"])[:200])
    return (
        f'<p><span class="bad">{escape(finding["name"])}</span>: {value}{bound}</p>'
        f"<pre>{escape(details)}</pre>\n"
    )


def _picture(part: dict[str, Any], directory: Path) -> str:
    findings = part["findings"]
    match part["name"]:
        case "operators":
            return _of_errors(findings)
        case "costs" | "collectives":
            return "".join(_of_figures(findings))
        case "streams":
            return "".join(_of_traces(directory))
        case "constraints":
            return _of_calls(findings)
    return ""


def _of_errors(findings: list[dict[str, Any]]) -> str:
    rows: dict[str, list[float]] = {}
    for finding in findings:
        if finding["kind"] != "error":
            continue
        value, bound = finding["value"], finding.get("bound", 0.0)
        is_number = isinstance(value, (int, float))
        ratio = value / bound if is_number and bound else (float(bool(value)) * 1e9)
        operator = finding["name"].split("/")[1]
        rows.setdefault(operator, []).append(ratio if is_number else float("inf"))
    text = (
        '<p class="note">A dot is a call: its error over the error that rounding explains; '
        "each step to the right is a factor of ten.</p>"
    )
    return text + drawings.errors(rows) if rows else ""


def _of_figures(findings: list[dict[str, Any]]) -> Iterator[str]:
    by_unit: dict[str, list[tuple[str, float, str]]] = {}
    for finding in findings:
        if finding["kind"] == "figure":
            name = finding["name"].split("/", 1)[1]
            by_unit.setdefault(finding["unit"], []).append(
                (name, finding["value"], finding["unit"])
            )
    for rows in by_unit.values():
        yield drawings.bars(rows) + "\n"


def _of_traces(directory: Path) -> Iterator[str]:
    for profile in sorted((directory / PROFILE).glob("*")):
        if tasks := tasks_of(profile):
            yield f"<p>{escape(profile.name)} with overlap, from the profiler:</p>"
            yield drawings.timeline(tasks) + "\n"


def _of_calls(findings: list[dict[str, Any]]) -> str:
    taken = sum(finding["value"] == "taken" for finding in findings)
    refused = sum(str(finding["value"]).isdigit() for finding in findings)
    absent = sum(finding["value"] == "absent" for finding in findings)
    words = f"<p>{taken} calls were taken, {refused} refused"
    return words + (f", {absent} have no operator.</p>" if absent else ".</p>")


def _table(part: dict[str, Any]) -> str:
    rows = ""
    for finding in part["findings"]:
        mark = {True: '<td class="good">yes</td>', False: '<td class="bad">no</td>'}
        bound = f" of {finding['bound']:g}" if finding.get("bound") else ""
        value = escape(str(finding["value"])[:120])
        rows += (
            f"<tr><td>{escape(finding['name'].split('/', 1)[-1])}</td><td>{value}{bound} "
            f"{escape(finding.get('unit', ''))}</td>{mark.get(finding.get('passed'), '<td></td>')}"
            "</tr>\n"
        )
    head = "<tr><th>finding</th><th>value</th><th>as expected</th></tr>"
    return (
        f"<details><summary>all {len(part['findings'])} findings</summary>"
        f"<table>{head}\n{rows}</table></details>\n"
    )
