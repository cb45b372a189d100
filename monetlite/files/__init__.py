"""Schedules to and from disk: YAML, read safely, written atomically."""

from monetlite.files.schedules import load_schedule, save_schedule

__all__ = ["load_schedule", "save_schedule"]
