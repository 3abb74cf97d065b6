"""What any system can be asked: classification, probes, clustering, sample quality, viewpoints, attacks, results."""

from torchcaps.evaluate.classification import class_scores, classification
from torchcaps.evaluate.results import Result, read_result, write_result

__all__ = ["Result", "class_scores", "classification", "read_result", "write_result"]
