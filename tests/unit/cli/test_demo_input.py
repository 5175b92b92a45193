"""The demo's jobs: which files, in which order, cut into which ranges; and what parsing makes of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli.demo_input import Unit, collect_units, split_units
from coordinator.cli.demo_parse import Counts, ParseStatus, count_file, count_source


def write(folder: Path, name: str, content: bytes = b"x = 1\n") -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def test_files_come_in_the_order_of_their_paths_without_installed_packages(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "site-packages/no.py", "note.txt", "a/b/c.py"):
        write(tmp_path, name)
    (tmp_path / "loop").symlink_to(tmp_path)

    assert ["a/b/c.py", "a/z.py", "a.py", "b.py"] == [u.path for u in collect_units(tmp_path, wanted=4)]


def test_few_files_are_cut_into_line_ranges_until_there_are_enough(tmp_path: Path) -> None:
    write(tmp_path, "long.py", b"x = 1\n" * 100)
    write(tmp_path, "empty.py", b"")

    units = collect_units(tmp_path, wanted=8)

    assert len(units) == 8
    assert units[0] == Unit(path="empty.py", last=0)
    parts = units[1:]
    assert [1, *(part.last + 1 for part in parts)] == [*(part.first for part in parts), 101]
    assert len({unit.unit_id for unit in units}) == 8


def test_a_unit_of_one_line_is_never_cut() -> None:
    units = [Unit(path="a.py", last=2), Unit(path="b.py", last=0)]

    assert [(u.path, u.first, u.last) for u in split_units(units, 1_000)] == [
        ("a.py", 1, 1),
        ("a.py", 2, 2),
        ("b.py", 1, 0),
    ]


@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=8), wanted=st.integers(1, 200))
def test_ranges_cover_every_line_exactly_once(lengths: list[int], wanted: int) -> None:
    units = split_units([Unit(path=f"{i:02}.py", last=n) for i, n in enumerate(lengths)], wanted)

    covered = [(u.path, line) for u in units for line in range(u.first, u.last + 1)]
    assert covered == [(f"{i:02}.py", line) for i, n in enumerate(lengths) for line in range(1, n + 1)]
    assert len(units) == max(len(lengths), min(wanted, sum(max(1, n) for n in lengths)))


def test_a_folder_without_python_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*\.py file below"):
        collect_units(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        collect_units(tmp_path / "absent")


@pytest.mark.parametrize("path", ["a/b.py", "ä.py", "x\udcff.py", "y" * 300 + ".py", "tab\there.py"])
def test_payload_and_id_carry_any_path(path: str) -> None:
    unit = Unit(path=path, first=3, last=9, whole=False)

    assert Unit.from_payload(unit.to_payload(7)) == (unit, 7)
    assert len(unit.unit_id.encode()) <= 256
    assert unit.unit_id.isprintable()


SOURCE = b"""\
class A:
    def f(self):
        async def g():
            pass


def h(): pass
"""


def test_a_range_counts_what_begins_in_it() -> None:
    assert count_source(SOURCE, 1, 7) == Counts(status=ParseStatus.PARSED, lines=7, functions=3, classes=1)
    assert count_source(SOURCE, 3, 7) == Counts(status=ParseStatus.PARSED, lines=5, functions=2)
    assert count_source(b"", 1, 0) == Counts(status=ParseStatus.PARSED, lines=0)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (b"def f(:\n", ParseStatus.SYNTAX_ERROR),
        (b"x = 1\0\n", ParseStatus.SYNTAX_ERROR),
        (b"# no declared encoding\nx = '\xe4'\n", ParseStatus.SYNTAX_ERROR),
        (b"# coding: no-such-thing\n", ParseStatus.SYNTAX_ERROR),
        (b"# coding: latin-1\ndef \xe4(): pass\n", ParseStatus.PARSED),
        (b"\xef\xbb\xbfx = 1\n", ParseStatus.PARSED),
        (b"x = '\\d'\n", ParseStatus.PARSED),
        (b"-" * 100_000 + b"1\n", ParseStatus.TOO_COMPLEX),
    ],
)
def test_what_does_not_parse_is_a_result(source: bytes, status: ParseStatus) -> None:
    assert count_source(source, 1, 2).status is status


def test_a_file_that_is_gone_is_a_result(tmp_path: Path) -> None:
    assert count_file(tmp_path / "gone.py", 1, 1).status is ParseStatus.UNREADABLE
    assert count_file(Path(os.devnull), 1, 1).status is ParseStatus.PARSED
