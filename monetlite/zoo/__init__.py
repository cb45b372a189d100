"""Schedules that people share: finding one of those that come along, checking any file, contributing one."""

from monetlite.zoo.entries import Entry, entry_of, file_name
from monetlite.zoo.queries import PREFIX, find, load_schedule, matching
from monetlite.zoo.shelf import Shelf, shipped

__all__ = [
    "PREFIX",
    "Entry",
    "Shelf",
    "entry_of",
    "file_name",
    "find",
    "load_schedule",
    "matching",
    "shipped",
]
