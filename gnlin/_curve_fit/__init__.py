"""Curve fitting with standard errors."""

from ._curve_fit import curve_fit as curve_fit
from ._result import CurveFit as CurveFit
