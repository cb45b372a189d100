"""Schedules for a budget of reserved memory, which `nvidia-smi` shows."""
