"""Writes the page "What works with what" from core's rows of features and architectures."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from reference_cells import GENERATED, cell

INTRODUCTION = """`vllm-davinci config MODEL -- OPTIONS` lists the features of an engine. A start that asks for two features
of which one excludes the other ends with their flags.

"""  # noqa: E501 - lines of the page


def features_page(
    features: Collection[Any], architectures: Mapping[str, Any], always: object
) -> str:
    """Writes the page. always: the `is_asked` of rows that are not features"""
    text = "# What works with what\n\n" + GENERATED.format(
        source="packages/core/src/vllm_davinci/core/features and config/architectures.py"
    )
    rows = [row for row in features if row.is_asked is not always]
    served, refused = [r for r in rows if r.is_served], [r for r in rows if not r.is_served]
    text += INTRODUCTION + _served(sorted(served, key=lambda row: row.title.lower()))
    text += "\n## Not supported\n\n| asked by | what | why |\n| --- | --- | --- |\n"
    for row in sorted(refused, key=lambda row: (not row.flag, row.key.lstrip("-"))):
        why = "" if callable(row.because) else row.because
        text += f"| {f'`{row.flag}`' if row.flag else 'the model'} | {cell(row.title)} | {why} |\n"
    return text + _models(architectures)


def _served(rows: list[Any]) -> str:
    excluded: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        for key, why in row.excludes.items():
            excluded[row.key][key] = excluded[key][row.key] = why
    titles = {row.key: row.title for row in rows}
    text = "| feature | asked by | not with |\n| --- | --- | --- |\n"
    for row in rows:
        others = "; ".join(
            titles[key] + (f" ({why})" if why else "")
            for key, why in sorted(excluded[row.key].items(), key=lambda each: titles[each[0]])
        )
        asked_by = f"`{row.flag}`" if row.flag else "the model"
        text += f"| {cell(row.title)} | {asked_by} | {cell(others)} |\n"
    return text


def _models(architectures: Mapping[str, Any]) -> str:
    text = (
        "\n## Models\n\nArchitectures without a row are served by vLLM's definition, or by one of "
    )
    text += "them; [models.md](../measurements/models.md) has what was tried.\n\n"
    text += "| architecture | what is known of it |\n| --- | --- |\n"
    for name, row in sorted(architectures.items()):
        known = [
            "recurrent states, which are computed" if row.states else "",
            f"drafts (MTP) for {row.drafts_for}" if row.drafts_for else "",
            f"no drafts (MTP): {row.no_drafts}" if row.no_drafts else "",
            f"bidirectional attention: {row.bidirectional.value}" if row.bidirectional else "",
            "" if row.is_importable else "refused: vLLM's definition needs CUDA",
        ]
        text += f"| `{name}` | {'; '.join(filter(None, known))} |\n"
    return text
