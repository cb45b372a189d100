"""Outputs beside a model's loss: small ones as ever, large ones only for those who ask."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
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


def test_evaluation_returns_everything(tokens):
    model = monetlite.within(Tagger(), budget="100%", time_limit=1)
    model(tokens)["loss"].backward()
    with torch.no_grad():
        assert model(tokens)["logits"].shape == (4, 12, 50)
    assert model.eval()(tokens)["logits"].shape == (4, 12, 50)


def test_a_schedule_says_what_is_returned(tokens, tmp_path):
    path = tmp_path / "schedule.yaml"
    for outputs in ("loss", "all"):
        solved = monetlite.optimize(Tagger(), tokens, "100%", time_limit=1, outputs=outputs)
        solved.save(path)
        assert monetlite.load_schedule(path).outputs == outputs
        output = monetlite.MONeTWrapper(Tagger(), str(path))(tokens)
        assert isinstance(output["logits"], torch.Tensor) == (outputs == "all")
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
    with pytest.raises(ModelError, match="neither 'loss' nor 'all'"):
        monetlite.MONeTWrapper(Tagger(), budget="100%", outputs="logits")
