"""Which family an operator belongs to, whatever device's kernel it was traced as."""

_ALIASES = {
    "_native_batch_norm_legit_functional": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "_batch_norm_with_update_functional": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "cudnn_batch_norm_backward": "batch_norm_backward",
    "batch_norm_backward": "batch_norm_backward",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_cudnn_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention_backward",
    "_scaled_dot_product_flash_attention_backward": "attention_backward",
    "_scaled_dot_product_efficient_attention_backward": "attention_backward",
    "_scaled_dot_product_cudnn_attention_backward": "attention_backward",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "native_dropout": "dropout",
    "native_dropout_backward": "dropout_backward",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool2d_with_indices_backward": "max_pool2d_backward",
    "threshold_backward": "relu_backward",
}


def is_note(target: str, position: int) -> bool:
    """Whether a result of a kernel is for its own gradient alone, and other devices' kernels have another."""
    if short_name(target) == "attention":
        return position >= 2  # after the result and the log-sum-exp: the generator's seed and offset
    return packet(target) == "_batch_norm_with_update_functional" and position == 3  # cuDNN's reserved space


def packet(target: str) -> str:
    """`"aten.convolution.default"` → `"convolution"`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def short_name(target: str) -> str:
    """What a person would call an operator: `"aten._softmax.default"` → `"softmax"`."""
    name = packet(target)
    return _ALIASES.get(name, name.lstrip("_"))


def family_of(target: str, part: str = "") -> str:
    """The family of (a part of) an operator: what fingerprints and tables call it."""
    return short_name(target) + part
