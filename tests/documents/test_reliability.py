"""The page on reliability says what the attack's rows say, and every kind of attack is on it."""

import json

import attack
from tables import place

from tests.attack import campaign

PAGE = attack.ROOT / "docs" / "reliability.md"


def test_the_page_says_what_the_rows_say() -> None:
    assert place(PAGE, "attack", attack.table()) == PAGE.read_text()


def test_every_kind_of_attack_is_described() -> None:
    kinds = [kind for _, counts in campaign.GROUPS.values() for kind in counts]
    assert list(attack.WHAT) == kinds


def test_the_long_form_is_as_long_as_is_said() -> None:
    counts = {
        kind: count[campaign.LONG] for _, own in campaign.GROUPS.values() for kind, count in own.items()
    }
    fuzzed, killed = attack.totals([{"kind": kind, "tried": count} for kind, count in counts.items()])
    assert fuzzed >= 100_000
    assert killed >= 1000


def test_the_rows_are_of_the_whole_long_form_and_all_of_it_held() -> None:
    rows = json.loads((attack.RESULTS / "attack.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == list(attack.WHAT)
    assert all(row["right"] + row["refused"] == row["tried"] and not row["findings"] for row in rows)
    fuzzed, killed = attack.totals(rows)
    assert fuzzed >= 100_000
    assert killed >= 1000
