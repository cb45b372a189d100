"""From a module to an operator graph: capture the joint graph, find its storages, name and build operators."""

from monetlite.tracing.operator_graph import Traced, build_graph, trace, trace_layouts
from monetlite.tracing.step_inputs import Inputs, split_inputs

__all__ = ["Inputs", "Traced", "build_graph", "split_inputs", "trace", "trace_layouts"]
