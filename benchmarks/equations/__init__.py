"""Differential equations with known solutions, as groups of residuals of a network."""

from . import burgers, dispersion, flow, heat, poisson, waves
from ._base import along, Equation, Function, grid, Groups, laplacian, Point
from ._slabs import InSlabs


__all__ = [
    "EQUATIONS",
    "Equation",
    "Function",
    "Groups",
    "InSlabs",
    "Point",
    "along",
    "grid",
    "laplacian",
]

EQUATIONS: dict[str, Equation] = {
    "poisson-2d": poisson.IN_A_SQUARE,
    "poisson-5d": poisson.IN_A_CUBE,
    "heat": heat.COOLING,
    "burgers": burgers.BETWEEN_WALLS,
    "conductivity": heat.CONDUCTIVITY_UNKNOWN,
    "poisson-scales": poisson.OF_FOUR_SCALES,
    "harmonic-10d": poisson.HARMONIC,
    "helmholtz": waves.HELMHOLTZ,
    "wave": waves.WAVE,
    "burgers-periodic": burgers.PERIODIC,
    "kdv": dispersion.KORTEWEG_DE_VRIES,
    "ks": dispersion.KURAMOTO_SIVASHINSKY,
    "kovasznay": flow.KOVASZNAY,
    "cavity": flow.CAVITY,
}
