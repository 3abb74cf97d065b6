"""The capsule encoder W: from visible children to hidden capsules, and steps of contrastive divergence."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.kernels import contrastive_ops
from torchcaps.layers.rank_mask import Restart, SparseMask, rank, rank_mask
from torchcaps.math.squash import norm, squash
from torchcaps.models.poe import energy
from torchcaps.models.poe.config import EnergyConfig
from torchcaps.models.poe.joining import join_groups, nearness
from torchcaps.routing import Dynamic, route
from torchcaps.types import Capsules
from torchcaps.utils.distributed import mean_over_processes
from torchcaps.utils.mapped import take
from torchcaps.utils.random import normal, uniform

__all__ = ["CapsuleEnergy", "CapsuleState", "SampleDraws"]


_RESTART_EVERY = 50
"""Training steps from one look for capsules to restart to the next."""
_FORGET = 0.01
"""Weight of the last batch in the moving average of how near ranking capsules are to each other."""
_RESTART_NOISE = 0.3
"""Deviation of the noise in a copy, relative to the weights."""


class SampleDraws(NamedTuple):
    """What the random numbers of a batch depend on: the image, not the process or the place in the batch.

    Attributes:
        seed: Of the run.
        indices: [b] numbers of the images in the data set.
    """

    seed: int
    indices: Tensor


class CapsuleState(NamedTuple):
    """The capsules above visible children, as `CapsuleEnergy.infer` finds them.

    Attributes:
        x: Visible children [b i d].
        coupling: [b i j] or one number.
        z: [b j k] before squash.
        gate: [b j] in [0, 1], None where nothing competes.
        ranks: [b j], 0 = the capsule that wins, None where nothing competes.
        slab: How many of the k numbers are real.
        support: [b j] without boost, which made the ranks; None where nothing competes, or other children rank.
    """

    x: Tensor
    coupling: energy.Coupling
    z: Tensor
    gate: Tensor | None
    ranks: Tensor | None
    slab: int = 0
    support: Tensor | None = None

    @property
    def phase(self) -> energy.Phase:
        """What the free energy depends on."""
        return energy.Phase(self.x, self.coupling, self.gate)

    @property
    def hidden(self) -> Tensor:
        """x_j [b j k] = squash(z_j) behind the gate; with a slab, `energy.hidden`."""
        return energy.hidden(self.z, self.gate, slab=self.slab)

    @property
    def on(self) -> Tensor:
        """P(h_j = 1 | x) [b j] behind the gate."""
        on = energy.probability_on(self.z, self.slab)
        return on if self.gate is None else on * self.gate

    @property
    def free_energy(self) -> Tensor:
        """F [b] for this coupling and gate."""
        return energy.free_energy(self.z, self.gate, self.slab)


class CapsuleEnergy(nn.Module):
    """I visible children of d numbers <-> J hidden capsules of k numbers, by W [i j k d].

    Args:
        config: How it learns.
        children: I.
        capsules: J.
        child_dimension: d.
        dimension: k.
        ranking: How many more children there are behind the I. They make no pose, but rank the capsules, by an
            energy of their own with the same gate: `ranker`. 0 = the I children rank them.
    """

    bias: Tensor
    offset: Tensor
    power: Tensor
    particles: Tensor
    near: Tensor | None
    owner: Tensor | None

    def __init__(
        self,
        config: EnergyConfig,
        children: int,
        capsules: int,
        child_dimension: int,
        dimension: int,
        ranking: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.ranking = ranking
        self.slab = config.slab
        # Uniform coupling and the scale of W that goes with it
        self.competes = config.mode == "competition"
        self.gain = config.gain if self.competes else 1.0
        self.share = 1 / (children if getattr(config.routing, "over", "parents") == "children" else capsules)
        # What matters at the start is the scale of c W, so that W is larger where the coupling is smaller
        std = 0.1 if config.mode == "paper" else config.init / self.share
        self.W = nn.Parameter(torch.randn(children, capsules, dimension, child_dimension) * std)
        # What is learned by other means than gradients is a buffer
        self.register_buffer("bias", torch.zeros(capsules, dimension))
        self._update_bias(0)
        self.register_buffer("offset", torch.zeros(children, child_dimension))
        self.register_buffer("power", torch.ones(()))
        # Persistent chains and the competition, if the configuration asks for them
        particles = config.particles if config.chain == "persistent" else 0
        self.register_buffer("particles", torch.zeros(particles, children, child_dimension))
        self.ranker = self._build_ranker(ranking) if ranking and self.competes else None
        competes_itself = self.competes and self.ranker is None
        self.mask = SparseMask(capsules, gamma=config.sharpness, delta=config.boost) if competes_itself else None
        # Where several ranking capsules make one group: in the ranker how near they are to each other, and here whose
        # each of them is, -1 = not known yet
        self.joins = self.competes and config.prototypes > 1
        joined = self.joins and competes_itself
        self.register_buffer("near", torch.zeros(capsules, capsules) if joined else None)
        count = 0 if self.ranker is None else len(self.ranker.bias)
        self.register_buffer("owner", torch.full((count,), -1) if self.joins and count else None)
        # Of the last step
        self.restarted: list[Restart] = []

    def _build_ranker(self, children: int) -> CapsuleEnergy:
        """Build capsules over the ranking children: plain ones, whose gain is half the number of these children."""
        plain = replace(self.config, slab=0, magnitudes="mean", steps=1, routing=Dynamic(1, "cosine", "children"))
        _, capsules, _, child_dimension = self.W.shape
        return CapsuleEnergy(
            replace(plain, gain=children / 2),
            children,
            capsules * self.config.prototypes,
            child_dimension=child_dimension,
            dimension=self.config.rank_dimension,
        )

    def visible(self, features: Tensor) -> Tensor:
        """Return the children x_i = squash(features - offset); the paper's have no offset.

        Args:
            features: [b n d], those of ranking children behind the others.

        Returns:
            [b i d], or [b n d] if there is a ranker.
        """
        own, others = self._split(features)
        x = squash(own - self.offset)
        return x if self.ranker is None else torch.cat([x, self.ranker.visible(others)], 1)

    def _split(self, children: Tensor) -> tuple[Tensor, Tensor]:
        """Split [b n d] into the I children of the poses and the ranking ones."""
        I = len(self.W)
        return children[:, :I], children[:, I:]

    @torch.no_grad()
    def infer(self, x: Tensor, sharpness: float | None = None, boosted: bool = False) -> CapsuleState:
        """Route, compute z, and let the capsules compete.

        Args:
            x: Visible children, as of `visible`.
            sharpness: gamma of the mask; None for the final one.
            boosted: Whether the support is boosted, as in training.
        """
        # Poses before squash
        x, others = self._split(x)
        coupling, z = self.route(x)  # [b j k]
        z = z + self.bias
        # Others may rank the capsules
        if self.ranker is not None:
            ranked = self.ranker.infer(others, sharpness, boosted)
            gate, ranks = self._group(ranked, sharpness)
            return CapsuleState(x, coupling, z, gate, ranks, self.slab)
        if self.mask is None:
            return CapsuleState(x, coupling, z, None, None, self.slab)
        # Competition: the better a capsule alone explains the image, the wider its gate
        support = self.support(x, z)  # [b j]
        ranks = rank(support * self.mask.boost if boosted else support)
        gate = self._gate(ranks, sharpness).to(z.dtype)
        return CapsuleState(x, coupling, z, gate, ranks, self.slab, support)

    def _gate(self, ranks: Tensor, sharpness: float | None) -> Tensor:
        """Return the gate [b j] of ranks [b j]; without a sharpness, at the final one."""
        return rank_mask(ranks, self.config.sharpness if sharpness is None else sharpness)

    def _group(self, ranked: CapsuleState, sharpness: float | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gate and the ranks [b j] of the capsules, from those of the ranking capsules.

        Of several ranking capsules of one group the best counts. As long as it is not known which those are, every
        capsule learns from every image.
        """
        if self.owner is None or ranked.ranks is None:
            return ranked.gate, ranked.ranks
        # The graph of an export has no values to look at; what is exported is trained
        if not torch.compiler.is_exporting() and int(self.owner[0]) < 0:
            return ranked.z.new_ones(ranked.ranks.shape[0], len(self.bias)), None
        belongs = self.owner == torch.arange(len(self.bias), device=self.owner.device).unsqueeze(1)  # [j n]
        best = ranked.ranks.unsqueeze(1).masked_fill(~belongs, len(self.owner)).amin(-1)  # [b j]
        ranks = rank(-best)
        return self._gate(ranks, sharpness).to(ranked.z.dtype), ranks

    def route(self, x: Tensor) -> tuple[energy.Coupling, Tensor]:
        """Return the coupling of children x [b i d], and z [b j k] without the bias (Algorithm 1, line 1)."""
        r = self.config.routing
        # Uniform coupling is one matrix product
        if self.config.couples_uniformly:
            return self.share, contrastive_ops.forward(x, self.W, self.share)
        # Dynamic routing has a kernel that never stores the votes
        if isinstance(r, Dynamic) and not torch.compiler.is_exporting():
            return contrastive_ops.route(
                x, self.W, iterations=r.iterations, agreement=r.agreement, over=r.over, logits=r.logits
            )
        # Other routers; and the graph of an export, which is for any batch and has no values to look at.
        coupling = route(Capsules(x, norm(x)), self.W, r)[1].coupling[-1]
        return coupling, contrastive_ops.forward(x, self.W, coupling)

    def support(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the support [b j] in [0, 2]: 1 + the cosine between x and what capsule j alone would expect of it.

        With t_j = W_jᵀ z_j, the cosine is x . t_j / (|x| |t_j|) = (W_j x) . z_j / (|x| sqrt(z_jᵀ W_j W_jᵀ z_j)), where
        W_j x is z_j - b_j unless z_j was routed.
        """
        W = self.W.permute(1, 2, 0, 3).flatten(2) * self.share  # [j k (i d)]
        gram = W @ W.transpose(1, 2)  # [j k k]
        own = z - self.bias if self.config.couples_uniformly else contrastive_ops.forward(x, self.W, self.share)
        along = (own * z).sum(-1)  # [b j]
        length = torch.einsum("bjk,jkl,bjl->bj", z, gram, z).clamp_min(0).sqrt() * x.flatten(1).norm(
            dim=1, keepdim=True
        )
        cosine: Tensor = along / length.clamp_min(torch.finfo(z.dtype).tiny)
        return 1 + cosine

    def reconstruct_children(self, hidden: Tensor, coupling: energy.Coupling) -> Tensor:
        """Return the pre-activations [b i d] that hidden capsules [b j k] expect: gain * sum_j c_ij W_ijᵀ x_j."""
        return self.gain * contrastive_ops.reverse(hidden, self.W, coupling)

    def winners(self, state: CapsuleState) -> Tensor:
        """Return the capsule [b] that an image belongs to: the first in rank, or else the one most surely on."""
        if state.ranks is not None:
            return state.ranks.argmin(-1)
        # log |s|² + |r|² / 2 orders the capsules as P does, and does not saturate
        direction, real = energy.split(state.z, self.slab)
        size = direction.square().sum(-1)
        return (size.log() + real.square().sum(-1) / 2 if self.slab else size).argmax(-1)

    def contrast(self, x: Tensor, step: int, draws: SampleDraws) -> dict[str, Tensor]:
        """Take one step of contrastive divergence, as a loss.

        Args:
            x: Children of the batch's images, as of `visible`.
            step: Number of the training step, from 0: bias and sharpness depend on it.
            draws: Seed and images, of which the random numbers of "bernoulli" magnitudes are functions.

        Returns:
            "loss" to be lowered; the "gap" F(data) - F(model) that it scales; "error", the squared distance between
            model and data relative to the data's power.
        """
        self._update_bias(step)
        self._restart_losers(step, draws.seed)
        # The ranker learns by a loss of its own; a capsule that restarts there restarts here, too.
        ranked = None
        if self.ranker is not None:
            ranked = self.ranker.contrast(self._split(x)[1], step, draws)["loss"]
            if not self.joins:
                for j, source in self.ranker.restarted:
                    self._copy_capsule(j, source, step, draws.seed)
            elif step == self.joins_at:
                self._join()
        # Positive phase: what the images' children say.
        data = self.infer(x, self.sharpness_at(step), boosted=True)
        x = data.x
        # Negative phase: from the data, or from where the persistent chains stopped.
        start = data
        if self.config.chain == "persistent":
            start = self.infer(self.particles, self.sharpness_at(step), boosted=True)
            draws = SampleDraws(draws.seed, torch.arange(len(self.particles)))
        model = self.negative_phase(start, step, draws)
        # Loss: the free energy of the data against that of the model
        gap = energy.contrast(
            self.W,
            self.bias,
            data.phase,
            energy.Phase(model, start.coupling, start.gate),
            z=data.z,
            closed_form=self.config.gradient == "closed",
            slab=self.slab,
        )
        # State that the next step starts from
        self._update_statistics(data)
        if self.config.chain == "persistent":
            self.particles.copy_(model)
        # Batch and chains may differ in size: compare what both have
        error = (model[: len(x)] - x[: len(model)]).square().sum() / x[: len(model)].square().sum().clamp_min(1e-12)
        loss = gap * self.scale(data.gate)
        return {"loss": loss if ranked is None else loss + ranked, "gap": gap, "error": error}

    def sharpness_at(self, step: int) -> float:
        """Return gamma at a step: it rises from 0 over `ramp` steps, else capsules that lose at first never learn."""
        return self.config.sharpness * min(1.0, step / self.config.ramp)

    @torch.no_grad()
    def _update_bias(self, step: int) -> None:
        """Set the hidden bias of a step, along the first axis: W may turn a capsule's space, any direction will do."""
        if self.competes:
            progress = min(1.0, step / self.config.loosen)
            self.bias[:, 0] = (1 - progress) * self.config.bias_start + progress * self.config.bias

    def scale(self, gate: Tensor | None) -> float:
        """Return the factor that makes a learning rate mean the same for any number of capsules and any coupling.

        A step of c W, which is what z and the reconstruction see, is c² times the step that eq. 18 takes of W, and its
        effect grows with the power |x|² of the data and with the gain; a gate takes most images from a capsule.
        """
        taken = 1.0 if gate is None else float(gate[:1].mean())  # ranks are a permutation: every image's is the same
        return 1 / (self.share**2 * self.gain * float(self.power) * taken)

    @torch.no_grad()
    def negative_phase(self, start: CapsuleState, step: int, draws: SampleDraws) -> Tensor:
        """Let the model make children of its own: hidden from visible, visible from hidden, `steps` times.

        The coupling and the gate are those that the chain began with (Algorithm 1: "again with the same c").

        Args:
            start: Where the chain begins.
            step: Number of the training step.
            draws: Seed and images, of which the random numbers of "bernoulli" magnitudes are functions.

        Returns:
            Children [b i d].
        """
        x = start.x
        z = start.z
        for n in range(self.config.steps):
            # The first z is known from the positive phase
            if n:
                z = contrastive_ops.forward(x, self.W, start.coupling) + self.bias
            # Random numbers depend on seed, step and image, so that any number of processes draws the same
            drawn = None
            noise = None
            if self.config.magnitudes == "bernoulli":
                counters = (draws.seed, step, n, draws.indices)
                drawn = uniform(*counters, count=z.shape[1], dtype=z.dtype)
                noise = normal(*counters, count=z.shape[1] * self.slab, dtype=z.dtype).view(*z.shape[:2], -1)
            h = energy.hidden(z, start.gate, drawn, self.slab, noise if self.slab else None)
            x = energy.reverse(h, self.W, start.coupling, self.gain)
        return x

    @property
    def joins_at(self) -> int:
        """The training step at which ranking capsules are joined to groups, if there are more of them than capsules."""
        return self.config.loosen // 2

    @torch.no_grad()
    def _join(self) -> None:
        """Give every ranking capsule to a capsule."""
        assert self.ranker is not None and self.ranker.near is not None and self.owner is not None
        self.owner.copy_(join_groups(self.ranker.near, len(self.bias)))

    @torch.no_grad()
    def _restart_losers(self, step: int, seed: int) -> None:
        """Make capsules that win too seldom noisy copies of the one that wins most, which then shares its images.

        The moments of Adam are left alone: those of a capsule without images have decayed to 0, as if it were new.
        """
        c = self.config
        self.restarted = []
        last = self.joins_at if self.joins else c.loosen
        due = step > c.ramp and step < last and step % _RESTART_EVERY == 0
        if self.mask is None or not c.restart or not due:
            return
        self.restarted = self.mask.pick_restarts(c.restart)
        for j, source in self.restarted:
            self._copy_capsule(j, source, step, seed)

    @torch.no_grad()
    def _copy_capsule(self, j: int, source: int, step: int, seed: int) -> None:
        """Make the weights of capsule j a noisy copy of another's."""
        # Noise relative to each axis of the copied weights, so that no axis drowns in it
        own = self.W[:, source]  # [i k d]
        noise = normal(seed, step, j, count=own.numel(), dtype=own.dtype).view_as(own)
        size = own.square().mean((0, 2), keepdim=True).sqrt()  # [1 k 1]
        self.W[:, j] = own + _RESTART_NOISE * size * noise

    @torch.no_grad()
    def _update_statistics(self, data: CapsuleState) -> None:
        """Count, over all processes, how often each capsule wins: the lifetime statistics of the competition."""
        if self.mask is not None and data.ranks is not None:
            first = (data.ranks == 0).to(self.mask.frequency.dtype).mean(0)
            self.mask.observe_share(mean_over_processes(first))
        if self.near is not None and data.support is not None:
            # The same moving average as that of the wins
            self.near.lerp_(mean_over_processes(nearness(data.support)).to(self.near.dtype), _FORGET)

    @torch.no_grad()
    def fit_offset(self, features: Tensor, chunk: int = 1000) -> None:
        """Fit offset and power to all training features [n i d], and start the persistent chains."""
        features, others = self._split(features)
        if self.ranker is not None:
            self.ranker.fit_offset(others, chunk)
        n = len(features)
        chunks = [slice(start, start + chunk) for start in range(0, n, chunk)]
        # Sums in float64, a chunk of the half-precision features at a time
        if self.config.mode != "paper":
            self.offset.copy_(torch.stack([take(features, rows).double().sum(0) for rows in chunks]).sum(0) / n)
        # Power of the centered children
        read = (take(features, rows).to(self.offset.dtype) for rows in chunks)
        power = sum(float(squash(rows - self.offset).square().sum()) for rows in read) / n
        self.power.fill_(power if power > 1e-12 else 1.0)  # images that are all alike have none
        # Chains that have not started yet start at the first images
        if len(self.particles) and not bool(self.particles.any()):
            first = torch.arange(len(self.particles)) % n
            self.particles.copy_(squash(features[first].to(self.offset.dtype) - self.offset))
