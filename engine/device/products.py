"""Which matrix product a GPU computes a model's layers with, and their ops.

There are two: "own" is `srm_linear_sm90`, "plain" is `srm_linear_plain`, which has any shape and
dtype on any GPU. What MAX makes of a plain product is neither: it was wrong on an H200. The two
round at different places. One model has one of them for all its layers and any number of rows, so
that a token does not depend on how many others are computed beside it. Both take weights as
[out, in]. "own" does the work of a norm too, where a product follows it: see `folds_norms`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from max.driver import Device
from max.dtype import DType
from max.graph import BufferValue, DimLike, TensorType, TensorValue, ops

from srm.engine.config import FLOAT8_MULTIPLE, ModelConfig, ProductSetting
from srm.errors import ConfigError

Product = Literal["own", "plain"]
Variants = frozenset[str]
VariantName = Literal["tanh", "ahead", "stores", "clusters", "mixed", "rejection", "pdl", "int8"]
VARIANTS = get_args(VariantName)
"""Names of kernels that a graph has instead of today's. None is a default before a GPU's record
shows that it is right and at least as fast.

"mixed" mixes rows that decode inside the product before it; with "pdl" a step's kernels start while
the one before them ends. "int8" is of models in FLOAT8, and in its place."""
CHUNK = 64
"""Channels of which a head must have a multiple for "mixed": CHUNK of _sm90_epilogue.mojo."""
MIXERS = {"mixed", "parallel", "column_heads"}
"""Those that "mixed" has: a layer is one unit, which reads proj_in alone."""
NO_VARIANTS: Variants = frozenset()
MULTIPLE = 128
"""Number of which d_model must be a multiple for "own"; a vocabulary may be of any size."""
OPS = {"own": "srm_linear_sm90", "plain": "srm_linear_plain"}
FLOAT8 = DType.float8_e4m3fn
"""Of the products of channel mixers, "own" alone; all else of such a model is bfloat16."""
SLICE = 256
"""Columns of a slice of the head; the last one is filled up with columns of -inf."""


class ResidualStream(NamedTuple):
    """The residual stream, and its moments: mean and sum of squares about it, of each row and
    `moment_columns`."""

    values: TensorValue  # [tokens, d]
    moments: TensorValue | None = None  # f32[tokens, parts, 2] where norms are folded


def choose_product(
    wanted: ProductSetting, model: ModelConfig, dtype: DType, device: Device
) -> Product | None:
    """Return the product for a GPU, None for a CPU, which has one alone.

    "auto" is "own" where a GPU's record has that at least as fast and right. Raises ConfigError
    where what is wanted cannot be. FLOAT8 has "own" alone.
    """
    if dtype == FLOAT8:
        return _float8_product(wanted, model, device)
    if device.is_host:
        if wanted != "auto":
            raise ConfigError(f"product = {wanted}: it is of a GPU; use product = auto on a CPU")
        return None
    if wanted == "plain":
        return "plain"
    obstacle = _obstacle(model, dtype, device)
    if obstacle and wanted != "auto":
        raise ConfigError(f"product = {wanted}: {obstacle}; use product = plain or auto")
    is_recorded = model.d_model % SLICE == model.vocab_size % SLICE == 0
    return "own" if not obstacle and (is_recorded or wanted == "own") else "plain"


def _float8_product(wanted: ProductSetting, model: ModelConfig, device: Device) -> Product:
    if wanted not in {"auto", "own"}:
        raise ConfigError(f"product = {wanted}: dtype = float8 has product = own or auto alone")
    if device.is_host:
        raise ConfigError(
            "dtype = float8: an H100 or H200 (sm_90) alone has it; use float32 or bfloat16 on a CPU"
        )
    if obstacle := _obstacle(model, FLOAT8, device):
        raise ConfigError(f"dtype = float8: {obstacle}; use dtype = bfloat16")
    if wanted == "auto" and model.vocab_size % SLICE:
        raise ConfigError(
            f"dtype = float8: no GPU has run it with a vocabulary of {model.vocab_size}, no "
            f"multiple of {SLICE}; use product = own to try, or dtype = bfloat16"
        )
    return "own"


def _obstacle(model: ModelConfig, dtype: DType, device: Device) -> str:
    """Say why a model cannot have "own"; empty if it can."""
    architecture = str(device.architecture_name)
    if architecture.rstrip("a") != "sm_90":
        return f"it is for an H100 or H200 (sm_90), the GPU is {architecture}"
    if dtype not in {DType.bfloat16, FLOAT8}:
        return f"it multiplies bfloat16, dtype is {dtype.name}"
    return model.misfit(FLOAT8_MULTIPLE if dtype == FLOAT8 else MULTIPLE)


def choose_variants(
    names: Iterable[str], product: Product | None, model: ModelConfig, dtype: DType
) -> Variants:
    """Return the variants of a graph. Raises ConfigError for an unknown name, for any name but
    "rejection" where norms are not folded, as other products have no variants, for "int8" where
    dtype is not FLOAT8, and for "mixed" where the model has no mixer that can be part of a product.
    """
    variants = frozenset(names)
    if unknown := sorted(variants.difference(VARIANTS)):
        known = ", ".join(VARIANTS) or "none"
        raise ConfigError(f"variants = {', '.join(unknown)}: known are {known}")
    of_products = sorted(variants - {"rejection"})
    if of_products and not folds_norms(product, model, dtype):
        raise ConfigError(
            f"variants = {', '.join(of_products)}: they need product = own and projections"
        )
    if "int8" in variants and dtype != FLOAT8:
        raise ConfigError(f"variants = int8: it is of dtype = float8, this is {dtype.name}")
    if "mixed" in variants and (model.mixer not in MIXERS or model.head_dim % CHUNK):
        raise ConfigError(
            f"variants = mixed: it is of the mixers {', '.join(sorted(MIXERS))}, with heads of a "
            f"multiple of {CHUNK} channels; this is {model.mixer}, with {model.head_dim} channels"
        )
    return variants


def folds_norms(product: Product | None, model: ModelConfig, dtype: DType) -> bool:
    """Whether norms are folded into the products behind them, and who writes the residual stream
    writes moments. Without projections a mixer follows a norm, and writes the stream: norms stay.
    """
    return product == "own" and dtype in {DType.bfloat16, FLOAT8} and model.use_projections


def multiply(
    product: Product,
    x: TensorValue,
    weight: TensorValue,
    rows: DimLike,
    bias: TensorValue | None,
    residual: TensorValue | None,
    silu: bool,
) -> TensorValue:
    """act(x @ weight^T + bias) + residual of the first `rows` rows of x, as `linear` has it."""
    columns, depth = map(int, weight.shape)
    # The op does not read a tensor it has been told is absent: any will do in its place.
    return ops.custom(
        OPS[product],
        x.device,
        [x, weight, x if bias is None else bias, x if residual is None else residual],
        [TensorType(x.dtype, [rows, columns], x.device)],
        {
            "N": columns,
            "K": depth,
            "has_bias": bias is not None,
            "has_residual": residual is not None,
            "silu": silu,
        },
    )[0].tensor


def multiply_normed(
    x: ResidualStream,
    weight: TensorValue,
    columns: TensorValue,
    silu: bool,
    variants: Variants = NO_VARIANTS,
) -> TensorValue:
    """act(norm(x) @ weight^T + columns[:, 1]), the "own" product. The norm has neither gain nor
    shift: they are in weight and columns f32[N, 2], whose first are the sums of each weight[n]."""
    assert x.moments is not None
    inputs = [x.values, weight, columns, x.moments]
    types = [TensorType(x.values.dtype, [x.values.shape[0], weight.shape[0]], x.values.device)]
    how = _parameters(weight, variants) | {"silu": silu}
    return ops.custom("srm_normed_sm90", x.values.device, inputs, types, how)[0].tensor


def multiply_and_mix(
    state: BufferValue,
    unit: TensorValue,
    x: ResidualStream,
    *rows: TensorValue,
    weight: TensorValue,
    columns: TensorValue,
    slots: TensorValue,
    pdl: bool,
    **scalars: TensorValue,
) -> TensorValue:
    """`kernels.mix` of `multiply_normed` in one op, to the same bits.

    `rows` and `scalars` are arguments of `mix`, in its order; `slots` i32[D] tells that the first D
    rows decode: those are mixed inside the product.
    """
    assert x.moments is not None
    inputs = [state, unit, x.values, *rows, *scalars.values(), weight, columns, x.moments, slots]
    how = _parameters(weight, frozenset({"pdl"} if pdl else ()))
    how |= {"heads": int(scalars["decay"].shape[1])}
    types = [TensorType(x.values.dtype, [x.values.shape[0], weight.shape[0]], x.values.device)]
    return ops.inplace_custom("srm_mixed_sm90", x.values.device, inputs, types, how)[0].tensor


def multiply_into_stream(
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue,
    stream: ResidualStream,
    variants: Variants = NO_VARIANTS,
) -> ResidualStream:
    """x @ weight^T + bias + stream, the "own" product, with its moments."""
    inputs, types = [x, weight, bias, stream.values], stream_types(stream.values.type)
    how = _parameters(weight, variants)
    product = ops.custom("srm_stream_sm90", x.device, inputs, types, how)
    return ResidualStream(*(operand.tensor for operand in product))


def dtype_of_mixers(variants: Variants) -> DType:
    """The dtype of a channel mixer's factors, of a model in FLOAT8."""
    return DType.int8 if "int8" in variants else FLOAT8


def multiply_8bit(
    x: TensorValue,
    weight: TensorValue,
    columns: TensorValue,
    divisors: TensorValue,
    scales: TensorValue,
    variants: Variants = NO_VARIANTS,
) -> TensorValue:
    """SiLU(columns[:, 1] + columns[:, 0] * x @ weight^T) / divisors, in FLOAT8 as its factors are,
    with its columns in an order of their own. In int8 it is what `srm_up_8bit` says, and x has
    `scales`; both are of `layer_norm_8bit`."""
    types = [TensorType(x.dtype, [x.shape[0], weight.shape[0]], x.device)]
    inputs, how = [x, weight, columns, divisors, scales], _parameters(weight, variants)
    return ops.custom("srm_up_8bit", x.device, inputs, types, how)[0].tensor


def multiply_8bit_into_stream(
    x: TensorValue,
    weight: TensorValue,
    columns: TensorValue,
    residual: TensorValue,
    variants: Variants = NO_VARIANTS,
) -> ResidualStream:
    """columns[:, 1] + columns[:, 0] * x @ weight^T + residual, with its moments. x and weight are
    FLOAT8 or int8, their columns in that order."""
    inputs, types = [x, weight, columns, residual], stream_types(residual.type)
    how = _parameters(weight, variants)
    product = ops.custom("srm_down_8bit", x.device, inputs, types, how)
    return ResidualStream(*(operand.tensor for operand in product))


def _parameters(weight: TensorValue, variants: Variants) -> dict[str, int | str | bool]:
    columns, depth = map(int, weight.shape)
    return {"N": columns, "K": depth, "variants": ",".join(sorted(variants))}


def moment_columns(width: int) -> int:
    """Return of how many columns moments of a stream are: BN of _sm90_epilogue.mojo."""
    return 256 if width % 256 == 0 else 128


def stream_types(values: TensorType) -> list[TensorType]:
    """The types of a stream with moments."""
    tokens, width = values.shape
    parts = int(width) // moment_columns(int(width))
    return [values, TensorType(DType.float32, [tokens, parts, 2], values.device)]


def padding_of(vocab: int) -> int:
    """Return how many columns of -inf `head_with_slices` puts behind those of a vocabulary."""
    return -vocab % SLICE


def head_with_slices(
    x: TensorValue,
    weight: TensorValue,
    rows: DimLike,
    sampling: BufferValue,
    slots: TensorValue,
    variants: Variants = NO_VARIANTS,
) -> tuple[TensorValue, TensorValue]:
    """The "own" product without bias, and the softmax of its slices.

    Args:
        x: bfloat16[T, K].
        weight: bfloat16[V, K].
        rows: M, where only the first M <= T rows are wanted.
        sampling: i32[S, 6], read: how each slot samples.
        slots: i32[D], of the first rows; the others, if any, count as at temperature 1.
        variants: of the graph.

    Returns:
        bfloat16[M, N], N = V + `padding_of(V)`, and float32[M, N / SLICE, 2]: of each slice of a
        row the largest value, and the sum of exp((value - largest) / temperature).
    """
    padding = padding_of(int(weight.shape[0]))
    columns = int(weight.shape[0]) + padding
    y, slices = ops.inplace_custom(
        "srm_head_sm90",
        x.device,
        [sampling, x, weight, slots],
        [
            TensorType(x.dtype, [rows, columns], x.device),
            TensorType(DType.float32, [rows, columns // SLICE, 2], x.device),
        ],
        _parameters(weight, variants) | {"N": columns, "padding": padding},
    )
    return y.tensor, slices.tensor
