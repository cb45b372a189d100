"""Pictures of schedules, by matplotlib: one file each, and `drawing` with the parts that they share."""
