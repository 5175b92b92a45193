"""The demo's jobs: one for each Python file below a folder, or for ranges of lines where files are few.

The order is that of the paths, so that two runs over the same files submit the same jobs.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.demo_parse import count_lines

__all__ = ["JOBS_WANTED", "Unit", "collect_units", "default_input", "split_units"]

JOBS_WANTED = 1_000
_LONGEST_ID = 200  # bytes; the coordinator takes 256
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unit:
    """One job's share of the input: lines ``first`` to ``last`` of a file.

    Args:
        path: relative to the input folder, with slashes; may hold surrogates for bytes that are not UTF-8.
        first, last: counted from 1, both included; an empty file has last 0.
        whole: whether that is the whole file.
    """

    path: str
    first: int = 1
    last: int
    whole: bool = True

    @property
    def unit_id(self) -> str:
        """Name of the row, and of the job: the path, with the lines if it is a part."""
        name = self.path if self.whole else f"{self.path}:{self.first}-{self.last}"
        raw = name.encode("utf-8", "surrogateescape")
        if len(raw) <= _LONGEST_ID and name.isprintable():
            return name
        return f"sha256:{hashlib.sha256(raw).hexdigest()}"

    def to_payload(self, number: int) -> bytes:
        """The job's payload; ``number`` is its place in the order of submission, from 0."""
        content = {"path": self.path, "first": self.first, "last": self.last, "whole": self.whole}
        return json.dumps({**content, "number": number}).encode()

    @staticmethod
    def from_payload(payload: bytes) -> tuple[Unit, int]:
        """Undo `to_payload`."""
        content = json.loads(payload)
        number = int(content.pop("number"))
        return Unit(**content), number


def default_input() -> Path:
    """The standard library of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def collect_units(folder: Path, wanted: int = JOBS_WANTED) -> list[Unit]:
    """Return the units below ``folder`` in order of path and line.

    Folders of installed packages and links to folders are left out. Fewer than ``wanted`` files are cut into
    ranges of lines until there are ``wanted`` units or every unit has one line.

    Raises:
        FileNotFoundError: ``folder`` is no folder, or has no ``*.py`` file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    files = sorted(_python_files(folder), key=lambda file: file.relative_to(folder).parts)
    if not files:
        raise FileNotFoundError(f"there is no *.py file below {folder}")
    units = [Unit(path=file.relative_to(folder).as_posix(), last=_lines(file)) for file in files]
    return units if len(units) >= wanted else split_units(units, wanted)


def split_units(units: Sequence[Unit], wanted: int) -> list[Unit]:
    """Halve the longest unit, the first among equals, until there are ``wanted`` or none has two lines."""
    heap = [(-(unit.last - unit.first), place, unit.first, unit) for place, unit in enumerate(units)]
    heapq.heapify(heap)
    while len(heap) < wanted:
        length, place, _, unit = heap[0]
        if length >= 0:
            break
        middle = (unit.first + unit.last) // 2
        left = Unit(path=unit.path, first=unit.first, last=middle, whole=False)
        right = Unit(path=unit.path, first=middle + 1, last=unit.last, whole=False)
        heapq.heapreplace(heap, (-(left.last - left.first), place, left.first, left))
        heapq.heappush(heap, (-(right.last - right.first), place, right.first, right))
    return [unit for _, _, unit in sorted((place, first, unit) for _, place, first, unit in heap)]


def _python_files(folder: Path) -> Iterable[Path]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS and not entry.is_symlink():
                yield from _python_files(entry)
        elif entry.suffix == ".py" and entry.is_file():
            yield entry


def _lines(file: Path) -> int:
    try:
        return count_lines(file.read_bytes())
    except OSError:
        return 0
