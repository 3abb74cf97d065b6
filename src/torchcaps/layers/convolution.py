"""A convolution that is computed by fast Fourier transforms, or in bfloat16 by columns, where these cost less."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.kernels import columns, fourier

__all__ = ["Convolution"]


class Convolution(nn.Conv2d):
    """`nn.Conv2d` with the same parameters and, but for rounding, the same results; faster for large kernels on a CPU.

    Which way is taken depends on the sizes and on mixed precision alone (`kernels.fourier.is_faster`,
    `kernels.columns.is_faster`), and on `TORCHCAPS_KERNELS`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve input [b c h w] to [b c' h' w']."""
        # Both ways want a plain convolution with the same stride along both axes
        stride, *others = self.stride
        if not self._plain or others != [stride]:
            return super().forward(input)
        if not torch.is_autocast_enabled("cpu"):
            if not fourier.is_faster(input, self.weight, stride):
                return super().forward(input)
            y = fourier.fourier_conv2d(input, self.weight, stride)
        elif torch.get_autocast_dtype("cpu") == torch.bfloat16 and columns.is_faster(input, self.weight, stride):
            y = columns.column_conv2d(input, self.weight, stride)
        else:
            return super().forward(input)
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]

    @property
    def _plain(self) -> bool:
        """True without padding, dilation and groups."""
        return self.padding == (0, 0) and self.dilation == (1, 1) and self.groups == 1
