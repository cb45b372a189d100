"""Pictures of schedules, by matplotlib: one file each, and `style` for what they share."""
