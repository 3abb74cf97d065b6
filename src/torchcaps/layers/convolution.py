"""A convolution that is computed by fast Fourier transforms where these cost less."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.kernels.fourier import fourier_conv2d, is_faster

__all__ = ["Convolution"]


class Convolution(nn.Conv2d):
    """`nn.Conv2d` with the same parameters and, but for rounding, the same results; faster for large kernels on a CPU.

    Which way is taken depends on the sizes alone (`kernels.fourier.is_faster`), and on `TORCHCAPS_KERNELS`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve input [b c h w] to [b c' h' w']."""
        # Spectra want a plain convolution with the same stride along both axes
        stride, *others = self.stride
        if not self._simple or others != [stride] or not is_faster(input, self.weight, stride):
            return super().forward(input)
        y = fourier_conv2d(input, self.weight, stride)
        return y if self.bias is None else y + self.bias[:, None, None]

    @property
    def _simple(self) -> bool:
        """True without padding, dilation and groups, and outside of mixed precision, which wants fewer digits."""
        plain = self.padding == (0, 0) and self.dilation == (1, 1) and self.groups == 1
        return plain and not torch.is_autocast_enabled("cpu")
