"""Matrix products on the CPU from weights that are laid out for it once, when the model is loaded.

`F.linear` hands a plain weight to a general BLAS at every call. Decoding reads every weight for a few rows, so what counts
is how many bytes that takes and in which order they come.
"""

import torch
from torch import Tensor, nn

from common.device import cpu_multiplies_bfloat16

# What float16 may change in a weight: half its finest step, far below float32's rounding of a sum of products.
LOSSLESS = 2.0**-25


class PackedLinear(nn.Module):
    """An nn.Linear for inference, by oneDNN: x [T, in] -> [T, out]."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias.detach() if linear.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class HalfBytesLinear(nn.Module):
    """The same by FBGEMM: weights kept in float16, widened in registers, products and sums in float32.

    Checkpoints come in bfloat16, whose values float16 holds exactly where they are not tiny; so float32 arithmetic needs
    no float32 weights. Half the bytes are half the time of a decode step.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        bias = linear.bias.detach().float() if linear.bias is not None else None
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach().float(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed).to(x.dtype)


def pack_linears(module: nn.Module, kernels: str) -> None:
    """Replace every nn.Linear below `module`, one at a time, so that no two copies of the model exist at once.

    One stays as it is where no library here has anything better for its dtype.
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _pack(child, kernels))
        else:
            pack_linears(child, kernels)


def _pack(linear: nn.Linear, kernels: str) -> nn.Module:
    weight = linear.weight.detach()
    multiplies = weight.dtype == torch.bfloat16 and cpu_multiplies_bfloat16()
    if not multiplies and _float16_holds(weight):
        if kernels == "native":
            from common.kernels.native import NativeLinear

            return NativeLinear(linear)
        if "fbgemm" in torch.backends.quantized.supported_engines:
            return HalfBytesLinear(linear)
    if multiplies or (weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()):
        return PackedLinear(linear)
    return linear


def _float16_holds(weight: Tensor) -> bool:
    """Looked at in slices, for a weight can be a large part of the memory."""
    return all((rows.half().float() - rows.float()).abs().max() <= LOSSLESS for rows in weight.split(1024))
