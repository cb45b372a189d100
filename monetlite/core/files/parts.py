"""What schedule files and profile files have in common: where a model comes from, and what its inputs look like."""

from collections.abc import Mapping
from typing import Any

from monetlite.core.files.safe_yaml import InLine, Record, shown
from monetlite.core.graph import AS_TRACED, CHANNELS_LAST, TensorSpec
from monetlite.core.source import ModelSource, is_shareable


def read_source(record: Record) -> ModelSource:
    """A model's source, if it is a name that means the same everywhere.

    Raises:
        ScheduleFileError: it is a path or a function of somebody's, or sizes are not sizes.
    """
    model = record.text("model")
    if not is_shareable(model):
        raise record.error(
            "model",
            f"is {model!r:.80}; it should be a built-in model, or hf:, timm: or torchvision: and a name",
        )
    size = record.integers("input_size") if record.optional("input_size") else None
    if size is not None and len(size) != 2:
        raise record.error("input_size", f"should be a height and a width, not {shown(size)}")
    return ModelSource(
        model=model,
        batch=record.integer("batch", least=1),
        input_size=None if size is None else (size[0], size[1]),
        sequence_length=record.integer("sequence_length", least=1) if record.optional("sequence_length") else None,
        dtype=record.text("dtype") if record.optional("dtype") else None,
    )


def source_data(source: ModelSource | None) -> dict[str, Any] | None:
    """A source as plain data."""
    if source is None:
        return None
    return {
        "model": source.model,
        "batch": source.batch,
        "input_size": None if source.input_size is None else InLine(source.input_size),
        "sequence_length": source.sequence_length,
        "dtype": source.dtype,
    }


def read_inputs(record: Record) -> dict[str, TensorSpec]:
    """The layouts of a model's inputs, by name."""
    return {name: _tensor_spec(record.record(name)) for name in record}


def inputs_data(inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """The layouts of inputs as plain data."""
    return {
        name: {
            "shape": InLine(spec.shape),
            "stride": InLine(spec.stride),
            "dtype": spec.dtype,
            "requires_grad": spec.requires_grad,
        }
        for name, spec in inputs.items()
    }


def read_layout(record: Record) -> str:
    """The layout of a graph's images."""
    layout = record.text("layout") if record.optional("layout") else AS_TRACED
    if layout not in (AS_TRACED, CHANNELS_LAST):
        raise record.error("layout", f"is {layout!r:.80}; it should be {AS_TRACED!r} or {CHANNELS_LAST!r}")
    return layout


def _tensor_spec(record: Record) -> TensorSpec:
    return TensorSpec(
        shape=record.integers("shape"),
        stride=record.integers("stride"),
        dtype=record.text("dtype"),
        requires_grad=record.flag("requires_grad"),
    )


__all__ = ["inputs_data", "read_inputs", "read_layout", "read_source", "source_data"]
