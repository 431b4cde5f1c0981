"""Tasks of the user's own that no experiment could run are refused in a sentence."""

import dataclasses
import re

import pytest
from test_benchmarks_own_task import settings_of, TASK, written

from benchmarks import training
from benchmarks.__main__ import main
from benchmarks._options import Refusal
from benchmarks.experiment import Place
from benchmarks.experiments import k_sweep, k_vs_lambda


@pytest.fixture
def task(tmp_path):
    return written(tmp_path / "my_task.py", TASK)


OF_DATA = "`data.seed.` of the task .* must return three pairs of inputs and targets"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def model", "def network", "has no function 'model'"),
        ("import equinox", "import no_such_module", "cannot be run .ModuleNotFoundError"),
        ('"learning_rate"', '"rate"', "sets 'rate', but this experiment has no"),
        ("0.02", '"fast"', "sets 'learning_rate' to 'fast', but it must be a number"),
        (
            '{"learning_rate": 0.02}',
            "3",
            "`settings` of the task .* must be a dictionary",
        ),
        ("MLP(3", "MLP(4", "fails on examples of shape .3,. .TypeError"),
        ("MLP(3, 2", "MLP(3, 1", "returns one number,.* two for two classes"),
        ("astype(int)", "astype(int) + 1", "has 2 outputs, but the classes are 1 to 2"),
        ("y = (x[:, 0] > 0)", "y = -(x[:, 0] > 0)", "the classes are -1 to 0"),
        ("astype(int)", "astype(int)[:, None]", "classes must have shape ..,"),
        ("astype(int)", "astype(float)", "outputs of the task .* have shape .2,., but"),
        ("rng.standard", "1 / 0 * rng.standard", "`data.0.` of the task .*Zero"),
        ("y = (x", "x[3] = np.nan; y = (x", "are not finite at seed 0"),
        (
            "(x[:30], y[:30])",
            "(x[:30], y[:29])",
            f"{OF_DATA}.* 30 training inputs and",
        ),
        (
            "y[30:40]",
            "y[30:39]",
            f"{OF_DATA}.* there are 10 validation inputs and",
        ),
        ("(x[40:], y[40:])", "(x[:0], y[:0])", f"{OF_DATA}.* there are no test data"),
        ("(x[:30], y[:30])", "(x[:30], y[:30], y)", f"{OF_DATA}.* training data are not"),
        ("(x[:30], y[:30])", "(x[:30], 3)", f"{OF_DATA}.* training targets are a single"),
        ("(x[:30], y[:30]), ", "", f"{OF_DATA}.* but it returns 2 of them"),
        ("return (x", "return None, (x", f"{OF_DATA}.* but it returns 4 of them"),
        ("    return (x", "    return 3\n    (x", f"{OF_DATA}.* but it returns a int"),
        (
            "y[40:])",
            'y[40:].astype("str"))',
            f"{OF_DATA}.* but the test targets are strings: number the classes from 0",
        ),
        ("y[40:])", "y[40:].astype(str).astype(object))", f"{OF_DATA}.* are strings"),
        ("x[:30]", "1j * x[:30]", f"{OF_DATA}.* training inputs are of type complex128"),
        ("y[40:])", "y[40:, None])", "The test data of the task .* whole .1,. for each"),
        ("(x[30:40]", "(x[30:40, :2]", "The validation data of .* real .2,. and whole"),
        (".astype(int)", "", f"{OF_DATA}.* targets are booleans: write `.astype.int.`"),
    ],
)
def test_tasks_that_do_not_fit_are_refused_in_a_sentence(old, new, words, task):
    assert old in TASK
    written(task, TASK.replace(old, new))
    with pytest.raises(Refusal, match=words) as refused:
        settings_of(k_sweep, task)
    assert "\n" not in str(refused.value)


SETTINGS = [
    (k_vs_lambda, {"periods": (10.5, -3.0)}, "must be positive"),
    (k_vs_lambda, {"periods": (10.5, 30.0)}, "must be whole numbers"),
    (k_vs_lambda, {"periods": []}, "must be a list"),
    (k_vs_lambda, {"num_steps": -5}, "must be a whole number from 1 to"),
    (k_vs_lambda, {"num_steps": True}, "must be a whole number"),
    (k_vs_lambda, {"seeds": 0}, "must be a whole number from 1 to 10,000"),
    (k_vs_lambda, {"first_seed": -2}, "must be a whole number from 0 to 10,000"),
    (k_vs_lambda, {"learning_rate": -1.0}, "must be positive and finite"),
    (k_vs_lambda, {"learning_rate": float("nan")}, "must be positive and finite"),
    (k_vs_lambda, {"learning_rate": "abc"}, "must be a number, or None"),
    (k_vs_lambda, {"num_train": 5.5}, "must be a whole number, or None"),
    (k_vs_lambda, {"num_train": 0}, "must be a whole number from 1 to"),
    (k_vs_lambda, {"num_train": -3}, "must be a whole number from 1 to"),
    (k_vs_lambda, {"num_train": 31}, "has 30 training examples, but 31"),
    (k_vs_lambda, {"data": "digits"}, "sets 'data', which its own functions replace"),
    (k_sweep, {"reduction": "max"}, "must be one of 'sum', 'mean'"),
    (
        k_sweep,
        {"reduction": "mean"},
        "the learning rate refers to the sum",
    ),
    (
        k_sweep,
        {"augmentation": "blur"},
        "must be one of 'shift', 'flip-and-crop', 'none'",
    ),
    (k_sweep, {"solved_to": (1e-4, float("inf"))}, "must be positive and finite"),
]


@pytest.mark.parametrize(("experiment", "settings", "words"), SETTINGS)
def test_settings_that_no_run_can_have_are_refused(experiment, settings, words, task):
    text = TASK.replace('{"learning_rate": 0.02}', repr(settings))
    written(task, text.replace("nan", 'float("nan")').replace("inf)", 'float("inf"))'))
    with pytest.raises(Refusal, match=words) as refused:
        settings_of(experiment, task)
    assert str(refused.value).count(".") >= 1
    assert "\n" not in str(refused.value)


def test_a_scalar_model_of_classes_is_told_to_have_two_outputs(task):
    written(task, TASK.replace("MLP(3, 2", 'MLP(3, "scalar"'))
    with pytest.raises(Refusal, match=r"returns one number.* two for two classes"):
        settings_of(k_sweep, task)


@pytest.mark.parametrize("kind", ["jax.numpy.tanh", "lambda x: x[:2]"])
def test_a_model_without_parameters_is_refused(kind, task):
    written(task, TASK.replace("eqx.nn.MLP(3, 2, width_size=5, depth=1, key=key)", kind))
    text = task.read_text()
    written(task, "import jax\n" + text)
    with pytest.raises(Refusal, match=r"has nothing to train; `model\(key\)` must ret"):
        settings_of(k_sweep, task)


@pytest.mark.parametrize("way", ["dropout", "own"])
def test_a_model_that_needs_a_key_is_told_how_to_do_without(way, task):
    layer = {
        "dropout": "eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=key), eqx.nn.Dropout()])",
        "own": "Own(eqx.nn.Linear(3, 2, key=key))",
    }
    own = "class Own(eqx.Module):\n    f: eqx.nn.Linear\n\n"
    own += "    def __call__(self, x, key):\n        return self.f(x)\n\n"
    mlp = "eqx.nn.MLP(3, 2, width_size=5, depth=1, key=key)"
    written(task, TASK.replace("def model", own + "def model").replace(mlp, layer[way]))
    with pytest.raises(Refusal, match=r"switch it off by `eqx.nn.inference_mode`\.$"):
        settings_of(k_sweep, task)


def test_more_examples_than_there_are_are_refused(task):
    settings = dataclasses.replace(settings_of(k_sweep, task), num_train=31)
    with pytest.raises(Refusal, match="has 30 training examples, but 31 are requested"):
        training.load(settings, Place(), 0)


def test_data_of_other_shapes_at_another_seed_are_refused(task):
    settings = settings_of(k_sweep, task)
    written(task, TASK.replace("60, 3", "60 + seed, 3"))
    with pytest.raises(Refusal, match="arrays of the same shapes and kinds for all seed"):
        training.load(settings, Place(), 1)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("60, 3", "60 + seed // 3, 3", "test data are real .20, 3. and whole .20,. at s"),
        (
            "astype(int)",
            'astype("di"[seed != 3])',
            "training data are real .30, 3. and",
        ),
        (
            "astype(int)",
            "astype(int) + seed // 3",
            "has 2 outputs, but the classes are 0",
        ),
        (
            "return",
            "1 / (seed - 3)\n    return",
            "`data.3.` of the task .* fails",
        ),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_data_that_do_not_suit_at_another_seed_are_refused_first(
    old, new, words, dry, task, tmp_path, capsys
):
    written(task, TASK.replace(old, new))
    out = ["--out", str(tmp_path / "results"), *(["--dry-run"] if dry else [])]
    command = ["k-sweep", "--quick", "--task", str(task), *out]
    more = ["--seeds", "2", "--seed-offset", "2"]
    assert main([*command, *more]) == 2
    message = capsys.readouterr().err
    assert re.search(words, message)
    assert message.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_sizes_that_the_task_lacks_are_refused_first(task, tmp_path, capsys):
    out = ["--out", str(tmp_path / "results")]
    assert main(["data-scaling", "--quick", "--task", str(task), *out]) == 2
    message = capsys.readouterr().err
    assert "has 30 training examples, but 200 are requested" in message
    assert "smaller `sizes`" in message
