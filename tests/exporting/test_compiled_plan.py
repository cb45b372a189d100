"""Files of plans for torch.compile: the partitioner gets the answer that was written down, or an error."""

import ast
import copy

import pytest
import torch
from layered_models import Transformer
from test_checkpoint_plans import schedule

from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import InfeasibleBudget, TraceError
from monetlite.exporting import compiled_plan
from monetlite.exporting.compiled_plan import compile_plan, compiled_text
from monetlite.fx.torch_internals.torch_inductor import partitioning_backend


@pytest.fixture(autouse=True)
def _partitioned_alone(monkeypatch):
    """Nothing is compiled behind the partitioner."""
    monkeypatch.setattr(compiled_plan, "inductor_backend", partitioning_backend)
    yield
    torch.compiler.reset()


def test_a_file_answers_as_planned():
    with torch.device("meta"):
        meta, tokens = Transformer(layers=2).train(), torch.zeros(4, 128, dtype=torch.long)
    torch.manual_seed(0)
    model, inputs = Transformer(layers=2).train(), (torch.randint(0, 50, (4, 128)),)
    plain = Trainee(copy.deepcopy(model), inputs, {}, default_loss, "cpu")
    plain.step()
    budget_bytes = int(0.8 * plain.memory().peak_bytes)
    plan = compile_plan(meta, (tokens,), budget_bytes, "cpu")
    assert plan.peak_bytes <= budget_bytes
    text = compiled_text(plan, schedule('x"""\nimport os # \x1b'))
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [alias.name for node in imports for alias in node.names] == [
        "logging", "torch", "torch._dynamo", "config", "compile_fx", "CustomKnapsackSolver",
    ]  # fmt: skip
    names: dict = {}
    exec(compile(text, "plan.py", "exec"), names)

    def backend(graph, tensors):
        return names["backend"](graph, tensors, partitioning_backend())

    planned = Trainee(names["compile"](copy.deepcopy(model), backend=backend), inputs, {}, default_loss, "cpu")
    expected = plain.snapshot(1).gradients
    found = {name.removeprefix("_orig_mod."): item for name, item in planned.snapshot(1).gradients.items()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert planned.memory().peak_bytes <= plan.peak_bytes * 1.001
    torch.compiler.reset()
    other = names["compile"](Transformer(layers=1).train(), backend=backend)
    with pytest.raises(Exception, match=r"made for another graph.*evaluate under torch\.no_grad\(\)"):
        other(*inputs)


def test_what_does_not_fit_or_is_no_graph_is_refused():
    inputs = (torch.randint(0, 50, (4, 16)),)
    with pytest.raises(InfeasibleBudget, match="smallest peak"):
        compile_plan(Transformer(layers=1).train(), inputs, 1000, "cpu")

    class Looks(Transformer):
        def forward(self, tokens):
            return super().forward(tokens) if self.embed.weight.sum() > 0 else None

    torch.compiler.reset()
    with pytest.raises(TraceError):
        compile_plan(Looks(layers=1).train(), inputs, 10**9, "cpu")
