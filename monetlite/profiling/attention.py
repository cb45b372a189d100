"""Whether a graph's attention is that of the device that it is priced for."""

from monetlite.core.devices import find_device
from monetlite.core.graph import OperatorGraph
from monetlite.operators.traits import family_of


def attention_problem(graph: OperatorGraph, device_name: str) -> str:
    """What is wrong with estimating, for a device, attention that was traced elsewhere; nothing if nothing is."""
    device = find_device(device_name)
    traced_on = graph.device
    if traced_on not in ("cpu", "cuda") and find_device(traced_on).compute_capability == device.compute_capability:
        return ""
    families = {
        family_of(call.target) for operator in graph.operators if (call := operator.implementations[0].call)
    }
    if traced_on == "cuda" or families.isdisjoint(("attention", "attention_backward", "safe_softmax")):
        return ""
    return (
        f"the attention of {graph.name} was traced as {traced_on} runs it, and {device.name} may run other "
        f"operators: a schedule solved from this would then not fit the model there. Trace it with "
        f'device="{device.name}"'
    )


__all__ = ["attention_problem"]
