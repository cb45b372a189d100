"""Profiles: costs of every implementation of every operator, measured here or estimated for a named device.

`measured` and `estimate` make them (`roofline` has the formulas), `step_additions` counts what a step has beside
its operators. `meters` and `memory_use` measure time and memory; nothing else in monetlite reads memory.
"""
