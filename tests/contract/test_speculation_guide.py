"""The guide to speculative decoding lists what the code serves and refuses."""

import re
from pathlib import Path

from vllm_davinci.core.features.speculation import MTP_REFUSED, MTP_SERVED, REFUSED, SERVED


def test_both_tables_have_the_reasons_of_the_code(repository: Path):
    guide = (repository / "docs/guides/speculative_decoding.md").read_text()
    for is_served, known in (("refused", REFUSED | MTP_REFUSED), ("served", MTP_SERVED)):
        rows = re.findall(rf"^\| `(\w+)` \| {is_served}: (.*) \|$", guide, re.MULTILINE)
        assert dict(rows) == known
        assert len(rows) == len(known)
    assert all(f"`{method}`" in guide for method in SERVED)
