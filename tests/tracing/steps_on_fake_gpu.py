"""Captures training steps for a GPU that only torch's bookkeeping knows of, and lowers schedules for them.

    python steps_on_fake_gpu.py LIBRARY CASE...       # a small model's name, or a file of the zoo

Writes a JSON object: for each case the number of calls that ran on fake tensors, and what was wrong.
"""

import contextlib
import ctypes
import json
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch is there

import torch  # noqa: E402  # after the library
from gpu_report_models import SUBJECTS  # noqa: E402
from real_models import build  # noqa: E402
from small_models import SmallCNN, tiny_transformer  # noqa: E402
from step_lists import free_profile, recompute_everything, schedule_of, with_random_implementations  # noqa: E402
from torch._subclasses import FakeTensor  # noqa: E402

import monetlite  # noqa: E402
from monetlite.core.graph import LOSS_ONLY  # noqa: E402
from monetlite.fx.torch_internals.torch_varying import VaryingNumbers  # noqa: E402
from monetlite.models import build_model  # noqa: E402
from monetlite.operators import packing  # noqa: E402
from monetlite.operators.normalization import require_invertible  # noqa: E402
from monetlite.runtime.fitting import Fitting  # noqa: E402
from monetlite.runtime.lowering import lower  # noqa: E402
from monetlite.tracing import split_inputs, trace  # noqa: E402
from monetlite.tracing.capture import capture  # noqa: E402
from monetlite.tracing.operator_graph import build_graph  # noqa: E402

HOPPER = "h200", (9, 0)
AMPERE = "rtx-3090", (8, 6)


def pretend():
    """Give this CPU build the rest of what a capture asks a CUDA build for."""
    torch._C._get_cudnn_batch_norm_reserve_space_size = lambda source, training: 64
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.get_rng_state = lambda: torch.empty(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda state: None
    torch.cuda.is_bf16_supported = lambda: True
    packing._table = lambda device: torch.empty(256, dtype=torch.int64, device=device)
    # Operators with a kernel for each device and a formula beside it: without the kernel, torch takes the formula.
    kernels, has_kernel = (
        torch.library.Library("aten", "IMPL", "CUDA"),
        torch._C._dispatch_has_kernel_for_dispatch_key,
    )
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "CPU"):
            kernels.impl(name.removeprefix("aten::"), lambda *args, **kwargs: 1 / 0)
    return kernels


def small(name):
    if name == "cnn":
        return SmallCNN(), (torch.randn(4, 3, 12, 12),)
    if name == "small llama":
        return tiny_transformer("llama", layers=1)
    if name in SUBJECTS:
        return SUBJECTS[name].build(True)
    model, batch = build(name)
    return model, batch()


def on_gpu(model, inputs, capability, autocast="", outputs=LOSS_ONLY, **options):
    """A step traced as on a GPU, of a model on the meta device."""
    inputs = split_inputs(inputs)
    with contextlib.ExitStack() as stack:
        for device in ("cuda", "cpu"):  # the latter for the choice of attention, which is made for a step on a CPU
            enabled = torch.autocast(device, getattr(torch, autocast or "float16"), enabled=bool(autocast))
            stack.enter_context(enabled)
        joint = capture(model, *inputs, meta_device="cuda", capability=capability, outputs=outputs)
        return build_graph(joint, model, inputs, meta_device="cuda", autocast=autocast, outputs=outputs, **options)


def to_meta(model, inputs):
    move = lambda tensor: tensor.to("meta")  # noqa: E731
    return model.to("meta"), torch.utils._pytree.tree_map_only(torch.Tensor, move, inputs)


def described(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type


class Run(torch.fx.Interpreter):
    """Runs a program on fake tensors, and compares each result with the captured one."""

    def __init__(self, program, problems):
        super().__init__(program)
        self.problems, self.calls = problems, 0

    def call_function(self, target, args, kwargs):
        # Checks of the weights' values, which fake tensors don't have.
        return None if target is require_invertible else super().call_function(target, args, kwargs)

    def run_node(self, node):
        made, captured = super().run_node(node), node.meta.get("val")
        self.calls += node.op == "call_function"
        if isinstance(captured, torch.Tensor) and described(made) != described(captured):
            self.problems.append(f"{node}: {described(made)} is not {described(captured)}")
        return made


def run_lowered(traced, schedule, problems):
    """Lower a schedule that was solved elsewhere, and run both programs on fake tensors; the number of calls."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        traced, steps = Fitting().fit(traced, schedule, traced.graph.resident.total)
    problems += [str(item.message) for item in said]
    calls = 0
    for program in lower(traced, steps):
        inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
        mode = next(item.fake_mode for item in inputs if isinstance(item, FakeTensor))
        run = Run(program, problems)
        with mode, torch.no_grad():
            run.run(*inputs)
        calls += run.calls
    return calls


def offers(graph):
    return [
        (item.name, item.family, item.phase, [implementation.name for implementation in item.implementations])
        for item in graph.operators
    ]


def check_small(name, autocast):
    """A schedule made of the trace on a CPU for a GPU, on the GPU's own trace."""
    model, inputs = to_meta(*small(name))
    with torch.autocast("cpu", getattr(torch, autocast or "float16"), enabled=bool(autocast)):
        here = trace(model, inputs, device=HOPPER[0])
    traced = on_gpu(model, inputs, HOPPER[1], autocast)
    problems = []
    here, there = here.available("cuda"), traced.graph
    if offers(here) != offers(there.available("cuda")):
        differing = [pair for pair in zip(offers(here), offers(there.available("cuda"))) if pair[0] != pair[1]]
        problems.append(f"operators differ, first {differing[:1]}")
    steps = with_random_implementations(here, recompute_everything(here), random.Random(3))
    calls = run_lowered(traced, schedule_of(free_profile(here), steps), problems)
    return {"calls": calls, "problems": problems}


class Weighted(torch.nn.Module):
    """Layers, and a loss of a number's weight."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))

    def forward(self, x, number):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * number / (number + 1)
        return x.square().mean() * number / (torch.tensor(3) + (x > 0).sum())


def check_number():
    """A number that varies stays on the CPU, and no result of the GPU is written over it or a whole number."""
    model, problems, numbers = Weighted().to("meta"), [], VaryingNumbers()
    for number in (0.1, 0.2):
        with numbers.captured():
            inputs = (torch.empty(4, 8, device="meta"), number)
            joint = capture(model, inputs, {}, meta_device="cuda", capability=HOPPER[1])
    inputs = inputs[0], torch.empty((), dtype=torch.float64)
    traced = build_graph(joint, model, (inputs, {}), meta_device="cuda")
    steps = with_random_implementations(traced.graph, recompute_everything(traced.graph), random.Random(3))
    calls = run_lowered(traced, schedule_of(free_profile(traced.graph), steps), problems)
    devices = {item.meta["val"].device.type for item in joint.graph.graph.find_nodes(op="placeholder")}
    return {"calls": calls, "problems": problems if devices == {"cpu", "cuda"} else ["the number is no tensor"]}


def check_images():
    """Images that a group norm makes on a GPU are contiguous, also in the layout of channels-last ones."""
    convolutions = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]
    norms = [(torch.nn.GroupNorm(2, 8), torch.nn.SiLU(), torch.nn.Dropout(0.2)) for _ in convolutions]
    layers = [layer for block in zip(convolutions, norms) for layer in (block[0], *block[1])]
    model, inputs = to_meta(torch.nn.Sequential(*layers), (torch.empty(2, 8, 6, 6),))
    traced = on_gpu(model, inputs, HOPPER[1], layout="channels_last")
    traced, problems = replace(traced, graph=traced.graph.available("cuda")), []
    steps = with_random_implementations(traced.graph, recompute_everything(traced.graph), random.Random(3))
    calls = run_lowered(traced, schedule_of(free_profile(traced.graph), steps), problems)
    return {"calls": calls, "problems": problems}


def check_zoo(path):
    """A shared schedule on the GPU's trace of its model."""
    schedule = monetlite.load_schedule(path)
    source, problems = schedule.source, []
    dtype = source.dtype and getattr(torch, source.dtype)
    sizes = {"batch": source.batch, "input_size": source.input_size, "sequence_length": source.sequence_length}
    given = {key: value for key, value in (sizes | {"dtype": dtype}).items() if value is not None}
    built = build_model(source.model, **given, meta=True)
    how = schedule.autocast, schedule.outputs
    traced = on_gpu(built.model, built.example_inputs, AMPERE[1], *how, layout=schedule.layout)
    return {"calls": run_lowered(traced, schedule, problems), "problems": problems}


OWN = {"number": check_number, "images": check_images}


def main(cases):
    torch.set_num_threads(1)
    kept, found = pretend(), {}
    for case in cases:
        name, _, autocast = case.partition(" under ")
        with contextlib.redirect_stdout(sys.stderr):
            try:
                if name in OWN:
                    found[case] = OWN[name]()
                else:
                    found[case] = check_zoo(name) if name.endswith(".yaml") else check_small(name, autocast)
            except Exception as error:
                found[case] = {"calls": 0, "problems": [f"{type(error).__name__}: {error}"]}
    del kept
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2:])
