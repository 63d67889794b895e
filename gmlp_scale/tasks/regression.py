"""Sentence pairs with a number instead of a class: GLUE's STS-B."""

from dataclasses import dataclass

import numpy as np

from gmlp_scale.tasks.classification import ClassificationTask


@dataclass(frozen=True)
class RegressionTask(ClassificationTask):
    """A ClassificationTask with one class, whose logit is the number. The loss is the mean squared error."""

    labels: tuple[str, ...] = ()
    scale: tuple[float, float] = (0.0, 5.0)
    """The least label and the greatest."""
    label_dtype = np.float32

    def label(self, value: object) -> float | None:
        """The number that a file gives; None if it is none, or outside the scale."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None
        return number if self.scale[0] <= number <= self.scale[1] else None

    @property
    def possible_labels(self) -> str:
        return f"{self.scale[0]:g} to {self.scale[1]:g}"

    def predictions(self, logits_RC: np.ndarray) -> np.ndarray:
        return logits_RC[:, 0]

    def written(self, prediction: float) -> str:
        return f"{prediction:.3f}"
