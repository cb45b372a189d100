"""Regions of operators: the step that plain training runs, one by one and compiled, whatever is recomputed."""

import gc
import json
import logging
import os
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import assert_same, step, tiny_transformer, twin
from step_lists import (
    free_profile,
    recompute_everything,
    recompute_with_any_reads,
    schedule_of,
    with_random_implementations,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import monetlite
from monetlite.core.errors import CompileError
from monetlite.core.graph import Phase, ValueKind
from monetlite.core.options import SolvingOptions
from monetlite.core.steps import plain_steps
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals.torch_dispatch import FakeTensor
from monetlite.operators import region_compiler, resolve
from monetlite.operators.regions import TEXTS, compile_text
from monetlite.planning import layouts
from monetlite.profiling.arguments import make_arguments
from monetlite.profiling.measured import measure_profile
from monetlite.tracing import trace_layouts
from monetlite.tracing.capture import Joint
from monetlite.tracing.region_finder import form_regions

THOROUGH = "MONETLITE_THOROUGH" in os.environ
CLOSE = 1e-4
"""Largest difference of a gradient, as a share of its largest element, through a few layers."""


class Mixed(nn.Module):
    """Dropout, normalisation, an activation, a residual connection and a copy between two products."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.3)

    def forward(self, x):
        inner = torch.tanh(self.first(self.norm(x))) * 2 + 1
        return x + self.drop(self.second(inner)).transpose(0, 1).contiguous().transpose(0, 1)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norms[0](self.first(x)))
        x = nn.functional.hardtanh(x + self.norms[1](self.second(x)), 0, 6)
        return self.head(x.mean((2, 3)))


def mixed():
    return nn.Sequential(Mixed(), Mixed()), (torch.randn(12, 5, 16),)


def images():
    return Images(), (torch.randn(4, 3, 12, 12),)


def compiled_graph(model, inputs, layout="compiled"):
    return trace_layouts(model, inputs, ["as_traced", layout], outputs="all")[-1]


def assert_close(found, expected):
    """The same step, but for rounding, in running statistics as well."""
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-5, atol=1e-6)
    assert_same(replace(found, buffers={}), replace(expected, buffers={}), within=CLOSE)


def regions(graph):
    return [operator for operator in graph.operators if operator.family == "region"]


def uncompiled(graph):
    return graph.restricted(lambda item: "compiled" not in item.name and item.guard is None)


def distinct(graph):
    """Targets of compiled regions, each once."""
    calls = [item.call.target for operator in regions(graph) for item in operator.implementations]
    return {target for target in calls if "compiled_region" in target}


@pytest.mark.parametrize("kind", ["images", *(["gpt2", "llama", "vit"] if THOROUGH else [])])
def test_one_by_one_they_are_plain_training(kind):
    model, inputs = images() if kind == "images" else tiny_transformer(kind)
    graph = uncompiled(compiled_graph(model, inputs))
    assert len(regions(graph)) >= 3
    steps = recompute_with_any_reads(graph, random.Random(0), 0.6)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
    assert_close(step(wrapper, inputs), step(model, inputs))


@pytest.mark.parametrize("make", [images, pytest.param(mixed, marks=pytest.mark.thorough)])
def test_compiled_they_are_plain_training_but_for_rounding(make):
    model, inputs = make()
    graph = compiled_graph(model, inputs)
    used: Counter[str] = Counter()
    for seed in range(3 if THOROUGH else 2):
        rng = random.Random(seed)
        steps = with_random_implementations(graph, recompute_with_any_reads(graph, rng, 0.5), rng)
        used += Counter(graph.operators[index].implementations[choice].name for index, choice in steps)
        wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
        assert_close(step(wrapper, inputs), step(twin(model), inputs))
    assert {"compiled", "compiled_inplace"} <= used.keys()


class Statistic(nn.Module):
    """A mean that the backward pass reads only where it computes from inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        inner = self.first(x)
        return self.second(torch.tanh(inner + inner.mean(-1, keepdim=True)))


class Maximum(nn.Module):
    """Its gradient is that of the elements that equal the maximum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(nn.functional.silu(self.first(x)).amax((2, 3)))


@pytest.mark.parametrize("form", ["from_inputs", "compiled_from_inputs"])
def test_what_only_one_form_reads_is_there(form):
    model, inputs = Statistic(), (torch.randn(16, 32),)
    graph = compiled_graph(model, inputs)
    assert any(operator.find(form) for operator in regions(graph))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), in_form(graph, form)))
    assert_close(step(wrapper, inputs), step(model, inputs))


class Weighted(nn.Module):
    """Statistics over the batch, as a loss with weights has them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        inner = self.first(x)
        return self.second(torch.tanh((inner - inner.mean(0)) ** 2))


def test_a_smaller_batch_has_the_same_structure():
    graphs = [compiled_graph(Weighted(), (torch.randn(batch, 16),)) for batch in (64, 8, 2)]
    assert len({graph.structure for graph in graphs}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 8])
def test_every_layout_is_tried_within_the_time(count, monkeypatch):
    profiles = [free_profile(compiled_graph(Weighted(), (torch.randn(8 + at, 16),))) for at in range(count)]
    given, solve = [], layouts.solve_budget

    def noted(profile, budget_bytes, options, **rest):
        given.append(options.time_limit)
        return solve(profile, budget_bytes, replace(options, time_limit=0.05), **rest)

    monkeypatch.setattr(layouts, "solve_budget", noted)
    layouts.solve_layouts(profiles, "200%", SolvingOptions(time_limit=10))
    assert len(given) == count + 1
    assert sum(given) == pytest.approx(10)


def test_a_maximum_is_found_again_in_16_bits():
    model, inputs = Maximum().bfloat16(), (torch.randn(8, 3, 12, 12).bfloat16(),)
    graph = compiled_graph(model, inputs)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), in_form(graph, "compiled")))
    found, expected = step(wrapper, inputs), step(model, inputs)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0.1, atol=0.05)


def in_form(graph, name):
    """Plain training's steps, by the implementation of that name where there is one."""
    names = [[item.name for item in operator.implementations] for operator in graph.operators]
    return tuple((at, names[at].index(name) if name in names[at] else choice) for at, choice in plain_steps(graph))


def test_results_are_within_the_tolerance_and_laid_out_as_captured():
    model, inputs = mixed()
    graph = compiled_graph(model, inputs)
    for operator in regions(graph):
        by_name = {item.name: item for item in operator.implementations}
        if "compiled" not in by_name:
            continue
        args, _ = make_arguments(by_name["default"].call, "cpu")
        expected = resolve(by_name["default"].call.target)(*args)
        for name in ("compiled", "compiled_inplace"):
            if name in by_name:
                given = [item.clone() for item in args]
                found = resolve(by_name[name].call.target)(*given)
                for one, other in zip(found, expected, strict=True):
                    assert one.stride() == other.stride()
                    assert one.untyped_storage().nbytes() == one.nbytes
                    largest = other.abs().max()
                    assert (one - other).abs().max() <= 1e-5 * max(1.0, largest), operator.name
                storages = {item.untyped_storage().data_ptr() for item in given}
                over = [item for item in found if item.untyped_storage().data_ptr() in storages]
                assert len(over) == (name == "compiled_inplace")


@pytest.mark.thorough
def test_a_region_may_be_long():
    def long(x):
        for _ in range(1200):
            x = torch.sin(x)
        return (x,)

    program = make_fx(long, tracing_mode="fake")(torch.randn(2, 4))
    for node in program.graph.nodes:
        node.meta["desc"] = (None,)
    formed = form_regions(Joint(graph=program, forward_outputs=1, at_once=False), Reachability(program.graph, 1))
    ((item,),) = formed.graph.graph.output_node().args
    x = torch.randn(2, 4)
    assert torch.equal(item.args[0].target(x)[0], long(x)[0])


def test_regions_keep_nothing_of_the_capture_alive():
    def kept(layout, width):
        def alive():
            gc.collect()
            return sum(isinstance(item, FakeTensor) for item in gc.get_objects())

        before = alive()
        compiled_graph(Mixed(), (torch.randn(width, 7, 16),), layout)
        return alive() - before

    kept("compiled", 2)  # what is made once in a process
    assert kept("compiled", 11) <= kept("channels_last", 12)


@pytest.mark.thorough
def test_equal_layers_share_what_is_compiled():
    counts = []
    for layers in (3, 4):
        model = nn.Sequential(*[Mixed() for _ in range(layers)])
        counts.append(len(distinct(compiled_graph(model, (torch.randn(12, 5, 16),)))))
    assert counts[0] == counts[1]


@pytest.mark.thorough
def test_only_what_the_forward_pass_or_anchors_read_is_written():
    model, inputs = tiny_transformer("gpt2", layers=1)
    plain, graph = trace_layouts(model, inputs, ["as_traced", "compiled"])

    def activation_bytes(of):
        return sum(item.size_bytes for item in of.values if item.kind is ValueKind.ACTIVATION)

    assert activation_bytes(graph) < 0.7 * activation_bytes(plain)
    backward = [item for item in regions(graph) if item.phase is Phase.BACKWARD]
    assert any(item.find("from_inputs") for item in backward)


class Pointwise(nn.Module):
    """A chain of random operators on a few tensors, with products in between."""

    OPERATORS = (
        torch.add,
        torch.mul,
        lambda a, b: torch.tanh(a) - b,
        lambda a, b: torch.where(b > 0, a, b),
        lambda a, b: a * b.sigmoid().mean(-1, keepdim=True),
        lambda a, b: nn.functional.layer_norm(a + b, (8,)),
        lambda a, b: (a.softmax(-1) + b).transpose(0, 1).contiguous().transpose(0, 1),
        lambda a, b: nn.functional.dropout(a, 0.5) + b,
        lambda a, b: torch.cat([a[:, :3], b[:, 3:]], 1),
        lambda a, b: nn.functional.gelu(a) / (1 + b.abs()),
    )

    def __init__(self, choices):
        super().__init__()
        self.choices = choices
        self.products = nn.ModuleList(nn.Linear(8, 8) for _ in choices)

    def forward(self, x):
        known = [x, self.products[0](x)]
        for product, (operator, one, other) in zip(self.products, self.choices, strict=True):
            a, b = known[one % len(known)], known[other % len(known)]
            known.append(product(a) if operator == len(self.OPERATORS) else self.OPERATORS[operator](a, b))
        return known[-1] + known[-2]


CHOICES = st.lists(
    st.tuples(st.integers(0, len(Pointwise.OPERATORS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=2,
    max_size=9,
)


@given(choices=CHOICES, seed=st.integers(0, 99))
@settings(max_examples=20 if THOROUGH else 3, deadline=None)
def test_random_graphs_one_by_one(choices, seed):
    torch.manual_seed(seed)
    model, inputs = Pointwise(choices), (torch.randn(6, 8, requires_grad=True),)
    graph = uncompiled(compiled_graph(model, inputs))
    steps = recompute_with_any_reads(graph, random.Random(seed), 0.5)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
    assert_same(step(wrapper, inputs), step(model, inputs), within=CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6 if THOROUGH else 1))
def test_random_graphs_compiled(seed):
    rng = random.Random(seed)
    choices = [(rng.randrange(len(Pointwise.OPERATORS) + 1), rng.randrange(9), rng.randrange(9)) for _ in range(7)]
    torch.manual_seed(seed)
    model, inputs = Pointwise(choices), (torch.randn(6, 8),)
    graph = compiled_graph(model, inputs)
    steps = with_random_implementations(graph, recompute_everything(graph), rng)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
    assert_same(step(wrapper, inputs), step(model, inputs), within=CLOSE)


def test_a_description_is_all_that_a_region_needs():
    graph = compiled_graph(Mixed(), (torch.randn(7, 3, 16),))  # a size that nothing else has compiled
    target = sorted(distinct(graph))[0]
    call = next(
        item.call for operator in regions(graph) for item in operator.implementations if item.call.target == target
    )
    args, _ = make_arguments(call, "cpu")
    found = compile_text(TEXTS[target])([item.clone() for item in args])
    for one, other in zip(found, resolve(target)(*[item.clone() for item in args]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.thorough
def test_compiled_ahead_they_are_there_for_this_process_and_the_next(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "monetlite")
    targets = distinct(compiled_graph(Mixed(), (torch.randn(9, 4, 16),)))  # a size that nothing else has compiled
    assert len(targets) > region_compiler.PROCESSES
    region_compiler.compile_ahead(targets)
    assert f"compiled {len(targets)} of {len(targets)} regions" in caplog.text
    monkeypatch.setattr(region_compiler, "_process", None)
    region_compiler.compile_ahead(targets)


def test_what_inductor_cannot_compile_is_left_out(monkeypatch):
    compile_any = compile_text

    def failing(text):
        if json.loads(text)["over"] is not None:
            raise KeyError("buf1")
        return compile_any(text)

    monkeypatch.setattr("monetlite.operators.regions.compile_text", failing)
    monkeypatch.setattr("monetlite.profiling.measured.compile_ahead", lambda targets: None)
    graph = compiled_graph(Weighted(), (torch.randn(19, 16),))  # a size that nothing else has compiled
    with pytest.warns(UserWarning, match=r"can't compile \d+ implementations of regions.*'buf1'"):
        profile = measure_profile(graph, "cpu")
    names = {item.name for operator in regions(profile.graph) for item in operator.implementations}
    assert "compiled" in names
    assert "compiled_inplace" not in names
    call = next(
        item.call
        for operator in regions(graph)
        for item in operator.implementations
        if item.name == "compiled_inplace"
    )
    args, _ = make_arguments(call, "cpu")
    with pytest.raises(CompileError, match=r"buf1.*leaves such regions out"):
        resolve(call.target)(*args)


@pytest.mark.parametrize(
    ("options", "seconds"), [({}, 20), ({"time_limit": 30}, 30), ({"wait": True}, 60), ({"reserved": True}, 60)]
)
def test_a_first_step_that_nobody_asked_to_wait_solves_for_20_seconds(options, seconds, caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiles = "reserved" not in options
    trained = monetlite.within(model, budget="64MB", device="rtx-3090", compile=compiles, **options)
    with caplog.at_level("INFO", logger="monetlite"):
        trained(torch.randn(4, 8)).sum().backward()
    assert any(f"planning for up to {seconds} s" in line for line in caplog.messages)


def test_optimize_chooses_them_where_asked(tmp_path):
    model, inputs = nn.Sequential(Mixed(), Mixed()), (torch.randn(12, 5, 16),)
    schedule = monetlite.optimize(
        model, inputs, "95%", device="rtx-4090", runs_here=True, compile=True, time_limit=2
    )
    assert schedule.layout == "compiled"
    assert schedule.tolerance == 1e-5
    schedule.save(tmp_path / "schedule.yaml")
    wrapper = monetlite.MONeTWrapper(twin(model), tmp_path / "schedule.yaml")
    assert_same(step(wrapper, inputs), step(model, inputs), within=CLOSE)
