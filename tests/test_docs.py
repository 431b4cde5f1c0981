"""Examples in the README, the documentation and the docstrings run, and all names are
documented."""

import inspect
import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import optimistix as optx
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import sklearn.datasets

import gnlin


ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in page.read_text()
]


def _python_blocks(text: str) -> list[str]:
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    return [inspect.cleandoc("\n" + block) for _, block in blocks]


def _is_near(fit, true) -> bool:
    """Return whether a fit is within three standard errors of the truth."""
    return all(
        abs(fit.parameters[name] - true[name]) < 3 * fit.standard_errors[name]
        for name in true
    )


def _is_scipys(fit, curve, x, y) -> bool:
    start, unravel = jax.flatten_util.ravel_pytree(fit.parameters)
    residuals = jax.jit(lambda p: (curve(unravel(p), x) - y).ravel())
    jacobian = jax.jit(jax.jacfwd(residuals))
    found = scipy.optimize.least_squares(residuals, 1.1 * start, jacobian, x_scale="jac")
    return np.allclose(start, found.x, rtol=1e-5)


def _is_of_series(n) -> bool:
    """Return whether a filter's variances are those of SciPy, and their errors those of
    a Hessian by differences."""
    loss = jax.jit(lambda q: n["negative"](jnp.asarray(q)))
    slope, h = jax.jit(jax.grad(loss)), 1e-4 * np.eye(2)
    found = scipy.optimize.minimize(loss, [0.0, 0.0], jac=slope, tol=1e-8)
    hessian = [(slope(found.x + d) - slope(found.x - d)) / 2e-4 for d in h]
    errors = np.sqrt(np.diagonal(np.linalg.inv(hessian)))
    flat = lambda tree: jax.flatten_util.ravel_pytree(tree)[0]
    return (
        np.allclose(flat(n["of_series"].model), found.x, atol=1e-5)
        and np.allclose(flat(n["observed"]), errors, rtol=1e-5)
        and np.allclose(flat(n["its_errors"]), errors, rtol=0.05)
    )


def _is_root(u) -> bool:
    """Return whether a fraction is the smaller root of a quadratic equation."""
    fraction = 2e4 / (101325 + np.sqrt(101325**2 - 4 * 47000 * 1e4))
    return np.allclose([u["x"], u["p"] / 101325], fraction, rtol=1e-12, atol=0)


def _covers_counts(n) -> bool:
    """Return whether new counts are in their intervals as often as these promise."""
    mean = 10 * n["decay"](n["true"], n["new_t"])
    new = np.random.default_rng(0).poisson(mean, size=(10_000, mean.size))
    inside = np.mean((n["least"] <= new) & (new <= n["most"]))
    narrow = scipy.stats.poisson.interval(0.95, mean)
    width = np.sum(n["most"] - n["least"])
    return 0.94 < inside < 0.995 and width > 1.05 * np.sum(narrow[1] - narrow[0])


def _is_information(n) -> bool:
    """Return whether a proportional error has the errors of Fisher's information."""
    p = n["proportional"].model[1]
    mean = lambda q: n["decay"](dict(zip(p, q, strict=True)), n["t"])
    q = jnp.array([p[name] for name in p])
    relative = jax.jacfwd(mean)(q) / mean(q)[:, None]
    of_sigma = relative + np.array([name == "log_part" for name in p])
    part = np.exp(p["log_part"])
    information = relative.T @ relative / part**2 + 2 * of_sigma.T @ of_sigma
    errors = np.sqrt(np.diagonal(np.linalg.inv(information)))
    found = [n["of_parts"].standard_errors[name] for name in p]
    return np.allclose(found, errors, rtol=1e-5) and abs(part - 0.1) < 0.03


def _is_lstd(n) -> bool:
    """Return whether the weights are those of least-squares temporal differences."""
    s, s2, r = (np.asarray(n["moves"][name], float) for name in ("s", "s2", "r"))
    exact = np.linalg.solve(s.T @ (s - 0.9 * s2), s.T @ r)
    found = n["by_td"].model, n["weights"]
    return all(np.allclose(weights, exact, atol=2e-4) for weights in found)


def _is_natural_gradient(n) -> bool:
    """Return whether a step is that by a dense Fisher matrix."""
    flat, unravel = jax.flatten_util.ravel_pytree(n["parts"][1])
    of_one = lambda y, state: n["of_one"](unravel(y), state)
    rows = jax.vmap(jax.jacobian(of_one), (None, 0))(flat, n["states"])
    p, size = np.asarray(n["p"], float), len(n["states"])
    own = np.einsum("nc,cd->cnd", p, np.eye(3)) - np.einsum("nc,nd->cnd", p, p)
    fisher = np.einsum("nci,cnd,ndj->ij", rows, own, rows) / size
    scores = n["advantages"][:, None] * (p - np.eye(3)[n["actions"]])
    gradient = np.einsum("nci,nc->i", rows, scores) / size
    exact = -np.linalg.solve(fisher + 0.01 * np.eye(flat.size), gradient)
    step, _ = jax.flatten_util.ravel_pytree(n["step"])
    return np.allclose(step, exact, atol=1e-4 * np.abs(exact).max())


def _is_kaufmans(n) -> bool:
    """Return whether the errors are those of variable projection by NumPy."""
    rates = np.exp(np.asarray(n["separable"].parameters["log_rates"]))
    basis = np.exp(-rates * n["delays"][:, None])
    linear, (rest, *_) = np.linalg.lstsq(basis, n["measured"])[0], np.linalg.qr(basis)
    slopes = -rates * n["delays"][:, None] * basis
    columns = [np.outer(s, a) for s, a in zip(slopes.T, linear, strict=True)]
    jacobian = np.stack([(c - rest @ (rest.T @ c)).ravel() for c in columns], axis=1)
    variance = np.sum((n["measured"] - basis @ linear) ** 2) / (1500 - 62)
    errors = np.sqrt(np.diagonal(np.linalg.inv(jacobian.T @ jacobian) * variance))
    by_groups = n["known_rates"].standard_errors["log_rates"]
    return all(
        np.allclose(found, errors, rtol=1e-5)
        for found in (n["separable"].standard_errors["log_rates"], by_groups)
    )


def _is_nelders(n) -> bool:
    """Return whether an epidemic has the likelihood that SciPy finds."""
    names = ("contact", "recovery", "log_dispersion")
    means = jax.jit(lambda q: jnp.exp(n["log_cases"](dict(zip(names, q, strict=True)))))

    def loss(q):
        size, mean = np.exp(-q[2]), np.asarray(means(q))
        of_each = scipy.stats.nbinom.logpmf(n["reported"], size, size / (size + mean))
        return -np.sum(of_each)

    first = np.array([n["epidemic"].model[name] for name in names])
    found = scipy.optimize.minimize(loss, first + 0.02, method="Nelder-Mead")
    return loss(first) < found.fun + 1e-3


def _difference(of_data, data, entry, size=1e-4) -> float:
    ends = [float(of_data(data.at[entry].add(s * size))) for s in (1, -1)]
    return (ends[0] - ends[1]) / (2 * size)


def _robertson(n) -> np.ndarray:
    """Solve Robertson's equations by SciPy's implicit solver."""
    slow, fast, back = (np.exp(n["true_logs"][name]) for name in ("slow", "fast", "back"))

    def rates(t, y):
        a, b, c = y
        terms = slow * a, fast * b**2, back * b * c
        return [terms[2] - terms[0], terms[0] - terms[2] - terms[1], terms[1]]

    when = np.asarray(n["when"])
    options = {"method": "Radau", "t_eval": when, "rtol": 1e-9, "atol": 1e-13}
    solved = scipy.integrate.solve_ivp(rates, (0, when[-1]), [1, 0, 0], **options)
    return solved.y.T


def _doses(p, x) -> np.ndarray:
    """Return the closed form, a sum over the doses."""
    slow, fast = p["clearance"] / p["volume"], p["absorption"]
    since = np.subtract.outer(x["times"], x["doses"]["time"])
    height = x["doses"]["size"] * fast / (p["volume"] * (fast - slow))
    since = np.maximum(since, 0)
    return np.sum(height * (np.exp(-slow * since) - np.exp(-fast * since)), axis=1)


def _mixed(n) -> float:
    """Return the log-likelihood of random intercepts, by Gauss-Hermite quadrature."""
    (*shared, log_spread), trials = n["best"].x, jax.tree.map(np.asarray, n["trials"])
    nodes, weights = np.polynomial.hermite.hermgauss(60)
    odds = shared[0] + shared[1] * trials["dose"][:, None]
    chance = scipy.special.expit(odds + 2**0.5 * np.exp(log_spread) * nodes)
    logs = scipy.stats.binom(5, chance).logpmf(np.asarray(n["successes"])[:, None])
    of_groups = np.exp(logs.reshape(20, 6, 60).sum(axis=1)) @ weights / np.pi**0.5
    return np.sum(np.log(of_groups))


def _accuracy(model, inputs, labels):
    return gnlin.losses.accuracy(jax.vmap(model)(inputs), labels)


# Conditions on the results of each page's examples, by the variables of the page.
REACHED = {
    "README.md": lambda n: (
        n["solution"].loss < 1e-4 and np.allclose(n["fit"].value, [2, -0.5], atol=1e-4)
    ),
    "docs/index.md": lambda n: (
        abs(n["fit"].parameters["rate"] - 1.3) < 0.01
        and n["error"] < 1e-6
        and _accuracy(n["result"].model, n["inputs"], n["labels"]) > 0.98
        and n["kernel"].shape == (20, 2, 20, 2)
        and n["predicted"].shape == (3, 5, 2)
        and n["linearised"].loss < 1e-3 * n["linearised"].history.loss[0]
        and np.all(n["losses"] < n["linearised"].history.loss[0])
    ),
    "docs/idea.md": lambda n: (
        np.isclose(n["damping"], 1) and np.isclose(n["period"], 10**5)
    ),
    "docs/choosing.md": lambda n: (
        0 < n["largest_stable_learning_rate"] < 1
        and _is_root(n["solved"].model)
        and _is_root(n["same"].value)
        and _is_root(n["root"])
        and _is_lstd(n)
    ),
    "docs/default-solver.md": lambda n: n["solver"].damping.ratio == 0.075,
    "docs/endings.md": lambda n: n["solution"].result == optx.RESULTS.successful,
    "docs/scaling.md": lambda n: (
        n["solution"].loss < 0.1 * n["solution"].history.loss[0]
        and n["losses"].min() < 0.1 * n["solution"].history.loss[0]
    ),
    "docs/own-solver.md": lambda n: (
        abs(n["share"] - 0.9) < 0.02
        and all(
            n[name].loss < 0.1 * n[name].history.loss[0]
            for name in ("solution", "robust", "preconditioned", "by_own")
        )
        and abs(n["flow"].loss / 600 - n["entropy"]) < 0.15
        and n["mixture"].reason.endswith("converged")
        and _is_natural_gradient(n)
    ),
    "docs/own-task.md": lambda n: (
        [len(y) for _, y in n["data"](0)] == [40, 50, 88]
        and n["model"](jax.random.key(0))(n["data"](0)[0][0][0]).shape == (3,)
    ),
    "docs/fits.md": lambda n: (
        abs(n["fit"].parameters["rate"] - 1.3) < 3 * n["fit"].standard_errors["rate"]
        and n["bounded"].parameters["background"] == 0.3
        and n["interval"].low["rate"] < 1.3 < n["interval"].high["rate"]
        and np.isclose(
            n["error"] * n["fit"].parameters["rate"] ** 2,
            np.log(2) * n["fit"].standard_errors["rate"],
        )
        and str(n["saved"]) == str(n["fit"])
        and abs(n["best"].parameters["frequency"] - 5) < 0.01
        and "6 of 64 starts reached the best loss, 0.18116" in str(n["best"])
        and abs(n["shared"].parameters["rate"] - 1.25) < 0.01
        and n["robust"].outliers().tolist() == [8, 30]
        and np.isnan(n["cleaned"][3, 4])
        and str(n["effect"].confidence_intervals(names="slope")).startswith("slope  ")
        and abs(n["poisson"].parameters["rate"] - 1.3)
        < 3 * n["poisson"].standard_errors["rate"]
        and abs(n["dispersion"].value - 0.5) < 2 * n["dispersion"].standard_error
        and _covers_counts(n)
        and _is_information(n)
        and _is_of_series(n)
        and _is_kaufmans(n)
        and _is_near(n["binding"], {"protein": 2.0, "k": 0.5})
        and abs(n["fits"].parameters["rate"].mean() - n["fit"].parameters["rate"]) < 0.1
        and abs(n["orthogonal"].parameters["rate"] - n["fit"].parameters["rate"]) < 0.1
        and abs(n["large"].parameters["rate"] - 1.3) < 0.01
        and abs(n["same"].chi_squared / n["large"].chi_squared - 1) < 1e-9
        and np.isclose(
            n["slope"], (n["rate_of"](0.101) - n["rate_of"](0.099)) / 0.002, rtol=1e-4
        )
    ),
    "docs/groups.md": lambda n: (
        n["solution"].loss < 1e-5 * n["solution"].history.loss[0]
        and np.mean(n["result"].history.loss[-3:]) < 0.5 * n["result"].history.loss[0]
        and n["kernel"].shape == (10, 50)
        and n["between"].shape == (40, 20)
        and n["contrasted"].loss < 0.7 * n["contrasted"].history.loss[0]
        and n["on_batches"].history.loss[-1] < 0.6 * n["on_batches"].history.loss[0]
        and n["trained"].loss < 0.1 * n["trained"].history.loss[0]
        and n["classified"].history.loss[-1] < 0.2
        and abs(n["found"].value["rate"] - 1.3) < 0.05
        and np.allclose(  # SciPy's
            list(n["known"].standard_errors.values()), [0.02832245, 0.02689179], rtol=1e-4
        )
        and abs(n["half_life"] - np.log(2) / 1.3) < 2 * n["error"]
    ),
    "docs/graphs.md": lambda n: (
        np.allclose(n["poses"][200], [0, 0, 2 * np.pi], atol=1e-6)
        and n["solved"].loss < 1e-6 * n["solved"].history.loss[0]
        and n["sparsity"].num_colors <= 14
        and np.all(np.linalg.eigvalsh(n["block"]) > 0)
        and 0.05 < n["error"] < 0.5
        and np.allclose(n["turned"][:, 2:], n["poses"][:, :2], atol=1e-6)
        and np.allclose(n["found"], n["poses"], atol=1e-6)
    ),
    "docs/images.md": lambda n: (
        n["error"](n["restored"].model) < 0.5 * n["error"](n["seen"])
        and n["error"](n["found"].model) < 1e-9
    ),
    "docs/differential-equations.md": lambda n: (
        n["error"](n["square"].model, n["in_square"]) < 1e-9
        and n["error"](n["solution"].model, n["exact"]) < 1e-6
        and np.allclose(n["before"] + n["change"], n["wanted"], rtol=0, atol=1e-8)
        and np.abs(n["before"] - n["wanted"]).max() > 1e-7
        and np.linalg.norm(n["values"] - n["true"]) < 1e-4 * np.linalg.norm(n["true"])
        and n["error"](n["result"].model, n["exact"]) < 1e-4
        and abs(n["found"].model["conductivity"] - 0.25) < 0.01
        and n["error"](n["found"].model["u"], n["exact"]) < 0.02
        and Path("heat.png").stat().st_size > 10_000
    ),
    "docs/from-deepxde.md": lambda n: n["error"] < 1e-6,
    "docs/from-optimistix.md": lambda n: (
        np.allclose(n["new"].value, n["old"].value, rtol=1e-6)
        and np.allclose(n["bounded"].value, n["scipys"].x, atol=1e-6)
    ),
    "docs/neural-tangents.md": lambda n: (
        n["losses"][-1] < 1e-9 < n["losses"][0]
        and n["trace"](n["x_train"]).shape == (20, 20)
        and n["ensemble"].shape == (8, 3, 5, 2)
        and np.allclose(n["after"](n["x_train"]), n["y_train"], atol=0.05)
    ),
    "docs/ode-parameters.md": lambda n: (
        abs(n["fit"].parameters["growth"] - 0.1) < 3 * n["fit"].standard_errors["growth"]
        and np.isclose(n["fit"].parameters["birth"], 1.165832, rtol=1e-4)
        and n["lin"].shape == (40, 6)
        and _is_scipys(n["epidemic"], n["cities"], n["days"], n["counted"])
        and n["interval"].low["contact"] < 0.5 < n["interval"].high["contact"]
        and np.isclose(n["best"].losses[0], n["epidemic"].chi_squared / 2)
        and (
            "influence" not in n
            or np.isclose(
                n["influence"][1, 5],
                _difference(n["contact"], n["counted"], (1, 5)),
                rtol=1e-2,
            )
        )
        and _is_near(n["stiff"], n["true_logs"])
        and np.allclose(n["concentrations"](n["true_logs"], n["when"]), _robertson(n))
    ),
    "docs/ode-further.md": lambda n: (
        np.allclose(n["exact"], _doses(n["true"], n["x"]), rtol=1e-5)
        and _is_near(n["doses"], n["true"])
        and np.all(np.abs(n["together"].model["shared"] - n["mean"]) < 3 * n["of_shared"])
        and n["together"].reason.endswith("converged")
        and _is_nelders(n)
        and np.std(n["together"].model["own"] - n["truth"]["own"]) < 0.3 * n["SPREAD"]
        and np.linalg.norm(n["found"] - n["wanted"]) < 0.05 * np.linalg.norm(n["wanted"])
        and np.all(np.abs(n["state"]["rates"] / n["true_rates"] - 1) < 0.02)
        and abs(n["shooting"].loss / 600 - 1) < 0.15
        and np.linalg.norm(n["followed"] - n["paths"]) < 1e-3 * np.linalg.norm(n["paths"])
    ),
    "docs/uncertainty.md": lambda n: (
        abs(n["posterior"].noise - 0.15) < 0.05
        and np.mean(
            (n["low"] < jnp.sin(4 * n["new"])) & (jnp.sin(4 * n["new"]) < n["high"])
        )
        > 0.5
        and n["curve"].max() <= n["posterior"].log_evidence() + 1e-3
        and n["scores"][1.0] > n["scores"][0.1]
        and n["log_loss"] < 0.25
        and abs(_mixed(n) + n["best"].fun) < 0.2
        and n["ece"] < 0.4
        and all(
            np.mean(np.argmax(n[name].probabilities(n["test"]), axis=1) == n["labels"])
            > 0.7
            for name in ("of_last", "factored", "of_rank")
        )
    ),
    "docs/training.md": lambda n: (
        n["accuracy"] > 0.9
        and n["again"] > 0.9
        and n["several"].history["accuracy"][-1] > 0.9
        and n["several"].history["loss/ink"][-1] < 0.01
        and np.mean(n["outputs"].argmax(1) == n["labels"][1347:]) > 0.85
        and np.var(n["predicted"] - n["price"]) < 1e-3 * np.var(n["price"])
        and np.std(jax.vmap(n["filled"])(n["x"])[::3, 0] - n["standardised"][::3]) < 0.2
        and n["meta"]["step"] == len(n["history"]) == 20
        and n["meta"]["settings"]["columns"].startswith("step, epoch, loss")
    ),
}


# These take up to half a minute each, and `.ci/run` runs them; the README comes first.
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_reaches_its_result(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some draw a picture
    blocks = _python_blocks((ROOT / page).read_text())
    assert blocks, page
    module = types.ModuleType("page")  # so that its functions can be imported
    monkeypatch.setitem(sys.modules, "page", module)
    namespace = vars(module)
    for block in blocks:
        # Before, JAX cannot differentiate the linearisation of a `while` loop.
        if "influence" not in block or jax.__version_info__ >= (0, 10, 2):
            exec(compile(block, page, "exec"), namespace)
    assert REACHED[page](namespace)


@pytest.fixture(autouse=True)
def as_a_reader():
    """Allow promotion, on which user code may rely."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _public() -> list[tuple[str, object]]:
    top = [(f"gnlin.{n}", getattr(gnlin, n)) for n in vars(gnlin) if n[0] != "_"]
    rooms = [thing for _, thing in top if inspect.ismodule(thing)]
    named = [(f"{r.__name__}.{n}", getattr(r, n)) for r in rooms for n in r.__all__]
    things = {id(thing): (name, thing) for name, thing in [*named, *top]}
    return [(n, thing) for n, thing in things.values() if not inspect.ismodule(thing)]


def _docstrings() -> list[tuple[str, str]]:
    found = []
    for name, thing in _public():
        found.append((name, inspect.getdoc(thing) or ""))
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if member[0] != "_" and inspect.isfunction(value):
                    found.append(
                        (f"{name}.{member}", inspect.cleandoc(value.__doc__ or ""))
                    )
    return [(name, doc) for name, doc in found if "```python" in doc]


@pytest.fixture
def namespace():
    """Return the names that a docstring's example may assume."""
    x = jnp.linspace(0.1, 1.0, 5)
    inputs = jax.random.normal(jax.random.key(1), (6, 3))
    w = jnp.array([0.1, -0.2, 0.3])
    targets = jnp.tanh(inputs @ jnp.ones(3))
    matrix = jnp.diag(jnp.arange(1.0, 5.0))
    residuals = lambda y, args: jnp.tanh(args[0] @ y) - args[1]
    return {
        "Callable": Callable,
        "eqx": eqx,
        "gnlin": gnlin,
        "jax": jax,
        "jnp": jnp,
        "lx": lx,
        "math": math,
        "np": np,
        "optax": optax,
        "optx": optx,
        "sklearn": sklearn,
        "x": x,
        "w": w,
        "inputs": inputs,
        "targets": targets,
        "residuals": residuals,
        "fn": residuals,
        "f": lambda y, x: jnp.tanh(x @ y),
        "test": inputs[:2] + 0.1,
        "y0": w,
        "y": w,
        "args": (inputs, targets),
        "model": eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(2)),
        "operator": lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag),
        "b": jnp.ones(4),
        "solver": gnlin.IterativeLinearisation(100, 0.01),
    }


def _has_fallen(solution):
    return solution.loss < 0.1 * solution.history.loss[0]


def _is_found(solution):
    return np.allclose(solution.value, 1.0, atol=1e-6)


# Conditions on the results of the docstrings' examples that compute something.
REACHED_BY_DOCSTRING = {
    "gnlin.solve": lambda n: _has_fallen(n["solution"]),
    "gnlin.fit": lambda n: n["result"].history["validation_accuracy"][-1] > 0.9,
    "gnlin.DampedGaussNewton": lambda n: _has_fallen(n["solution"]),
    "gnlin.IterativeLinearisation": lambda n: _has_fallen(n["solution"]),
    "gnlin.GaussNewton": lambda n: _is_found(n["solution"]),
    "gnlin.LevenbergMarquardt": lambda n: _is_found(n["solution"]),
    "gnlin.methods.ConjugateGradients": lambda n: np.allclose(
        n["operator"].mv(n["solution"].value), n["b"], atol=2e-3
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "doc"), _docstrings(), ids=lambda x: x.split()[0])
def test_docstring_reaches_its_result(name, doc, namespace):
    if name in ("gnlin.DampedGaussNewton", "gnlin.IterativeLinearisation"):
        namespace["model"] = eqx.nn.MLP(1, 1, 4, 1, key=jax.random.key(0))
        namespace["x"] = jnp.linspace(-1, 1, 5)[:, None]
        namespace["y"] = namespace["x"] ** 2
    if name == "gnlin.History":
        namespace |= _trained()
    for block in _python_blocks(doc):
        exec(compile(block, name, "exec"), namespace)
    assert REACHED_BY_DOCSTRING.get(name, lambda n: True)(namespace)


def _trained() -> dict:
    images = jax.random.normal(jax.random.key(0), (64, 4))
    labels = (images[:, 0] > 0).astype(int)
    model = eqx.nn.MLP(4, 2, 5, 1, key=jax.random.key(1))
    result = gnlin.fit(
        model,
        (images, labels),
        gnlin.DampedGaussNewton(1.0),
        loss=gnlin.SoftmaxCrossEntropy(),
        steps=1,
    )
    test = {"test_images": images, "test_labels": labels}
    return {"images": images, "labels": labels, "model": model, "solution": result} | test


def test_every_public_name_is_in_the_reference():
    pages = "\n".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md"))
    missing = []
    for name, _ in _public():
        short = name.rpartition(".")[2]
        listed = re.search(rf"::: {re.escape(name)}$", pages, re.MULTILINE)
        listed = listed or re.search(rf"^ +- {re.escape(short)}$", pages, re.MULTILINE)
        if not listed:
            missing.append(name)
    assert not missing


def test_the_api_pages_name_only_existing_objects():
    pages = "\n".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    for name in re.findall(r"\[`(gnlin\.[\w.]+)`\]\[\]", pages):
        thing = gnlin
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)


@pytest.mark.parametrize("command", [r"-m pytest -n 2", r"-m benchmarks"])
def test_the_readme_has_one_command_each(command):
    readme = (ROOT / "README.md").read_text()
    found = re.findall(rf"^python3 -m venv .* {command}$", readme, re.MULTILINE)
    assert len(found) == 1
