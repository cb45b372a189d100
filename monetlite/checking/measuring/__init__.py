"""Measuring a model as it is, before anything is planned: what loading it takes, and each batch size."""

from monetlite.checking.measuring.measure import Setting, measure
from monetlite.checking.measuring.results import Line, Measurements, Mode, Run, fit, largest_batch

__all__ = ["Line", "Measurements", "Mode", "Run", "Setting", "fit", "largest_batch", "measure"]
