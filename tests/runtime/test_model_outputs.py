"""Outputs beside a model's loss: small ones as ever, large ones only for those who ask."""

import copy
from collections import OrderedDict

import pytest
import torch
from small_models import WithLoss, twin
from step_lists import schedule_for
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

import monetlite
from monetlite.core.errors import ModelError
from monetlite.core.graph import ValueKind


class Tagger(nn.Module):
    """A loss, a prediction for each token, one for each sequence, and how many tokens there were."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens):
        hidden = self.body(tokens).tanh()
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"loss": loss, "logits": logits, "pooled": hidden.mean(1), "count": torch.tensor(tokens.numel())}


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randint(0, 50, (4, 12))


def test_large_outputs_are_not_computed_and_say_how_to_get_them(tokens):
    model = monetlite.MONeTWrapper(Tagger(), budget="100%", time_limit=1)
    output = model(tokens)
    assert list(output) == ["loss", "logits", "pooled", "count"]
    assert (output["pooled"].shape, output["count"].item()) == ((4, 16), 48)
    reads = [
        lambda: output["logits"].argmax(-1),
        lambda: torch.argmax(output["logits"]),
        lambda: output["logits"][0],
        lambda: output["logits"] * 2,
        lambda: 2 * output["logits"],
        lambda: len(output["logits"]),
    ]
    for read in reads:
        with pytest.raises(ModelError, match=r"output\['logits'\] is not computed.*outputs='all'"):
            read()
    assert not hasattr(output["logits"], "shape")
    assert "not computed" in repr(output["logits"])
    assert "not computed" in repr(copy.deepcopy(output["logits"]))
    output["loss"].backward()


class Encoded(Tagger):
    """Returns an encoder's output within its own, as vision-language models do."""

    def forward(self, tokens):
        encoder = BaseModelOutput(last_hidden_state=self.body(tokens).tanh())
        return {**super().forward(tokens), "encoder": encoder}


def test_an_output_within_an_output_may_be_large(tokens):
    output = monetlite.within(Encoded(), budget="100%", time_limit=1, whole=True)(tokens)
    assert type(output["encoder"]) is BaseModelOutput
    with pytest.raises(ModelError, match=r"is not computed"):
        output["encoder"].last_hidden_state.sum()
    output["loss"].backward()


def test_all_outputs_come_where_they_are_asked_for(tokens):
    plain = Tagger()
    model = monetlite.within(copy.deepcopy(plain), budget="100%", time_limit=1, outputs="all")
    ours, theirs = model(tokens), plain(tokens)
    assert torch.equal(ours["logits"], theirs["logits"])
    with pytest.raises(ModelError, match="gradient reached"):
        ours["logits"].sum().backward()


class InPieces(Tagger):
    def forward(self, tokens):
        return super().forward(tokens if tokens.sum() > 0 else tokens + 1)


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
@pytest.mark.parametrize("build", [Tagger, InPieces])
def test_other_outputs_are_trained_on_where_that_is_asked_for(tokens, build):
    """Distillation: the model's loss, and one of its logits. The latter is measured and counted, too."""
    plain = build()
    model = monetlite.within(copy.deepcopy(plain), budget="110%", time_limit=1, outputs="trained")
    teacher = torch.randn(4, 12, 50).softmax(-1)
    for _ in range(5):
        for one in (model, plain):
            one.zero_grad()
            output = one(tokens)
            (output["loss"] + nn.functional.kl_div(output["logits"].log_softmax(-1), teacher)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    schedule = monetlite.schedule_of(model)
    assert schedule.peak_bytes <= schedule.budget_bytes


def test_evaluation_returns_everything(tokens):
    model = monetlite.within(Tagger(), budget="100%", time_limit=1)
    model(tokens)["loss"].backward()
    with torch.no_grad():
        assert model(tokens)["logits"].shape == (4, 12, 50)
    assert model.eval()(tokens)["logits"].shape == (4, 12, 50)


def test_a_schedule_says_what_is_returned(tokens, tmp_path):
    path = tmp_path / "schedule.yaml"
    for outputs in ("loss", "trained", "all"):
        solved = monetlite.optimize(Tagger(), tokens, "100%", time_limit=1, outputs=outputs)
        solved.save(path)
        assert monetlite.load_schedule(path).outputs == outputs
        output = monetlite.MONeTWrapper(Tagger(), str(path))(tokens)
        assert isinstance(output["logits"], torch.Tensor) == (outputs != "loss")
        assert monetlite.verify(Tagger(), monetlite.load_schedule(path), tokens, repeats=1).passed
    text = path.read_text()
    path.write_text(text.replace("outputs: all\n", ""))  # as files were written before there was a choice
    assert monetlite.load_schedule(path).outputs == "all"


def test_logits_that_nobody_gets_are_not_held(tokens):
    kinds = {
        outputs: [
            value.kind
            for value in monetlite.trace(Tagger(), tokens, outputs=outputs).values
            if value.shape == (48, 50) and value.kind is ValueKind.OUTPUT
        ]
        for outputs in ("loss", "all")
    }
    assert (kinds["loss"], len(kinds["all"])) == ([], 1)


def test_unknown_outputs_are_refused(tokens):
    with pytest.raises(ModelError, match="outputs 'logits'"):
        monetlite.MONeTWrapper(Tagger(), budget="100%", outputs="logits")


def test_a_gradient_into_the_logits_of_a_model_with_a_loss_is_refused():
    model = WithLoss()
    inputs = {"x": torch.randn(4, 6), "labels": torch.tensor([0, 3, 1, 2])}
    wrapper = monetlite.MONeTWrapper(model, schedule_for(model, inputs))
    output = wrapper(**inputs)
    assert torch.equal(output["logits"], model(**inputs)["logits"])
    with pytest.raises(ModelError, match=r"a gradient reached output.*logits"):
        (output["loss"] + output["logits"].mean()).backward()
    output = wrapper(**inputs)
    (output["loss"] + output["logits"].detach().mean()).backward()


class OwnMapping(dict):
    """A mapping that is made in a way of its own."""

    def __init__(self, total, scores):
        super().__init__(loss=total, logits=scores)
        self.task = "classes"


class BesideLoss(nn.Module):
    """A loss, and beside it what people return: logits, a metric, a mask, the input, nested things."""

    def __init__(self, made=dict):
        super().__init__()
        self.layer, self.made = nn.Linear(6, 4), made

    def forward(self, x):
        logits = self.layer(x).tanh()
        loss = logits.square().mean()
        if self.made is OwnMapping:
            return OwnMapping(loss, logits * 2)
        accuracy = (logits > 0).float().mean()
        others = {"logits": logits * 2, "accuracy": accuracy, "x": x, "parts": [(logits + 1, x > 0)], 3: "three"}
        if self.made is not dict:
            others.pop(3)
        return self.made({"parts": others.pop("parts"), "loss": loss, **others})


# torch 2.11 can't trace how a mapping with a constructor of its own is made again; it is refused there.
@pytest.mark.parametrize("made", [dict, OrderedDict, *([OwnMapping] if torch.__version__ >= "2.12" else [])])
def test_what_stands_beside_a_loss_is_as_the_model_returns_it(made):
    model, x = BesideLoss(made), torch.randn(4, 6)
    expected, found = model(x), monetlite.MONeTWrapper(twin(model), schedule_for(model, (x,)))(x)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    assert vars(found) == vars(expected) if made is not dict else True
    for mine, theirs in zip(pytree.tree_leaves(dict(found)), pytree.tree_leaves(dict(expected)), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert torch.equal(mine, theirs)
            assert mine.requires_grad == theirs.requires_grad
        else:
            assert mine == theirs
    if made is not OwnMapping:
        assert found["x"] is x
        assert found["accuracy"].numpy() == expected["accuracy"].numpy()
        with pytest.raises(ModelError, match=r"a gradient reached output\['parts'\]\[0\]\[0\]"):
            found["parts"][0][0].sum().backward(retain_graph=True)
    found["loss"].backward()
    with pytest.raises(ModelError, match=r"a gradient reached output\['logits'\]"):
        found["logits"].sum().backward()


def test_outputs_beside_a_loss_are_changed_in_place():
    model, x = BesideLoss(), torch.randn(4, 6)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_for(model, (x,)))
    changed, totals = [], []
    for owner in (model, wrapper):
        output = owner(x)
        output["loss"].backward()
        output["logits"][:, 0] = -1e9
        output["logits"].div_(2.0)
        changed.append(output["logits"])
        totals.append(torch.zeros(()))
        totals[-1] += output["accuracy"]
    assert torch.equal(*changed)
    assert not totals[1].requires_grad
    with pytest.raises(ModelError, match=r"a gradient reached output\['logits'\]"):
        changed[1].sum().backward()


def test_what_is_read_again_and_changed_before_the_backward_pass_is_an_error():
    class Read(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            hidden = self.layer(x).tanh()
            return {"loss": hidden.square().mean(), "hidden": hidden}

    model, x = Read(), torch.randn(4, 6)
    for owner in (model, monetlite.MONeTWrapper(twin(model), schedule_for(model, (x,)))):
        output = owner(x)
        with torch.no_grad():
            output["hidden"].mul_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output["loss"].backward()
