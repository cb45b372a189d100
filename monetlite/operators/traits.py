"""Facts about ATen operators that torch doesn't state, in one table.

Torch itself says which operators are pointwise or draw random numbers (`torch.Tag`), which return views (their
schemas) and how many operations products take (`torch.utils.flop_counter`). What shares storage is in
`monetlite.fx.storages`. All else that depends on an operator's name is a field of `Traits`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about an operator, whatever its overload. Positions are those of arguments, or of results.

    Attributes:
        family: name shared by the kernels of different devices; empty for the operator's own.
        private_results: positions of results that only its own gradient reads, and that other devices' kernels
            don't have.
        larger_storages: its result may lie in a storage that is larger than the result.
        in_place: overloads that can overwrite their first operand: by the operator with `_` after its name, or, of
            gradients, by the overload `grad_input`.
        commutative: its result may take the memory of the second operand as well.
        limit: what bounds it on a GPU: a field of `monetlite.core.devices.Efficiency`.
        reads_twice: it reads its operands once for statistics or sums and once more for its results.
        gathers: it reads no more of its operands than it writes.
        shape_only: position of an operand of which it needs only shape and dtype.
        left_factor: position of the left factor of a product; the right one follows.
        runs_on_cublas: cuBLAS computes it on a GPU.
        wide_statistics: positions of statistics that kernels keep in float32 beside float32 weights.
        wants_channels_last: positions of operands that kernels convert to channels-last if they are not.
        reads_in_order: positions of operands that its kernel takes in channels-last or contiguous order only, as
            the last one of them is. Plain training copies others first.
        gradient_follows: its first operand, a gradient, should have the layout of its second.
        by_storage: it finds elements of its first operand by position in the storage.
        kept_whole: torch splits it into smaller operators during capture, which plain training doesn't run.
        ends_of_groups: position of an operand that says where each group of the first one's rows ends.
        fractions: its operands are probabilities, rates or deviations. A GPU ends the process where they are not.
        fusible: Inductor makes loops of it that it joins with those around it, though it is not computed element by
            element alone.
        checks: it raises an error if the model's assertion fails, and computes nothing.
    """

    family: str = ""
    private_results: range = range(0)
    larger_storages: bool = False
    in_place: tuple[str, ...] = ()
    commutative: bool = False
    limit: str = "elementwise"
    reads_twice: bool = False
    gathers: bool = False
    shape_only: int | None = None
    left_factor: int = 0
    runs_on_cublas: bool = False
    wide_statistics: tuple[int, ...] = ()
    wants_channels_last: tuple[int, ...] = ()
    reads_in_order: tuple[int, ...] = ()
    gradient_follows: bool = False
    by_storage: bool = False
    kept_whole: bool = False
    ends_of_groups: int | None = None
    fractions: bool = False
    fusible: bool = False
    checks: bool = False


_NONE = Traits()
TRAITS: dict[str, Traits] = {}
"""Traits by ATen's name of the operator, without namespace and overload."""


def _record(names: str, **facts: Any) -> None:
    for name in names.split():
        TRAITS[name] = replace(TRAITS.get(name, _NONE), **facts)


_record(
    "_native_batch_norm_legit_functional _native_batch_norm_legit native_batch_norm cudnn_batch_norm "
    "_batch_norm_with_update_functional",
    family="batch_norm",
)
_record("native_batch_norm_backward cudnn_batch_norm_backward", family="batch_norm_backward")
_record(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    family="attention",
    private_results=range(2, 99),  # after the result and the log-sum-exp: the generator's seed and offset
)
_record(
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward",
    family="attention_backward",
    left_factor=1,
)
_record("native_layer_norm", family="layer_norm")
_record("native_layer_norm_backward", family="layer_norm_backward")
_record(
    "native_layer_norm_backward layer_norm_backward_", wide_statistics=(3, 4)
)  # the second is of `layer_norm.py`
_record("native_group_norm_backward", wide_statistics=(2, 3))
_record("native_dropout", family="dropout")
_record("native_dropout_backward", family="dropout_backward")
_record("max_pool2d_with_indices", family="max_pool2d")
_record("max_pool2d_with_indices_backward", family="max_pool2d_backward")
_record("threshold_backward", family="relu_backward")
_record("_batch_norm_with_update_functional", private_results=range(3, 4))  # cuDNN's reserved space

# The mean of a loss's elements is put where those were, and returned with all of their memory.
_record(
    "mse_loss smooth_l1_loss binary_cross_entropy soft_margin_loss col2im",
    larger_storages=True,
)

_record(
    "relu gelu silu sigmoid tanh hardtanh leaky_relu elu hardswish hardsigmoid neg exp sqrt rsqrt cos sin log abs "
    "reciprocal mish clamp threshold_backward gelu_backward silu_backward hardtanh_backward tanh_backward "
    "sigmoid_backward leaky_relu_backward elu_backward",
    in_place=("default",),
)
_record("add sub mul div", in_place=("Tensor", "Scalar"))
_record("add mul", commutative=True)
_record("masked_fill", in_place=("Scalar",))
_record("pow", in_place=("Tensor_Scalar",))

# Kernels for single rows hold a row in registers, so only their gradients read twice (for the input, then for
# weight and bias).
_record("native_layer_norm _fused_rms_norm _softmax _log_softmax", limit="normalization")
_record(
    "_native_batch_norm_legit_functional _native_batch_norm_legit _batch_norm_with_update_functional "
    "_batch_norm_with_update native_batch_norm cudnn_batch_norm native_batch_norm_backward "
    "cudnn_batch_norm_backward batch_norm_backward native_group_norm native_group_norm_backward "
    "native_layer_norm_backward _fused_rms_norm_backward",
    limit="normalization",
    reads_twice=True,
)
_record("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d", limit="pooling")
_record(
    "upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward "
    "grid_sampler_2d grid_sampler_2d_backward",
    limit="resampling",
)
_record(
    "max_pool2d_with_indices_backward embedding_dense_backward index_put _unsafe_index_put index_add scatter "
    "scatter_add",
    limit="scatter",
)
_record("index _unsafe_index index_select gather embedding slice select nll_loss_forward", gathers=True)
_record("max_pool2d_with_indices_backward", shape_only=1)
_record(
    "new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like rand_like randn_like "
    "bernoulli copy_",
    shape_only=0,
)
_record("mm addmm bmm baddbmm addbmm mv addmv dot", runs_on_cublas=True)
_record("addmm baddbmm", left_factor=1)

_record("native_group_norm", reads_in_order=(0,))
_record("native_group_norm_backward", reads_in_order=(0, 1))
_record("convolution", wants_channels_last=(0,))
_record("convolution_backward", wants_channels_last=(0, 1))
_record(
    "native_batch_norm_backward batch_norm_backward threshold_backward hardtanh_backward silu_backward "
    "gelu_backward hardswish_backward max_pool2d_with_indices_backward",
    gradient_follows=True,
)
_record("as_strided as_strided_copy as_strided_scatter _reshape_alias resize", by_storage=True)

_record(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa multi_margin_loss multilabel_margin_loss_forward hardshrink "
    "softshrink",
    kept_whole=True,
)
_record(
    "binary_cross_entropy binary_cross_entropy_backward bernoulli bernoulli_ multinomial poisson binomial "
    "_standard_gamma normal normal_",
    fractions=True,
)
_record("_grouped_mm grouped_mm_fallback grouped_mm_fallback_backward", ends_of_groups=2)  # some are transformers'
_record("nll_loss_backward nll_loss2d_forward nll_loss2d_backward index_copy scatter_reduce take put")  # `is_known`
_record(
    "native_layer_norm native_layer_norm_backward _softmax _log_softmax _safe_softmax _softmax_backward_data "
    "_log_softmax_backward_data native_batch_norm_backward native_group_norm native_group_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward native_dropout_backward sum mean var_mean amax amin any all clone "
    "cat _to_copy copy constant_pad_nd slice_backward select_backward expand_copy full full_like zeros zeros_like "
    "ones ones_like arange scalar_tensor new_zeros new_ones new_full",
    fusible=True,
)
_record("_assert_async", checks=True)


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
"""Namespaces of operators that wait for other processes."""


def traits_of(target: str) -> Traits:
    """The traits of a call's target.

    >>> traits_of("aten.embedding.default").gathers
    True
    """
    return TRAITS.get(aten_name(target), _NONE)


def is_known(target: str) -> bool:
    """Tell whether a call's target is in the table: arguments that are made up for it are then valid."""
    return aten_name(target) in TRAITS


def aten_name(target: str) -> str:
    """`"aten.convolution.default"` → `"convolution"`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def family_of(target: str) -> str:
    """A target's family, as fingerprints and tables name it: `"aten._softmax.default"` → `"softmax"`."""
    return traits_of(target).family or aten_name(target).lstrip("_")


def operation_formula(target: str) -> Callable[..., int] | None:
    """Torch's formula for an operator's operations, given the shapes of its arguments; None if it has none.

    Matrix products, convolutions and attention have one. The CPU's attention counts like the GPU's.
    """
    family = family_of(target)
    if family.startswith("attention"):
        return partial(_with_all_heads, _formulas()[f"_scaled_dot_product_flash_{family}"])
    return _formulas().get(aten_name(target))


def _with_all_heads(formula: Callable[..., int], *arguments: Any) -> int:
    """The operations of attention, whose keys and values may have fewer heads than queries.

    Each is multiplied once for every head of queries. Torch 2.11 has formulas for as many heads of both.
    """
    shapes = {at: item for at, item in enumerate(arguments) if isinstance(item, tuple) and len(item) == 4}
    heads = max(shape[1] for shape in shapes.values())
    full = {at: (batch, heads, *rest) for at, (batch, _, *rest) in shapes.items()}
    return formula(*(full.get(at, item) for at, item in enumerate(arguments)))


@cache
def _formulas() -> dict[str, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    # Those that are not wrapped take tensors, not shapes.
    return {
        getattr(target, "__name__", str(target)): formula
        for target, formula in flop_registry.items()
        if hasattr(formula, "__wrapped__")
    }


def is_collective(target: str) -> bool:
    """True for operators that wait for other processes: each of them runs such an operator once, in the same order.

    >>> is_collective("_c10d_functional.all_reduce.default")
    True
    """
    return target.partition(".")[0] in _COLLECTIVES
