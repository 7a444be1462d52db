"""Products with the weights of the embedded engine, in float32 or bfloat16, whose results are float32.

Owns the layout in which a weight is kept for them: large ones are packed by oneDNN, once for each load, so that a pass
of any number of rows reads them in order. Measured on a core with AVX-512: 1.3 to 2.5 times as fast as the same weight
unpacked. A call of oneDNN costs 10 µs more, so that small ones stay as they are.
Never knows which part of a model a weight is.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves the operators of its libraries untyped)

from __future__ import annotations

from typing import Any, Final, cast

import torch
import torch.nn.functional as F

_PACKED: Final = 1 << 18  # elements from which a packed weight gains more than the call costs
_ROWS: Final = 64  # of which the layout is the best; it serves any number


def _packs(dtype: torch.dtype) -> bool:
    """Whether this machine's torch multiplies with packed weights of `dtype`."""
    onednn: Any = torch.ops.mkldnn
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(onednn, "_linear_pointwise")
    return has_onednn and (dtype == torch.float32 or bool(onednn._is_mkldnn_bf16_supported()))


class Product:
    """A weight [O, I], kept in `dtype`, and a bias [O] in float32."""

    __slots__ = ("_bias", "_dtype", "_packed", "_weight")

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, *, dtype: torch.dtype) -> None:
        self._bias, self._dtype = bias_O, dtype
        self._packed = weight_OI.numel() >= _PACKED and _packs(dtype)
        weight = weight_OI.to(dtype)
        if self._packed:
            weight = cast("torch.Tensor", torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS))
        elif dtype == torch.float32:
            # Small float32 weights are kept as [I, O]: `torch.mm` then reads both factors in order, and the
            # transposed view of a [O, I] weight is slower for few rows.
            weight = weight.t().contiguous()  # [I, O]
        self._weight = weight

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias, [N, O]."""
        x, bias = x_NI.to(self._dtype), self._bias
        if self._packed:
            multiply: Any = torch.ops.mkldnn._linear_pointwise.default
            return multiply(x, self._weight, bias, "none", [], "").float()
        if self._dtype == torch.float32:
            return torch.mm(x, self._weight) if bias is None else torch.addmm(bias, x, self._weight)
        result = F.linear(x, self._weight).float()
        return result if bias is None else result.add_(bias)

    def onto(self, sum_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """`sum_NO` and the product with `x_NI`, added."""
        # `addmm` writes the sum in the product's own pass over the output. The packed kernels have no such form, so
        # there the sum is a second pass.
        if self._packed or self._bias is not None or self._dtype != torch.float32:
            return sum_NO + self(x_NI)
        return torch.addmm(sum_NO, x_NI, self._weight)
