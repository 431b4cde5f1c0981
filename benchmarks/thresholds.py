"""The thresholds of all claims, with their reasons.

They were set on the date below: after the runs of 2026-11-21, an audit of those, and
trials of two to eight seeds of `lambda-sweep` and `provable-features`, but before the
runs that they judge. Where a threshold was changed later, the day and the reason are
stated.

2026-11-26, after a second audit of the runs of 2026-11-23, and before the runs that they
judge: there is now one rule for every task that says when a network is trained
(`PART_OF_GUESSING`). K steps and damping are compared by a margin in units of the task
(`SAME_ERROR`, `SAME_RMSE`); before, the margin was a share of the range of the curves,
which depended on untrained runs. A period counts as like K = 1 if it is a small share of
the training (`SHORT`), because the paper's runs have millions of steps.
"""

import dataclasses
import math


DATE = "2026-11-23"


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Bounds on a statistic: a lower one, an upper one, or both."""

    reason: str
    above: float = -math.inf
    below: float = math.inf

    @property
    def condition(self) -> str:
        if math.isfinite(self.above) and math.isfinite(self.below):
            return f"between {self.above:g} and {self.below:g}"
        return f"> {self.above:g}" if math.isfinite(self.above) else f"< {self.below:g}"


def within(size: float, reason: str) -> Threshold:
    return Threshold(reason, -size, size)


MOST_LEFT_OUT = 0.25
"""If a larger share of the seeds is unfinished or has no value, the mean would be over a
selection, and the claim is not tested."""
MOST_UNFINISHED = 0.5
"""If a larger share of the runs at a point is unfinished, not even their median is that
of a trained network."""
CEILING = 0.98
"""No differences are visible above this accuracy of a network or a probe: nine of 450
test images are wrong, and the noise of one run is three."""
PART_OF_GUESSING = 0.05
"""A network counts as trained once its training loss is at most this share of the least
loss of outputs that are the same for all examples. The rule holds for any task: for the
cross-entropy of ten digits the bound is 0.115, and for the squared error 95 % of the
variance is explained. Runs that are compared at equal training loss must reach
`TRAINED_LOSS` instead."""
TRAINED_LOSS = 0.01
"""Runs that are compared at equal training loss end at this mean cross-entropy: the
network gives the right classes of the training images a probability of 99 %. Runs that do
not reach it are not at equal loss, and do not count (`k-sweep`, `lambda-sweep-cnn`,
`solved-subproblem`)."""
SHORT = 0.1
"""A period is short if it is at most this share of the steps that train the network with
K = 1. The paper's K up to 10^4 are at most a hundredth of its runs."""

# A direction

FALLS = Threshold("only the sign is claimed", below=0)
RISES = Threshold("only the sign is claimed", above=0)

# Accuracies

NO_LESS_ACCURATE = Threshold(
    "1 %, since the paper calls 81.4 % nearly as accurate as 82.3 %", above=-0.01
)
LIKE_FIRST = Threshold("1 %, which the paper calls nearly as accurate", below=0.01)
WITHIN_MNIST = Threshold("the paper states 0.4 %", below=0.004)
SAME_ERROR = within(0.01, "1 %, which the paper calls nearly as accurate")
SAME_RMSE = within(0.1, "a tenth of a decade, which is a factor of 1.26")
SAME_PICTURE = Threshold(
    "a fifth of the 1 % that the paper calls nearly as accurate", below=0.002
)
ADAM_NO_WORSE = Threshold(
    "half of the 1 % by which Adam is better than SGD in the paper", above=-0.005
)
TRIGGER_AS_ACCURATE = Threshold(
    "a trigger that loses more than 1 % is not worth having", above=-0.01
)
NOT_LOST = Threshold(
    "the paper says that accuracy does not fall; 1 % is tolerated", above=-0.01
)
REACHED_BY_TRUNCATED = within(
    0.02, "a quarter of the 9 points between the two in the paper"
)
AS_FAR_BEHIND = Threshold(
    "between half and twice the 9.1 points of the paper", -0.182, -0.0455
)

# Other quantities

ENOUGH_UPDATES = Threshold("the paper states 8 to 12", below=12.5)
TWICE_AS_FAR = Threshold("'much faster' means at least twice as far, in log2", above=1)
FIFTH_OF_THE_WAY = Threshold("'about 20 %' means 10 to 40 %", 0.1, 0.4)
SCALES_ALIKE = within(0.05, "a tenth of the slope for K = 1, which is about -0.5")
HARDLY_ON_K = within(0.05, "less than a factor of 1.5 over four decades of K")
TENTH_IS_STABLE = Threshold(
    "in the paper 10^-5 is stable up to K = 20,000, while 10^-4 diverges above K = 5",
    above=-1,
)
FASTEST_EARLY = Threshold(
    "most of the change in a fifth of the steps, which is four times the later rate",
    above=0.5,
)
SAME_LOSS = within(1e-3, "two solvers that converge may differ by a thousandth")
SAME_BEST = within(0.05, "less than a factor of two if it held over six decades")
HALF_AGREES = Threshold("more often than not", above=0.5)
MOST_OF_IT = Threshold("less than half of the excess remains", above=0)
"""The statistic is an excess minus twice its remainder."""
FOLLOWS = Threshold("the ranks share half of their variance", above=0.7)
GOES_WITH = Threshold("the ranks share a quarter of their variance", above=0.5)
FLOW_AGAINST_RIDGE = Threshold(
    "the theoretical bound for one linear problem: Ali, Kolter and Tibshirani (2019)",
    below=1.6862,
)
TRAINED_RMSE = 0.1
"""For the quintic, whose outputs lie within 4 of zero: a fortieth of that bound."""

FITTED_DIGITS = 0.05
"""The training RMSE for targets of 0 and 1: a tenth of the error of a wrong class."""

SUCCEEDS = Threshold("a fifth of the 50 % that guessing gives", below=0.1)
FAILS = Threshold("twice the error that counts as success", above=0.2)

# Truncated Gauss-Newton. These were set on 2026-11-26, before its runs, but after a trial
# of one seed at four tolerances. After the runs of seeds 0 to 9, the rate was redefined
# as the rate of the last step above rounding, and its median is judged. At first it was
# the mean over all steps after the gradient had fallen to 1e-3 of its first norm, which
# small tolerances reach where the curvature still changes. The judged runs have other
# seeds.
# `schedules`, and one feature update in `kernel-drift`, use thresholds from above, which
# were chosen before their runs, but after a quick run of two seeds.

AT_MOST_BETA = Threshold(
    "the theory of Dembo, Eisenstat and Steihaug (1982), with 5 % tolerance, in log10",
    below=math.log10(1.05),
)
LIKE_BETA = Threshold("proportional, with 10 % tolerance", 0.9, 1.1)
SUPERLINEAR = Threshold("halfway between linear and quadratic convergence", above=1.5)
ORDER_BY_EXPONENT = Threshold(
    "the exponents differ by 0.5, and half of that is tolerated",
    0.25,
    0.75,
)
NO_MORE_PASSES = Threshold("a tenth of a decade, which is a factor of 1.26", below=0.1)

# Optimisers to a stated loss

THIRD_OF_STEPS = Threshold(
    "a third, which is less than twice the published ratio of 54 to 292 steps, in log10",
    below=math.log10(1 / 3),
)
SOONER = Threshold("only the sign is claimed: less time", below=0)

# `gnlin.fit` untuned, and differential equations

FIT_TOLERANCE = 0.02
"""The default counts as equally good if its test accuracy or error is at most this share
worse than Adam's."""
FIT_ENOUGH = 5
"""The number of the seven tasks on which the default must be equally good."""
AS_GOOD_AS_ADAM = Threshold("at most 2 % worse than tuned Adam", below=FIT_TOLERANCE)
ON_MOST_TASKS = Threshold(
    "at least five of the seven tasks", above=(FIT_ENOUGH - 0.5) / 7
)
NONE = Threshold("no run at all", below=0.5)
# The next three were set on 2026-11-27, before the runs that they judge and after trials
# of other networks with other settings.
NEAR_BEST_SETTING = Threshold(
    "at most 1.5 times the best setting's, in log10", below=math.log10(1.5)
)
WORST_OF_TASKS = Threshold("at most 3 times, in log10", below=math.log10(3))
HALF_A_POINT = Threshold("half a point", below=0.005)
PINN_ACCURACY = {
    "poisson-2d": 1e-6,
    "poisson-5d": 1e-3,
    "heat": 1e-5,
    "burgers": 1e-4,
    "conductivity": 1e-4,
}
"""The published accuracies of energy natural gradients, rounded to a power of ten. Where
nothing was published, it is the level that first-order methods are said not to pass."""
PINN_STAYS = 1e-4
"""The level that first-order methods are said not to pass."""


def published(equation: str) -> Threshold:
    """Return the threshold for the logarithm of a relative error."""
    reason = "the published accuracy of energy natural gradients, as a power of ten"
    return Threshold(reason, below=math.log10(PINN_ACCURACY[equation]))


NOT_PASSED = Threshold(
    "the level that first-order methods are said not to pass",
    above=math.log10(PINN_STAYS),
)

# Equations to many digits. These were set on 2026-11-26, after the run of the first seed
# and before the runs of the others.

EQUATION_ACCURACY = {
    "heat": 1e-6,
    "poisson-scales": 1e-4,
    "helmholtz": 1e-5,
    "kovasznay": 1e-5,
    "cavity": 1e-1,
    "burgers-periodic": 1e-5,
    "wave": 1e-5,
    "kdv": 1e-3,
    "ks": 1e-2,
    "harmonic-10d": 1e-5,
}
"""The power of ten above three times the first seed's error, and two digits for `ks`,
which the first seed does not solve."""


def solved_to(equation: str) -> Threshold:
    """Return the threshold for the logarithm of a relative error."""
    reason = "two correct digits"
    if equation != "ks":
        reason = "the power of ten above three times the error of the first seed"
    return Threshold(reason, below=math.log10(EQUATION_ACCURACY[equation]))


# These were set on 2026-11-27, after runs of smaller networks on eight equations and
# before the runs that they judge.

ESTIMATED = Threshold("a factor of 2, in log10", below=math.log10(2))
CORRECTED = Threshold("a third, in log10", below=math.log10(1 / 3))

# The ratio of the longest step. These were set on 2026-11-25, before its runs, except for
# ten of them, at ratios of 0.075 and 0.25, which showed how long they take. The rule was
# changed after the first runs. The last bound was set then, before any runs on Burgers'
# equation were seen.

NEAR_BEST_RATIO = Threshold("a factor of ten, in log10", below=1)
NO_ONE_RATIO = Threshold(
    "on some problem each ratio has twice the loss of the best one, in log10",
    above=math.log10(2),
)
TENTH_OF_STEPS = Threshold("a tenth of the steps, in log10", below=math.log10(1.1))
TENTH_OF_LOSS = Threshold("a factor of ten, in log10", below=-1)
