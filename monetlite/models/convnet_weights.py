"""Weight initialisations that several of the networks share."""

from typing import Literal

from torch import nn


def init_convnet(
    model: nn.Module, *, mode: Literal["fan_in", "fan_out"] = "fan_out", linear_std: float | None = 0.01
) -> None:
    """Initialise a convolutional network in place, as its paper or common practice does.

    Convolutions get He et al.'s normal initialisation (arXiv:1502.01852), normalisations start as the
    identity, and biases at zero.

    Args:
        model: the network; every submodule is visited.
        mode: `fan_out` keeps the gradients' variance through the layers, `fan_in` the activations'.
        linear_std: standard deviation of the linear layers' weights; None leaves linear layers as torch
            initialises them.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, 0.0, linear_std)
            nn.init.zeros_(module.bias)
