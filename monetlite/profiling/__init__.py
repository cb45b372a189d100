"""Profiles: costs of every implementation of every operator, measured here or estimated for a named device.

`measured` (single calls in `measured_calls`) and `estimate` (formulas in `roofline`) make them. `step_additions`
counts what a step has beside its operators. `meters` measure time and memory, by `memory_records` (what torch
allocates) and `memory_use` (what the system reports); nothing else in monetlite reads memory.
"""
