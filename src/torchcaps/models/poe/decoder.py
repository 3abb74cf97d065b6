"""The capsule decoder: from hidden capsules back to the children's pre-activations (Hauser 2019, section 4.1).

    z_i = sum_j e_ji U_ji x_j + a_i

e_ji shares each child among the capsules that are on: of the capsules that are 0 none takes part, else a lone capsule
would get a share of its own picture only. With U by least squares or by gradient e = 1: it is part of U then. The
intercept a is the visible offset, or the one that least squares fits; the paper has none.

With `curvature` q the decoder is quadratic. The images of one capsule lie on a bent surface, and U draws its tangent:

    z_i = sum_j (U_ji x_j + Q_ji p_j) + a_i,    p_j = (y_1 y_1, y_1 y_2, ..., y_q y_q),    y = A_jᵀ x_j

The columns of A_j are the widest principal axes of the poses of capsule j. p_j is 0 where x_j is, as the pose itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcaps.math.squash import cosine, squash
from torchcaps.models.poe.config import DecoderConfig
from torchcaps.models.poe.energy import free_energy_grad, hidden
from torchcaps.models.poe.frames import NUMBERS

__all__ = ["CapsuleDecoder", "axis_products", "decoder_coupling", "paper_update"]


def _votes(x: Tensor, U: Tensor) -> Tensor:
    """U_ji x_j [b j i d], one matrix product a capsule."""
    j, i, d, k = U.shape
    # (i d) as one axis: a few large products instead of one for each pair (j, i)
    votes = torch.bmm(x.transpose(0, 1), U.reshape(j, i * d, k).transpose(1, 2))  # [j b (i d)]
    return votes.view(j, len(x), i, d).transpose(0, 1)  # [b j i d]


def decoder_coupling(x: Tensor, U: Tensor, iterations: int = 3, votes: Tensor | None = None) -> Tensor:
    """Find the decoder's coupling e by routing in reverse, with a softmax over the capsules that are on (x_j not 0).

    Args:
        x: Hidden capsules [b j k].
        U: [j i d k].
        iterations: Of the routing, 1 = uniform.
        votes: U_ji x_j [b j i d], if they are known already.

    Returns:
        [b j i].
    """
    votes = _votes(x, U) if votes is None else votes
    # Capsules that are off take no part
    off = ~x.bool().any(-1)  # [b j]
    logits = votes.new_zeros(votes.shape[:3]).masked_fill(off.unsqueeze(-1), -torch.inf)
    e = _softmax(logits)  # [b j i]
    # Agreement with the sum of the votes for a child decides who draws it
    for _ in range(iterations - 1):
        total = (e.unsqueeze(-1) * votes).sum(1)  # [b i d]
        logits = logits + cosine(votes, total.unsqueeze(1))
        e = _softmax(logits)
    return e


def _softmax(logits: Tensor) -> Tensor:
    """Over the capsules; 0 where all are off."""
    # A softmax over -inf alone is NaN
    return logits.softmax(1).nan_to_num(0.0)


def paper_update(U: Tensor, x: Tensor, z: Tensor, e: Tensor) -> Tensor:
    """Return the update of U by the rule of section 4.1, the mean over the batch.

        dU_ji = 2 e_ji (z_i x_jᵀ / (1 + |z_i|²) - z~_i x~_jᵀ / (1 + |z~_i|²))

    with z~_i = sum_j e_ji U_ji x_j and x~_j = squash(sum_i e_ji U_jiᵀ z~_i).

    Args:
        U: [j i d k].
        x: Hidden capsules [b j k].
        z: Pre-activations of the children [b i d].
        e: Coupling [b j i].

    Returns:
        [j i d k].
    """
    # The model side of the rule: children from x, then capsules from these children
    flat = U.flatten(1, 2)  # [j (i d) k]
    model_z = (e.unsqueeze(-1) * _votes(x, U)).sum(1)  # [b i d]
    model_x = squash(torch.bmm(_spread(e, model_z), flat).transpose(0, 1))  # [b j k]
    # Both outer products, summed over the batch
    data = torch.bmm(_spread(e, free_energy_grad(z)).transpose(1, 2), x.transpose(0, 1))  # [j (i d) k]
    model = torch.bmm(_spread(e, free_energy_grad(model_z)).transpose(1, 2), model_x.transpose(0, 1))
    return (data - model).view_as(U) / len(x)


def _spread(e: Tensor, z: Tensor) -> Tensor:
    """e_ji z_i [j b (i d)], of e [b j i] and z [b i d]."""
    return (e.unsqueeze(-1) * z.unsqueeze(1)).transpose(0, 1).flatten(2)


def axis_products(x: Tensor, axes: Tensor) -> Tensor:
    """Return the products of every two coordinates of capsules along their principal axes, and the squares.

    Args:
        x: Hidden capsules [b j k].
        axes: A [j k q].

    Returns:
        [b j q (q + 1) / 2]; 0 where x_j is 0.
    """
    y = torch.einsum("bjk,jkq->bjq", x, axes)
    (one, other) = torch.triu_indices(axes.shape[2], axes.shape[2], device=x.device)
    return y[..., one] * y[..., other]


def _fill_left_out(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Load zeros for the sums of the normal equations if a model that was given away has no rows of them."""
    for name in ("gram", "cross"):
        value = state.get(prefix + name)
        if value is not None and not len(value):
            state[prefix + name] = torch.zeros_like(module.get_buffer(name))


class CapsuleDecoder(nn.Module):
    """Capsules [b j k] -> pre-activations [b i d]; it also holds the distribution of each capsule's poses.

    Args:
        config: How U learns.
        children: i.
        capsules: j.
        child_dimension: d.
        dimension: k.
        slab: How many of the k numbers are real.
        frames: Whether a pose has a frame beside it.
    """

    intercept: Tensor
    axes: Tensor | None
    gram: Tensor
    cross: Tensor
    weight: Tensor
    first: Tensor
    second: Tensor
    examples: Tensor
    kept: Tensor
    example_frames: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        children: int,
        capsules: int,
        child_dimension: int,
        dimension: int,
        slab: int = 0,
        frames: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.slab = slab
        # U and the intercept: what decodes
        self.U = nn.Parameter(torch.randn(capsules, children, child_dimension, dimension) * 0.1)
        self.register_buffer("intercept", torch.zeros(children, child_dimension))
        # What a quadratic decoder has beside these: Q, and the axes whose products it decodes
        q = config.curvature
        products = q * (q + 1) // 2
        self.Q = nn.Parameter(torch.zeros(capsules, children, child_dimension, products)) if q else None
        self.register_buffer("axes", torch.eye(dimension)[:, :q].repeat(capsules, 1, 1) if q else None)
        # Sums of the normal equations, with one row for the intercept
        rows = capsules * (dimension + products) + 1
        columns = children * child_dimension if config.rule in ("least squares", "refined") else 0
        self.register_buffer("gram", torch.zeros(rows, rows, dtype=torch.float64))
        self.register_buffer("cross", torch.zeros(rows, columns, dtype=torch.float64))
        # Moments of each capsule's poses, and some of these poses
        self.register_buffer("weight", torch.zeros(capsules, dtype=torch.float64))
        self.register_buffer("first", torch.zeros(capsules, dimension, dtype=torch.float64))
        self.register_buffer("second", torch.zeros(capsules, dimension, dimension, dtype=torch.float64))
        self.register_buffer("examples", torch.zeros(capsules, config.examples, dimension))
        self.register_buffer("kept", torch.zeros(capsules, dtype=torch.int64))
        # Beside each of these poses the numbers of its image's frame
        self.register_buffer("example_frames", torch.zeros(capsules, config.examples, NUMBERS) if frames else None)
        self.register_load_state_dict_pre_hook(_fill_left_out)  # type: ignore[no-untyped-call]

    def forward(self, pose: Tensor) -> Tensor:
        """Decode capsules [b j k] to pre-activations [b i d]."""
        if self.config.rule == "paper":
            votes = _votes(pose, self.U)  # [b j i d]
            return (decoder_coupling(pose, self.U, votes=votes).unsqueeze(-1) * votes).sum(1) + self.intercept
        drawn = torch.einsum("jidk,bjk->bid", self.U, pose) + self.intercept
        if self.Q is None or self.axes is None:
            return drawn
        return drawn + torch.einsum("jidp,bjp->bid", self.Q, axis_products(pose, self.axes))

    def code(self, pose: Tensor) -> Tensor:
        """Return what is decoded of capsules [b j k], a row an image: [b (j k) + (j p)], p the products of axes."""
        if self.axes is None:
            return pose.flatten(1)
        return torch.cat([pose.flatten(1), axis_products(pose, self.axes).flatten(1)], 1)

    @torch.no_grad()
    def set_weights(self, weights: Tensor) -> None:
        """Set the decoder by rows [(j k) + (j p) + 1, (i d)], one for each number of `code` and one for the intercept.

        Args:
            weights: In the order of `code`; the last row is the intercept.
        """
        j, i, d, k = self.U.shape
        self.U.copy_(weights[: j * k].view(j, k, i, d).permute(0, 2, 3, 1))
        if self.Q is not None:
            self.Q.copy_(weights[j * k : -1].view(j, -1, i, d).permute(0, 2, 3, 1))
        self.intercept.copy_(weights[-1].view(i, d))

    def store_poses(self, z: Tensor, taken: Tensor, frames: Tensor | None = None) -> None:
        """Store the first poses of the images that each capsule takes part in.

        Args:
            z: [n j k].
            taken: [n j], true where the capsule takes part.
            frames: Numbers of the images' frames [n 4], if the model has frames.
        """
        for j in range(len(self.kept)):
            own = z[taken[:, j], j][: self.config.examples]  # [n k]
            self.examples[j, : len(own)] = own
            self.kept[j] = len(own)
            if self.example_frames is not None and frames is not None:
                self.example_frames[j, : len(own)] = frames[taken[:, j]][: self.config.examples]

    def fit_axes(self) -> None:
        """Fit the axes whose products are decoded to the stored poses: their principal ones, the widest first."""
        if self.axes is None:
            return
        for j in range(len(self.kept)):
            x = hidden(self.examples_of(j).double(), slab=self.slab)  # [n k]
            away = x - x.mean(0)
            widest = torch.linalg.eigh(away.T @ away).eigenvectors.flip(1)  # [k k]
            self.axes[j] = widest[:, : self.config.curvature]

    def examples_of(self, j: int) -> Tensor:
        """Return the poses [n k] stored of capsule j; a single 0 if it took part in no image."""
        return self.examples[j, : max(1, int(self.kept[j]))]

    def frames_of(self, j: int) -> Tensor:
        """Return the numbers of the frames [n 4] stored of capsule j; one that changes nothing if there are none."""
        if self.example_frames is None:
            return self.examples.new_zeros(1, NUMBERS)
        return self.example_frames[j, : max(1, int(self.kept[j]))]

    def pose_mean(self) -> Tensor:
        """Return the mean [j k] of z_j over the images that capsule j takes part in; 0 if there are none."""
        return self.first / self.weight.clamp_min(1e-12).unsqueeze(-1)

    def pose_covariance(self) -> Tensor:
        """Return the covariance [j k k] of z_j over the images that capsule j takes part in."""
        mean = self.pose_mean()  # [j k]
        second = self.second / self.weight.clamp_min(1e-12).view(-1, 1, 1)
        return second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
