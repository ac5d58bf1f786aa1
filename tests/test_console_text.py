"""Tables line up in a terminal, whatever script they hold."""

from __future__ import annotations

import pytest

from indictune.console_text import display_width, printable, shown_rate, table


def test_a_table_lines_up_with_header_and_footer_set_off() -> None:
    assert table(["name", "rows"], [["हिन्दी", "1,200"], ["te", "7"]], footer=["all", "1,207"]).splitlines() == [
        "name    rows",
        "------------",
        "हिन्दी  1,200",  # 5 columns, however an editor shows it
        "te         7",
        "------------",
        "all    1,207",
    ]


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("", 0),
        ("neutral", 7),
        ("नकारात्मक", 8),  # na ka aa ra aa ta (virama) ma ka: aa is a sign after its letter, in a column of its own
        ("మంచి", 3),  # ma m ca (i): the sign i is written over the letter
        ("நல்ல", 3),  # na la (pulli) la
        ("e\N{COMBINING ACUTE ACCENT}", 1),
        ("क्\N{ZERO WIDTH JOINER}ष", 2),
        ("😊", 2),
        ("良い", 4),
        ("Ａ", 2),  # fullwidth A
    ],
)
def test_display_width(text: str, width: int) -> None:
    assert display_width(text) == width


def test_half_a_surrogate_pair_is_written_out() -> None:
    """As in the name of a file in Latin-1, which `os.fsdecode` reads so: no stream in UTF-8 takes it."""
    assert printable("caf\udce9.csv, \ud83dx, 😊") == "caf\\udce9.csv, \\ud83dx, 😊"


@pytest.mark.parametrize(("rate", "shown"), [(1234.4, "1,234"), (10.4, "10"), (3.44, "3.4"), (0.31, "0.31")])
def test_a_slow_rate_is_not_shown_as_none(rate: float, shown: str) -> None:
    assert shown_rate(rate) == shown
