"""Limits on the memory that torch's CUDA allocator takes from the GPU, which `nvidia-smi` shows."""

import contextlib
import os
from collections.abc import Iterator

import torch

from monetlite.allocator.allocator import PAGE_BYTES
from monetlite.core.announcing import warn
from monetlite.core.errors import BudgetError, DeviceError
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes, parse_budget
from monetlite.fx.torch_internals.torch_cuda import set_allocator_settings

_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the allocator's settings; the first that is set counts."""
_EXPANDABLE = "expandable_segments"


def limit_reserved(budget: str | int | float, device: int | torch.device | str | None = None) -> None:
    """Limit the memory that this process reserves on a GPU; call it before anything is on the GPU.

    By default, PyTorch's allocator reserves much more than a schedule's peak: 1.6 to 2.2 times as much for
    convolutional networks within 6 GB, on paper (`monetlite.allocator`). With this limit it uses *expandable
    segments*, which grow and give back single pages, and it gives back free memory before it exceeds the budget. A
    step that does not fit raises `torch.OutOfMemoryError`: use a schedule that was solved with `reserved=True` for
    this budget. The CUDA context, some hundred megabytes, comes on top.

    Args:
        budget: `"6GB"`, `"6GiB"`, or bytes.
        device: the GPU; by default, and for `"cuda"`, the current one.

    Raises:
        DeviceError: there is no GPU, `device` is not a GPU, or the environment asks for another allocator than
            PyTorch's own.
        BudgetError: the budget can't be read, is in percent, or is less than the memory that is reserved already.

    Example:
        >>> import monetlite
        >>> monetlite.limit_reserved("6GB")                     # doctest: +SKIP
        >>> model = monetlite.MONeTWrapper(model.cuda(), "resnet50_184_6GB.yaml")      # doctest: +SKIP
    """
    if isinstance(budget, str) and "%" in budget:
        raise BudgetError(f"budget {budget!r} of reserved memory: write an amount, such as 6GB")
    limit_bytes = parse_budget(budget)
    if not torch.cuda.is_available():
        raise DeviceError("there is no CUDA device whose memory could be limited")
    if torch.cuda.get_allocator_backend() != "native":
        raise DeviceError(
            f"the {torch.cuda.get_allocator_backend()} allocator was asked for (PYTORCH_ALLOC_CONF), whose memory "
            "can't be limited by monetlite; use PyTorch's own"
        )
    index = _index(device)
    reserved_bytes = torch.cuda.memory_reserved(index)
    if reserved_bytes > limit_bytes:
        raise BudgetError(
            f"{format_bytes(reserved_bytes)} of the GPU's memory are reserved already, more than "
            f"{format_bytes(limit_bytes)}: call limit_reserved before anything is on the GPU"
        )
    _set_expandable(True)
    _limit(limit_bytes, index)


@contextlib.contextmanager
def reserved_within(budget_bytes: int | None, own_bytes: int) -> Iterator[None]:
    """Limit a step to a budget, of which a part (`own_bytes`) is on the GPU already; no limit with None.

    Other memory on the GPU doesn't count. Afterwards the allocator is as it was before.
    """
    if budget_bytes is None:
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction()
    _set_expandable(True)
    _limit(torch.cuda.memory_reserved() + budget_bytes - own_bytes, torch.cuda.current_device())
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
        if before >= 1.0:  # else `limit_reserved` has been called
            _set_expandable(None)


def warn_if_unlimited(schedule: Schedule, device: str) -> None:
    """Warn that a schedule for a budget of reserved memory is about to run where nothing limits that."""
    if schedule.reserved_bytes is None or device != "cuda" or torch.cuda.get_per_process_memory_fraction() < 1.0:
        return
    warn(
        f"this schedule was solved for {format_bytes(schedule.budget_bytes)} of reserved memory, and nothing "
        "limits that here, so PyTorch's allocator will take more: call "
        f"monetlite.limit_reserved({schedule.budget_bytes}) before anything is on the GPU"
    )


def _index(device: int | torch.device | str | None) -> int:
    """A GPU's number."""
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    except (RuntimeError, TypeError) as error:
        raise DeviceError(f"device {device!r} is not a GPU's name, such as 'cuda:1'") from error
    if found.type != "cuda":
        raise DeviceError(f"device {str(device)!r} is not a CUDA device, whose memory could be limited")
    return torch.cuda.current_device() if found.index is None else found.index


def _limit(budget_bytes: int, index: int) -> None:
    limit_bytes = max(0, budget_bytes - PAGE_BYTES)  # the allocator exceeds its limit by less than a page
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), index)


def _set_expandable(expandable: bool | None) -> None:
    """Switch expandable segments on or off, or with None as the environment says; other settings stay."""
    given = next((os.environ[name] for name in _SETTINGS if name in os.environ), "")
    items = [item.strip() for item in given.split(",") if item.strip()]
    asked = [item for item in items if item.partition(":")[0] == _EXPANDABLE]
    if expandable is not None or not asked:
        asked = [f"{_EXPANDABLE}:{bool(expandable)}"]
    kept = [item for item in items if item.partition(":")[0] != _EXPANDABLE]
    set_allocator_settings(",".join([*kept, *asked]))
