"""Names and messages of the endings of a run."""

import optimistix as optx


LAST_FINITE = "the model is the last finite one"
AT_START = "the model is still that of the start"
RESULT_NAMES = (
    "successful",
    "nonlinear_max_steps_reached",
    "nonfinite",
    "nonlinear_divergence",
    "stagnation",
)
# The names of the endings that are no failure.
WELL = "successful", "nonlinear_max_steps_reached"


def result_name(result: optx.RESULTS) -> str:
    """Return the name in `optimistix.RESULTS`, whose message for success is empty."""
    for name in RESULT_NAMES:
        # Unlike the results themselves, messages are compared without a compilation.
        if optx.RESULTS[result] == optx.RESULTS[getattr(optx.RESULTS, name)]:
            return name
    return "failed"


def why_it_ended(result: optx.RESULTS, factor: float | None = None) -> str:
    """Return what went wrong in a run that failed, which model is returned, and what to
    do.

    - `factor`: the multiple of the first loss that the loss has stayed above, if it has.
    """
    last = LAST_FINITE
    name = result_name(result)
    if name == "nonfinite":
        return f"a number is not finite (inf or NaN); {last}."
    if name == "stagnation":
        return (
            "it stands still without having converged: steps are within `rtol` and "
            "`atol`, or no finite step lowers the loss, but the gradient is not small; "
            f"{last}. Use a smooth function, double precision, another start, or "
            "another value of a fixed damping or learning rate."
        )
    if name == "nonlinear_divergence":
        what = f"the next step is too long; {last}"
        if factor is not None:
            what = f"the loss has stayed above {factor:g} times its start"
            what += "; the model is the best so far"
        return (
            f"it diverged: {what}. Use more damping, larger batches, a smaller learning "
            "rate or a `search`, or `gnlin.LevenbergMarquardt()` in place of another "
            "solver."
        )
    said = " ".join(optx.RESULTS[result].split()).split(". ")[0]
    return (
        f"{said}; {last}. Use more damping, double precision, or another method, such as "
        '`method="svd"`.'
    )
