"""Schedules that people share: finding one of those that come along, checking any file, contributing one."""

from monetlite.zoo.collection import (
    PREFIX,
    Shelf,
    ZooEntry,
    entry_of,
    file_name,
    find,
    find_entry,
    load_schedule,
    matching,
    shipped,
)

__all__ = [
    "PREFIX",
    "Shelf",
    "ZooEntry",
    "entry_of",
    "file_name",
    "find",
    "find_entry",
    "load_schedule",
    "matching",
    "shipped",
]
