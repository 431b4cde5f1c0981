"""Classes given by the sign of a polynomial of a few of many inputs.

A method that learns no features has to learn all functions of a degree k at once, and
there are `d choose k` of them. A method that finds the relevant directions has to find d
numbers for each. The degree is the least of any polynomial with the same signs. For the
staircase it is 2, since x1 + x1 x2 - x1 x3 has the same sign everywhere.

??? cite "References"

    - B. Ghorbani, S. Mei, T. Misiakiewicz and A. Montanari, *Linearized Two-Layers Neural
      Networks in High Dimension*, Annals of Statistics 49, 2021.
    - E. Abbe, E. Boix-Adsera and T. Misiakiewicz, *The Merged-Staircase Property*, 2022.
    - B. Barak et al., *Hidden Progress in Deep Learning: SGD Learns Parities Near the
      Computational Limit*, 2022.
    - G. Ben Arous, R. Gheissari and A. Jagannath, *Online Stochastic Gradient Descent on
      Non-Convex Losses from High-Dimensional Inference*, 2021.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


Inputs = Float[ndarray, "n d"]
Labelled = tuple[Inputs, Int[ndarray, " n"]]
NUM_INPUTS = 30
NUM_VALIDATION, NUM_TEST = 500, 2000


@dataclasses.dataclass(frozen=True)
class Teacher:
    title: str
    degree: int
    inputs: Callable[[np.random.Generator, tuple[int, int]], Inputs]
    polynomial: Callable[[Inputs], Float[ndarray, " n"]]

    @property
    def num_functions(self) -> int:
        """Return the number of functions of this degree of the inputs."""
        return math.comb(NUM_INPUTS, self.degree)

    def draw(self, num_train: int, seed: int) -> tuple[Labelled, Labelled, Labelled]:
        """Draw training, validation and test data."""
        rng = np.random.default_rng(seed)

        def labelled(number: int) -> Labelled:
            x = self.inputs(rng, (number, NUM_INPUTS))
            return x, (self.polynomial(x) > 0).astype(int)

        # Draw the training data last, so that their number does not change the others.
        test, validation = labelled(NUM_TEST), labelled(NUM_VALIDATION)
        return labelled(num_train), validation, test


def _signs(rng: np.random.Generator, shape: tuple[int, int]) -> Inputs:
    return rng.choice([-1.0, 1.0], shape)


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Inputs:
    return rng.standard_normal(shape)


def _staircase(x: Inputs) -> Float[ndarray, " n"]:
    return np.cumprod(x[:, :3], axis=1).sum(axis=1)


def _hermite(x: Inputs) -> Float[ndarray, " n"]:
    return x[:, 0] ** 3 - 3 * x[:, 0]


TEACHERS = {
    "parity": Teacher(
        "Parity of 3 of 30 signs", 3, _signs, lambda x: np.prod(x[:, :3], axis=1)
    ),
    "staircase": Teacher("Staircase of 3 of 30 signs", 2, _signs, _staircase),
    "single-index": Teacher("Cubic of 1 of 30 directions", 3, _normal, _hermite),
}
