"""What transformers does at the first call of a model that returns hidden states: it puts hooks on its layers.

It takes a lock for that, which can't be captured. A model that has the hooks, as after a first call, can be.
"""

import sys
from typing import Any

from torch import nn

_MODULE = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"


def install_recorders(model: nn.Module, error: Exception) -> bool:
    """Put them on a model whose capture has failed for want of them.

    Returns:
        Whether there were any to put, so that another capture may succeed.
    """
    transformers: Any = sys.modules.get(_MODULE)
    install = getattr(transformers, "maybe_install_capturing_hooks", None)
    if install is None or "output_capturing" not in str(error):
        return False
    lacking = [
        module
        for module in model.modules()
        if getattr(module, "_can_record_outputs", None) and not getattr(module, _INSTALLED, False)
    ]
    for module in lacking:
        install(module)
    return bool(lacking)


__all__ = ["install_recorders"]
