"""A model that is compiled in pieces: its forward pass, with torch changed so that its parts are captured."""

import sys
from functools import partial
from types import CodeType
from typing import Any

from torch import nn

from monetlite.core.graph import ALL_OUTPUTS, TRAINED_OUTPUTS
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dynamo import (
    MAX_PIECES,
    REFUSALS,
    drawing_functions,
    dynamo_settings,
    forget_left_out,
    left_out,
    taken_apart,
    while_compiling,
)
from monetlite.fx.torch_internals.torch_varying import VaryingNumbers
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.tracing.attention_masks import masks_as_plain
from monetlite.tracing.capture import capture_settings, compile_step, training_step
from monetlite.tracing.output_recorders import recorders_captured
from monetlite.tracing.refusals import explain, own_error


class ModelInPieces:
    """The forward pass of a model, compiled in pieces.

    Args:
        model: the module.
        training: of its steps.
        outputs: that the caller asked for, of a model with a loss. All that is asked for, and more, comes back.
    """

    def __init__(self, model: nn.Module, training: PiecewiseTraining, outputs: str) -> None:
        self.training = training
        self._left_out: set[CodeType] = set()
        training.left_out = self._left_out
        self._model = model
        self._left_alone, self._numbers = drawing_functions(model), VaryingNumbers()
        trained = TRAINED_OUTPUTS if outputs == TRAINED_OUTPUTS else ALL_OUTPUTS
        self._compiled = compile_step(training_step(model, trained), training.backend, whole=False)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass of a step.

        Raises:
            Those of `PiecewiseTraining.step_begins`.
        """
        self.training.step_begins(args, kwargs)
        handled = sys.exc_info()[1]
        if self.training.lost:
            forget_left_out()
        # A function at which TorchDynamo itself fails runs as it is; functions that it calls are captured.
        unless_captured = dynamo_settings(suppress_errors=True)
        alone = masks_as_plain(self._model, args, kwargs)
        changes = patched(self._numbers.captured(), self.training.sizes.captured(), self.training.again.noted())
        with (
            while_compiling(partial(capture_settings, MAX_PIECES)),
            taken_apart(self._left_alone),
            left_out(self._left_out),
            changes,
            unless_captured,
            alone,
            recorders_captured(),
        ):
            try:
                output = self._compiled(*args, **kwargs)
            except BaseException as error:
                self.training.forward_fails()
                if isinstance(error, REFUSALS):
                    raise own_error(error, handled) or explain(error, advice="") from error
                raise
        self.training.forward_ends()
        return output
