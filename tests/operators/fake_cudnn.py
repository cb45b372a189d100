"""A stand-in for cuDNN's frontend that runs convolutions on the CPU, by the pointers that it is given."""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import torch

from monetlite.operators.cudnn import execution_plans, library, offers

PLANS = ("cudnn.engine9.k2=4.k12=-1", "cudnn.engine0")
"""The names of the plans that the fake can build; that of the one it can't is `UNBUILT`."""
UNBUILT = "cudnn.engine7.k2=1"


def install(monkeypatch):
    """Replace cuDNN by a fake, and have monetlite.operators.cudnn take the CPU for CUDA device 0 on stream 7."""
    fake = FakeFrontend()
    monkeypatch.setattr(library, "problem", lambda: None)
    monkeypatch.setattr(library, "load", lambda: fake)
    monkeypatch.setattr(library, "_local", threading.local())
    monkeypatch.setattr(execution_plans, "_local", threading.local())
    monkeypatch.setattr(execution_plans, "_common_device", lambda first, second: 0)
    for module in (execution_plans, library, offers):
        monkeypatch.setattr(module, "torch", FakeTorch(fake))
    return fake


class FakeTorch:
    """Torch with a GPU: torch itself, also for everyone else, but for `torch.cuda`."""

    def __init__(self, fake):
        self.cuda = SimpleNamespace(
            is_available=lambda: fake.present,
            current_device=lambda: 0,
            get_device_name=lambda: "a fake GPU",
            device=lambda device: contextlib.nullcontext(),
            current_stream=lambda device: SimpleNamespace(cuda_stream=7),
        )

    def __getattr__(self, name):
        return getattr(torch, name)


class FakeTensor(SimpleNamespace):
    """Describes a tensor, as the frontend's does."""

    def set(self, **values):
        self.__dict__.update(values)
        return self

    def set_uid(self, uid):
        return self.set(uid=uid)

    def set_output(self, output):
        return self.set(output=output)

    def set_dim(self, dim):
        return self.set(dim=dim)

    def set_stride(self, stride):
        return self.set(stride=stride)

    def set_data_type(self, data_type):
        return self.set(data_type=data_type)

    def at(self, pointer):
        """The memory behind a pointer, as this tensor describes it."""
        span = 1 + sum((size - 1) * step for size, step in zip(self.dim, self.stride, strict=True))
        buffer = (ctypes.c_byte * (span * self.data_type.itemsize)).from_address(pointer)
        return torch.frombuffer(buffer, dtype=self.data_type).as_strided(self.dim, self.stride)


class FakeGraph:
    """A graph of one convolution that runs on the CPU. Plan 0 can't be built; 1 and 2 can."""

    names = ("eng7_k2=1", "eng9_k12=-1_k2=4", "eng0")

    def __init__(self, *, library, handle, **types):
        self.library, self.handle = library, handle
        library.graphs.append(self)
        self.built = []

    def tensor(self, **description):
        return FakeTensor(**description)

    def _convolution(self, compute, *operands, **settings):
        self.made = FakeTensor()
        self.compute, self.operands, self.settings = compute, operands, settings
        return self.made

    # The number of groups follows from the shapes.

    def conv_fprop(self, image, weight, **settings):
        def compute(source, filter, **settings):
            groups = image.dim[1] // weight.dim[1]
            return torch.nn.functional.conv2d(source, filter, groups=groups, **settings)

        return self._convolution(compute, image, weight, **settings)

    def conv_dgrad(self, loss, filter, **settings):
        def compute(gradient, weight, **settings):
            groups = self.made.dim[1] // filter.dim[1]
            return torch.nn.grad.conv2d_input(self.made.dim, weight, gradient, groups=groups, **settings)

        return self._convolution(compute, loss, filter, **settings)

    def conv_wgrad(self, image, loss, **settings):
        def compute(source, gradient, **settings):
            groups = image.dim[1] // self.made.dim[1]
            return torch.nn.grad.conv2d_weight(source, self.made.dim, gradient, groups=groups, **settings)

        return self._convolution(compute, image, loss, **settings)

    def validate(self):
        assert self.made.output

    def build_operation_graph(self):
        pass

    def create_execution_plans(self, modes):
        assert len(modes) == 3

    def deselect_numeric_notes(self, notes):
        self.library.deselected.append(notes)

    def get_execution_plan_count(self):
        return len(self.names)

    def get_plan_name_at_index(self, index):
        return self.names[index]

    def build_plan_at_index(self, index):
        if index == 0:
            raise self.library.cudnnGraphNotSupportedError
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index):
        return 100 * index

    def execute_plan_at_index(self, pointers, workspace, *, index, handle):
        assert index in self.built
        if self.names[index] in self.library.failing:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        values = [operand.at(pointers[operand.uid]) for operand in self.operands]
        self.made.at(pointers[self.made.uid]).copy_(self.compute(*values, **self.settings))
        self.library.runs.append((index, handle, self.library.streams[handle], workspace))


class FakeFrontend:
    """The part of the frontend that monetlite uses."""

    data_type = SimpleNamespace(FLOAT=torch.float32, HALF=torch.float16, BFLOAT16=torch.bfloat16)
    heur_mode = SimpleNamespace(A="A", B="B", FALLBACK="FALLBACK")
    numerical_note = SimpleNamespace(
        NONDETERMINISTIC="nondeterministic",
        TENSOR_CORE="tensor core",
        DOWN_CONVERT_INPUTS="down",
        REDUCED_PRECISION_REDUCTION="reduced",
        WINOGRAD_TILE_4x4="tile 4",
        WINOGRAD_TILE_6x6="tile 6",
        WINOGRAD_TILE_13x13="tile 13",
    )
    cudnnGraphNotSupportedError = type("NotSupported", (Exception,), {})

    def __init__(self):
        self.graphs, self.handles, self.runs, self.streams, self.deselected = [], [], [], {}, []
        self.present = True
        """Whether there is a GPU."""
        self.failing = set()
        """Names of plans, as cuDNN has them, that fail when they run."""

    def pygraph(self, **arguments):
        return FakeGraph(library=self, **arguments)

    def create_handle(self):
        self.handles.append(f"handle of thread {threading.get_ident()}")
        return self.handles[-1]

    def set_stream(self, *, handle, stream):
        self.streams[handle] = stream
