"""A schedule with something in every field, for tests of files."""

from monetlite.core.choices import Choices
from monetlite.core.graph import TensorSpec
from monetlite.core.schedule import Schedule, Status
from monetlite.core.source import ModelSource


def full_schedule(**changes) -> Schedule:
    facts = {
        "name": "Net: v2 # é",
        "fingerprint": "63a8d479a9ee2ac98c464d42",
        "structure": "bf99b23679fef593604cd9b7",
        "operators": 13,
        "inputs": {
            "input0": TensorSpec(shape=(4, 3, 8, 8), stride=(192, 1, 24, 3), dtype="float32", requires_grad=True),
            "input1": TensorSpec(shape=(), stride=(), dtype="int64"),
        },
        "choices": Choices(
            before={
                "conv2.backward": (("conv1", "default"), ("relu", "inplace")),
                "yes": (("1e3", "default"),),
            },
            implementations={"relu": "inplace", "no": "0x10"},
            stored=("conv1", "null", "12"),
        ),
        "budget_bytes": 6 * 10**9,
        "peak_bytes": 5_999_999_999,
        "latency_ms": 123.45678901234567,
        "lower_bound_ms": 0.1 + 0.2,
        "status": Status.FEASIBLE,
        "plain_peak_bytes": 8 * 10**9,
        "plain_latency_ms": 100.0,
        "device": "a100-40gb",
        "kind": "estimated",
        "solver": "baselines + search",
        "seconds": 59.9,
        "environment": {"torch": "2.13.0", "threads": "2"},
        "optimizer": "adamw",
        "tolerance": 1e-5,
        "layout": "channels_last",
        "autocast": "bfloat16",
        "outputs": "loss",
        "accumulate": True,
        "step_in_backward": True,
        "smallest_proven_bytes": 10**9,
        "smallest_reached_bytes": 2 * 10**9,
        "reserved_bytes": 3 * 10**9,
        "source": ModelSource(model="hf:vit", batch=4, input_size=(224, 160), sequence_length=9, dtype="bfloat16"),
        "operator_digests": ("0123", "dead", "beef"),
    }
    return Schedule(**(facts | changes))
