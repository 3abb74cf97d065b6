"""Attacks on classifiers: how little must an image in [0, 1] change, in its largest pixel, to be taken for another?

gradients  FGSM (Goodfellow 2014), also targeted; BIM (Kurakin 2016); PGD (Madry 2018)
square     Square (Andriushchenko 2020), which asks for no gradient
curves     accuracy against epsilon, also of images made on another model (transfer), and what is masked
"""

from torchcaps.evaluate.attacks.curves import EPSILONS, AttackCurves, GradientMasking, attack_curves, find_masking
from torchcaps.evaluate.attacks.gradients import bim, cross_entropy, fgsm, gradient, logits_of, pgd, training_loss
from torchcaps.evaluate.attacks.picture import curve_plot
from torchcaps.evaluate.attacks.registry import ATTACKS
from torchcaps.evaluate.attacks.square import margin, square

__all__ = [
    "ATTACKS",
    "EPSILONS",
    "AttackCurves",
    "GradientMasking",
    "attack_curves",
    "bim",
    "cross_entropy",
    "curve_plot",
    "fgsm",
    "find_masking",
    "gradient",
    "logits_of",
    "margin",
    "pgd",
    "square",
    "training_loss",
]
