"""Priced training steps of one model at several sizes, for questions that take many."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from monetlite.core.child_processes import ChildFailed, begin_call
from monetlite.core.costs import Profile
from monetlite.core.graph import AS_TRACED, TILED_ROWS, OperatorGraph, Resident
from monetlite.core.options import REORDERED_SUMS, PricingOptions, SolvingOptions
from monetlite.fx.torch_internals.torch_pytree import tree_map_only
from monetlite.models import BuiltModel
from monetlite.models.equal_layers import EqualLayers, find_equal_layers, shorten
from monetlite.planning.batch_costs import Unlike
from monetlite.planning.depth_costs import at_full_depth
from monetlite.planning.pipeline import measured_here, price
from monetlite.profiling.measured import Measurement
from monetlite.profiling.step_additions import with_additions
from monetlite.tracing import trace_layouts
from monetlite.tracing.step_inputs import autocast_to, resident_bytes, split_inputs, tensors_in_order

MEASURING_SECONDS = 10.0
"""About the most time to measure a step's costs on this machine, each of one run or two."""
WORTH_A_PROCESS = 3.0
"""Seconds that a trace takes from which another is made in a process of its own, which starts in about five."""


@dataclass
class ModelSteps:
    """A model on the meta device, whose step is traced and priced where it is asked for.

    Of a transformers model with equal layers few are traced, which says what all are.

    Attributes:
        built: the model with its inputs.
        rebuild: builds it again at a batch and a length; picklable.
        pricing: device, optimizer and accumulation; the device is given.
        solving: says which implementations are priced.
        autocast: dtype of the `torch.autocast` that the step runs in: bfloat16 or float16; or None.
    """

    built: BuiltModel
    rebuild: Callable[[int | None, int | None], BuiltModel]
    pricing: PricingOptions
    solving: SolvingOptions
    autocast: str | None = None
    layers: EqualLayers | None = field(init=False)
    """Equal layers, of which few are traced."""

    def __post_init__(self) -> None:
        self.layers = find_equal_layers(self.built.model) if self.built.name.startswith("hf:") else None
        self._whole: Resident | None = None
        self._asked = self.built
        self._seconds = 0.0

    @property
    def batch(self) -> int:
        return self._asked.batch

    @property
    def length(self) -> int | None:
        """Tokens of a sequence; None for a model of images, or one whose inputs are not known as tokens."""
        inputs = self._asked.example_inputs
        if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
            return None
        return int(inputs["input_ids"].shape[1])

    def priced(self, batch: int | None = None, length: int | None = None) -> dict[str, Profile]:
        """Costs in every layout that differs, by layout; by default at the sizes that were asked for.

        Raises:
            TraceError: the model can't be captured.
            ModelError: it can't be built at these sizes.
        """
        if self.layers is not None:
            try:
                return self._of_few_layers(self.layers, batch, length)
            except Unlike:
                self.layers = None
                self.built = self.rebuild(None, None)
        built = self.built if batch is None and length is None else self.rebuild(batch, length)
        return self._traced(built, built.example_inputs)

    def begin_priced(self, batch: int, length: int | None) -> Callable[[], dict[str, Profile]]:
        """Begin `priced` in a process beside this one, where nothing is to be measured here.

        Returns:
            Waits for the costs. Raises what `priced` raises.
        """
        alone = functools.partial(self.priced, batch, length)
        if self.pricing.device in ("cpu", "cuda") or self._seconds < WORTH_A_PROCESS:
            return alone
        try:
            begun = begin_call(_priced_anew, self.rebuild, self.pricing, self.solving, self.autocast, batch, length)
        except OSError:  # two processes need more than there is
            return alone

        def priced() -> dict[str, Profile]:
            try:
                return begun()
            except ChildFailed:
                return alone()

        return priced

    def _of_few_layers(self, layers: EqualLayers, batch: int | None, length: int | None) -> dict[str, Profile]:
        inputs = self._resized(batch or self.batch, length or self.length)
        model = self.built.model
        if self._whole is None:
            self._whole = resident_bytes(model, [])
            shorten(model, layers)
        own = resident_bytes(model, tensors_in_order(model, *split_inputs(inputs)))
        resident = replace(self._whole, inputs=own.inputs)
        return self._traced(self.built, inputs, lambda profile: at_full_depth(profile, layers, resident))

    def _resized(self, batch: int, length: int | None) -> Any:
        """Inputs of another batch and length: those of text are (N, tokens)."""

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != self.batch:
                return tensor
            tokens = tensor.dim() == 2 and tensor.shape[1] == self.length
            shape = (batch, length or 0) if tokens else (batch, *tensor.shape[1:])
            return tensor.new_empty(shape)

        return tree_map_only(torch.Tensor, resized, self._asked.example_inputs)

    def _traced(
        self, built: BuiltModel, inputs: Any, whole: Callable[[Profile], Profile] | None = None
    ) -> dict[str, Profile]:
        began = time.monotonic()
        device = self.pricing.device
        kind = "cuda" if device == "cuda" else "cpu"
        with autocast_to(kind, self.autocast):
            graphs = trace_layouts(
                built.model,
                inputs,
                (AS_TRACED, TILED_ROWS) if self.solving.tolerance >= REORDERED_SUMS else (AS_TRACED,),
                device=device,
                meta_device=kind,
                each_gradient=whole is not None,
            )
        self._seconds = time.monotonic() - began
        found = {}
        for graph in graphs:
            options = PricingOptions(device=device)
            profile = _priced(replace(graph, name=built.name), options, self.solving)
            profile = with_additions(profile if whole is None else whole(profile), self.pricing)
            found[graph.layout] = replace(profile, source=built.source)
        return found


def _priced_anew(
    rebuild: Callable[[int | None, int | None], BuiltModel],
    pricing: PricingOptions,
    solving: SolvingOptions,
    autocast: str | None,
    batch: int,
    length: int | None,
) -> dict[str, Profile]:
    """`ModelSteps.priced`, in a process that has no model yet."""
    steps = ModelSteps(
        built=rebuild(None, None), rebuild=rebuild, pricing=pricing, solving=solving, autocast=autocast
    )
    return steps.priced(batch, length)


def _priced(graph: OperatorGraph, options: PricingOptions, solving: SolvingOptions) -> Profile:
    """Costs of a step: on this machine those of a run or two of each call, as an answer is wanted soon."""
    device = measured_here(graph, options)
    if device is None:
        return price(graph, options, solving)
    measurement = Measurement(graph, device, tolerance=solving.tolerance)
    return measurement.rough_profile(MEASURING_SECONDS, alternatives=True)
