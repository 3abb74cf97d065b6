"""Votes V_ij that are never stored: what a router needs to know of them, as a few differentiable operations.

`Votes` is the interface; three implementations compute the same:

    DenseVotes      stores the votes in one tensor: the reference, for any device and dtype
    ChunkedVotes    recomputes the votes of one parent type at a time in tensor operations: any device and dtype
    CompiledVotes   recomputes them in compiled loops: the CPU, float32 and float64

`routing.dispatch.make_votes` chooses. A router written on `Votes` runs at the speed of the implementation, with no code
of its own.
"""

from torchcaps.kernels.votes.base import Moments, Slots, Votes, VotesInput
from torchcaps.kernels.votes.chunked import ChunkedVotes
from torchcaps.kernels.votes.compiled import CompiledVotes
from torchcaps.kernels.votes.dense import DenseVotes

__all__ = ["ChunkedVotes", "CompiledVotes", "DenseVotes", "Moments", "Slots", "Votes", "VotesInput"]
