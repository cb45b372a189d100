"""Schedules and profiles to and from disk: YAML, read safely, written atomically."""
