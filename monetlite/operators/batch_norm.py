"""Batch norm: run again, it normalises with the batch's statistics but leaves the running ones alone."""

from dataclasses import replace

from monetlite.graph import Call

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"


def without_running_statistics(call: Call) -> Call | None:
    """The same normalisation of the same batch, for a re-run: same kernel, same bits, no running statistics."""
    if call.target != _FUNCTIONAL:
        return None
    source, weight, bias, _, _, training, momentum, eps = call.args
    if training is not True:
        return None
    return replace(
        call,
        target="aten._native_batch_norm_legit.no_stats",
        args=(source, weight, bias, training, momentum, eps),
        outputs=call.outputs[:3],
    )
