"""From a module to an operator graph: capture the joint graph, find its storages, name and build operators."""

from monetlite.tracing.build import Inputs, Traced, build_graph, split_inputs, trace

__all__ = ["Inputs", "Traced", "build_graph", "split_inputs", "trace"]
