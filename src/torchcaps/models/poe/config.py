"""Settings of products of expert capsules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from torchcaps.config import (
    Count,
    Iterations,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Range,
    Share,
    Size,
    check,
)
from torchcaps.errors import RecipeError
from torchcaps.models.autoencoder import AutoencoderConfig
from torchcaps.routing import Dynamic, RouterChoice, router_of
from torchcaps.types import ImageSpec

if TYPE_CHECKING:
    from torchcaps.models.poe.model import PoE

__all__ = ["DecoderConfig", "EnergyConfig", "PoEConfig"]


def _uniform() -> Dynamic:
    """Uniform coupling that sums to 1 over children."""
    return Dynamic(iterations=1, agreement="cosine", over="children")


@dataclass(frozen=True)
class EnergyConfig:
    """The capsule encoder W and how it learns. Settings from `bias` on count in mode "competition" alone.

    Attributes:
        mode: "paper": Algorithm 1 as printed. "offset": the visible children are centered (eq. 1 has such a bias, eq. 7
            dropped it). "competition": centered, and capsules compete for each image.
        routing: How the coupling is found, by any router without learned scalars; 1 iteration of dynamic routing is
            uniform coupling, which needs no routing at all.
        magnitudes: Hidden capsules pass on their expected length ("mean") or are drawn on or off ("bernoulli").
        chain: The negative phase starts from the "data" (CD) or from where it stopped ("persistent").
        steps: Of the chain.
        particles: How many persistent chains there are.
        gradient: Eq. 18 in "closed" form, or by "autograd" from the free energy.
        init: Standard deviation of the entries of c W at the start; in mode "paper" that of W is .1.
        bias: Length of the hidden bias at the end: it keeps a capsule's poses on one side of their sphere.
        bias_start: Its length at the start: while it is long, a capsule can learn little but one picture.
        gain: Of the reverse pass over the forward one: few hidden capsules of length 1 stand for many visible ones.
        sharpness: gamma of the rank mask exp(-gamma rank / (J - 1)) at the end; its start is 0.
        ramp: Steps over which gamma rises.
        loosen: Steps over which the bias goes from its start to its end.
        boost: Step of the boost that capsules which win too seldom get, on a support between 0 and 2.
        restart: A capsule that wins less than this share of an even part of the images starts anew, as a noisy copy of
            the one that wins most, after the ramp and while the bias still changes; 0 = never.
        rank_dimension: Numbers of a ranking capsule, where edges rank the capsules. With as many as a pose has, one of
            few capsules can stand for two classes; with 1, it is a mean image.
        prototypes: Ranking capsules for each capsule, where edges rank them. If there are several, J times as many
            learn, and after half of the `loosen` steps are joined to J groups, the nearest first (`joining`). Until
            then, every capsule learns from every image.
        slab: n of a pose in S^m x R^n x (0, 1): so many of a capsule's numbers are real, the others a direction on
            S^m, m = dimension - 1 - n. The paper's capsule has 0.

    Raises:
        RecipeError: If a setting is out of range, or the router has learned scalars.
    """

    mode: Literal["competition", "offset", "paper"] = "competition"
    routing: RouterChoice = field(default_factory=_uniform)
    magnitudes: Literal["mean", "bernoulli"] = "mean"
    chain: Literal["data", "persistent"] = "data"
    steps: Iterations = 1
    particles: Size = 128
    gradient: Literal["closed", "autograd"] = "closed"
    init: PositiveFloat = 0.0007
    bias: NonNegativeFloat = 2.0
    bias_start: NonNegativeFloat = 3.0
    gain: PositiveFloat = 200.0
    sharpness: NonNegativeFloat = 120.0
    ramp: Count = 200
    loosen: Count = 2800
    boost: NonNegativeFloat = 0.01
    restart: Share = 0.0
    rank_dimension: Size = 16
    prototypes: Size = 1
    slab: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check(self)
        router = router_of(self.routing)
        learned = ", ".join([*router.learned, *router.learned_pairs])
        if learned:
            raise RecipeError(
                f"the router {type(self.routing).__name__} does not go with poe, whose energy holds the coupling"
                f" constant: {learned} would never learn; use a router without learned scalars, such as dynamic"
            )

    @property
    def couples_uniformly(self) -> bool:
        """True if the coupling is the same for all children, parents and images, so that no routing is needed."""
        return isinstance(self.routing, Dynamic) and self.routing.iterations == 1


@dataclass(frozen=True)
class DecoderConfig:
    """The capsule decoder U and how it learns.

    Attributes:
        rule: "least squares": closed form, in one pass over the images. "gradient": on the image's reconstruction
            through the frozen autoencoder. "refined": least squares, then by gradient. "paper": section 4.1's own rule,
            which undershoots.
        ridge: Of the least squares, relative to the mean square of a code's numbers; likewise of its products.
        curvature: So many of the widest principal axes of a capsule's poses are decoded by their products, too: a
            quadratic decoder. 0 = a linear one, as in the paper.
        examples: Poses of training images that are stored of each capsule, at most; samples are drawn near these.
        coverage: Share of a capsule's images that its distribution of poses is measured on and its stored poses are
            taken from: those that it supports most. The others are often images of another kind. 1 = all.

    Raises:
        RecipeError: If a setting is out of range, or the paper's rule is to have products.
    """

    rule: Literal["least squares", "gradient", "refined", "paper"] = "least squares"
    ridge: PositiveFloat = 1e-3
    curvature: NonNegativeInt = 0
    examples: Size = 256
    coverage: Annotated[float, Range(0, 1, open_low=True)] = 1.0

    def __post_init__(self) -> None:
        check(self)
        if self.curvature and self.rule == "paper":
            raise RecipeError(f"curvature = {self.curvature}, but the paper's rule is for a linear decoder: set 0")


@dataclass(frozen=True)
class PoEConfig:
    """Products of expert capsules; the defaults are the sizes of Hauser 2019, section 4.1.

    Attributes:
        capsules: J, 20 in the paper.
        dimension: Numbers of a capsule's pose.
        child_dimension: Numbers of a child: channels of the autoencoder are grouped by it.
        children: "features": those of the autoencoder, as in the paper. "edges": oriented edges beside them, as many
            directions as a child has numbers (`edges`). The features make the pose, the edges rank the capsules; of no
            effect without competition.
        frames: "moments": each image is brought into the frame of its own moments (`frames`), learned there, and drawn
            back. "none": as it stands.
        autoencoder: Of the first stage.
        energy: The encoder, of the second stage.
        decoder: Of the third stage.
    """

    STAGES: ClassVar[tuple[str, ...]] = ("autoencoder", "capsules", "decoder")

    capsules: Size = 20
    dimension: Size = 16
    child_dimension: Size = 8
    children: Literal["features", "edges"] = "features"
    frames: Literal["none", "moments"] = "none"
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    energy: EnergyConfig = field(default_factory=EnergyConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)

    def __post_init__(self) -> None:
        check(self)
        if self.children == "edges" and self.energy.chain == "persistent":
            raise RecipeError('children = "edges" ranks images; persistent chains are none: set energy.chain = "data"')
        if self.energy.prototypes > 1 and self.children != "edges":
            raise RecipeError(
                f"prototypes = {self.energy.prototypes} ranking capsules for each capsule, but no edges that rank: set"
                ' children = "edges", or prototypes = 1'
            )
        if self.decoder.curvature > self.dimension:
            raise RecipeError(
                f"curvature = {self.decoder.curvature} principal axes of dimension = {self.dimension} numbers; take"
                f" {self.dimension} or fewer"
            )
        if self.energy.slab >= self.dimension:
            raise RecipeError(
                f"slab = {self.energy.slab} of dimension = {self.dimension} numbers; at least one is left for the"
                f" direction: take {self.dimension - 1} or fewer"
            )

    def build(self, spec: ImageSpec) -> PoE:
        from torchcaps.models.poe.model import PoE

        return PoE(self, spec)
