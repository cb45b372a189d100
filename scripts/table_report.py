"""A table that a script prints row by row and writes to a file, with the hardware, versions and commit above it."""

import argparse
import datetime
import sys
from collections.abc import Iterable
from pathlib import Path

from monetlite.checking.comparison.bench import environment


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="also write the table to this file")


def write_table(
    title: str,
    about: str,
    columns: str,
    rows: Iterable[str],
    output: Path | None = None,
    *,
    left: int = 1,
    device: str = "cpu",
) -> None:
    """Print a report, and write what there is of it after each row: an hour's work is not lost with its last minute.

    Args:
        title: without the date. about: sentences on how it was measured.
        columns: their heads, as rows have them (`| one | two |`). rows: made one by one. output: the file.
        left: number of columns of words; the others are of figures. device: that it was measured on.
    """
    where = "; ".join(f"{name} {value}" for name, value in environment(device).items())
    figures = columns.count("|") - 1 - left
    lines = [
        f"# {title}, {datetime.date.today()}",
        "",
        f"{where}. Written by `scripts/{Path(sys.argv[0]).name}`. {about}",
        "",
        columns,
        f"|{' --- |' * left}{' ---: |' * figures}",
    ]
    print("\n".join(lines), flush=True)
    for row in rows:
        print(row, flush=True)
        lines.append(row)
        if output is not None:
            output.write_text("\n".join(lines) + "\n", encoding="utf-8")
