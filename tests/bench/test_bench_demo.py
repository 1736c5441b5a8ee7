"""Rows become tables that can stand in a report as they are."""

from edgemesh.cli.bench_demo import SECTIONS, Row, markdown


def test_repeated_rows_show_their_mean_and_spread_and_sections_stand_apart():
    rows = [
        Row("speed", "tp1", {"tok/s": 10.0, "ms": 1.0}),
        Row("speed", "tp1", {"tok/s": 20.0, "ms": 1.0}),
        Row("speed", "tp2", {"tok/s": 7.0}),
        Row("memory", "vault-0", {"MiB": 3.25}),
    ]
    assert markdown(rows).splitlines() == [
        "**speed**",
        "",
        "| | tok/s | ms |",
        "|---|---:|---:|",
        "| tp1 | 15.0 (10.0-20.0) | 1.00 |",
        "| tp2 | 7.00 |  |",
        "",
        "**memory**",
        "",
        "| | MiB |",
        "|---|---:|",
        "| vault-0 | 3.25 |",
    ]


def test_every_section_says_what_it_measures():
    assert all(section.__doc__ for section in SECTIONS.values())
