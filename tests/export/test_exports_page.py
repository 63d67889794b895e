"""docs/exports.md names tests that exist."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "exports.md"


def test_every_row_of_what_holds_has_its_test():
    table = PAGE.read_text().partition("| what holds |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert len(rows) > 20
    for row in rows:
        (file, test), *others = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert not others and f"def {test}(" in (FOLDER / file).read_text(), row
