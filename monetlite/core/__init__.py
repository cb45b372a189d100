"""The data that passes between the rooms, and `simulate`, its one definition of memory and latency. No torch."""
