"""Small versions of what people train, batches for them, and the loop that people write."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from small_models import call, scalar, tiny_transformer
from torch import nn

from monetlite.models.convnets import BasicBlock, MobileNetV2, ResNet


class Classifier(nn.Module):
    """Images and labels to a loss, as a training script computes it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(images), labels)


def _images(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


def _text(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[nn.Module, Callable[[], Any]]:
    def batch() -> dict[str, torch.Tensor]:
        return {
            name: torch.randint(0, int(item.max()) + 1, item.shape)
            if not item.is_floating_point()
            else torch.randn(item.shape)
            for name, item in inputs.items()
        }

    return model, batch


def build(name: str) -> tuple[nn.Module, Callable[[], Any]]:
    """A model in training mode, and what makes another batch for it."""
    torch.manual_seed(0)
    if name == "resnet":
        return Classifier(ResNet((1, 1, 1), block=BasicBlock, classes=10)), _images
    if name == "mobilenet":
        network = MobileNetV2(classes=10)
        # Five of its blocks, of which one adds its input: the others are like them.
        network.features, network.classifier[1] = network.features[:5], nn.Linear(32, 10)
        return Classifier(network), _images
    if name == "llama with LoRA":
        import peft

        model, inputs = tiny_transformer("llama", layers=1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        return _text(peft.get_peft_model(model, config).train(), inputs)
    return _text(*tiny_transformer(name, layers=1))


NAMES = ("resnet", "mobilenet", "gpt2", "bert", "llama with LoRA", "vit")


class Loop:
    """A training loop: AdamW, clipping, a learning rate schedule, an average of the weights."""

    def __init__(self, model: nn.Module, lr: float = 1e-3) -> None:
        self.model = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.5)
        self.average = [parameter.detach().clone() for parameter in trained]
        self.trained = trained

    def step(self, batches: list[Any], autocast: torch.dtype | None = None) -> float:
        """One step of the optimizer on one or several batches; the loss, summed over them."""
        total = 0.0
        for batch in batches:
            context = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
            with context:
                loss = scalar(call(self.model, batch)) / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=len(batches) == 1)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.trained, 0.1)
        return total

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def batches(make: Callable[[], Any], steps: int, seed: int = 1) -> Iterator[Any]:
    """The same batches each time, drawn apart from what the model draws."""
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    made = [make() for _ in range(steps)]
    torch.random.set_rng_state(generator)
    yield from made
