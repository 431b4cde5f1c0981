"""The benchmarks' command line."""

import re
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import pytest

from benchmarks.__main__ import COMMANDS, main, MODULES
from benchmarks.data import digits, quintic
from benchmarks.networks.mlp import digits_mlp, quintic_mlp


def test_list_names_everything_with_a_line(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*MODULES, *COMMANDS]
    assert all(len(line.split()) > 3 for line in lines)
    (longest,) = (line for line in lines if line.startswith("large-k-augmented "))
    assert re.search(r"\(\d+ (min|h)\)$", longest)


def test_help_explains(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("--seeds", "--out", "--quick", *MODULES))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("k-vs-lamda", "k-vs-lambda"), ("NISTT", "nist"), ("sped", "speed")],
)
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant, capsys):
    assert main([typed]) == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_an_unknown_name_far_from_all_others_gets_no_guess(capsys):
    assert main(["zzz"]) == 2
    message = capsys.readouterr().err
    assert "did you mean" not in message
    assert "`python -m benchmarks list`" in message


@pytest.mark.parametrize("name", ["nist", "speed"])
def test_seeds_are_refused_if_an_experiment_has_none(name, tmp_path, capsys):
    assert main([name, "--seeds", "2", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert message.count("\n") == 1


def test_a_missing_package_is_answered_with_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODULES, "nist", "no_such_package")
    assert main(["nist", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert 'python -m pip install -e ".[bench]"' in message
    assert message.count("\n") == 1


def test_a_missing_module_of_our_own_is_a_bug(tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "nist", "benchmarks.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        main(["nist", "--out", str(tmp_path)])


def test_an_interrupt_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.experiments.nist.run", interrupt)
    assert main(["nist", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupt_ends_cleanly_while_xla_computes():
    program = """
import jax, jax.numpy as jnp
from benchmarks.__main__ import end

@jax.jit
def long(x):
    return jax.lax.fori_loop(0, 10**9, lambda i, x: jnp.sin(x @ x), x)

long(jnp.ones((50, 50)))
print("written")
end(130)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "written\n", "")


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many"])
def test_bad_seeds_are_refused_in_one_sentence(value, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--seeds", value])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert value in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("grid", [["--grid", "-1,3"], ["--grid=-1,3"], ["--grid", "-1"]])
def test_a_negative_grid_is_refused_as_such(grid, tmp_path, capsys):
    assert main(["k-sweep", *grid, "--out", str(tmp_path)]) == 2
    assert "periods here, which must be positive." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nist", "nls", "ratio", "speed small", "speed"])
def test_missing_files_of_nist_are_refused_before_the_work(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("benchmarks.data.nist.FOLDER", tmp_path / "nowhere")
    assert main([*name.split(), "--quick", "--out", str(tmp_path / "out")]) == 2
    found = capsys.readouterr()
    assert "has no file 'Misra1a.dat'" in found.err
    assert "so far" not in found.out
    assert not list((tmp_path / "out").glob("*.csv"))


def test_a_refused_run_leaves_its_folder_free(tmp_path, capsys):
    command = ["k-sweep", "--scale", "full", "--seeds", "1", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "--data-dir" in capsys.readouterr().err
    assert not (tmp_path / "settings.json").exists()


def test_keeping_results_of_no_folder_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["keep", "--out", "out/nope"]) == 2
    assert (
        "'out/nope' does not exist; name the folder of the results"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("within", ["", "folder"])
def test_a_file_as_the_results_folder_is_refused(within, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main(["--out", str(taken / within)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert taken.read_text() == "mine"


def test_the_quintic_touches_its_bounds_at_both_ends():
    x, y = quintic.examples(20)
    assert x.shape == y.shape == (20, 1)
    np.testing.assert_allclose(y[[0, -1], 0], [-4, 4], rtol=1e-12)
    np.testing.assert_allclose(y, x**5 / 32 - x**3 / 2 + 2 * x - 1, atol=1e-12)
    _, dense = quintic.examples(10_001)
    assert np.all(np.abs(dense) <= 4 + 1e-12)


def test_the_digits_are_split_once_and_for_all():
    labels = np.tile(np.arange(10), 6)
    train, test = digits.split(labels, per_class=2)
    assert list(train) == [*range(10), *range(30, 40)]
    assert not set(train) & set(test)
    assert len(train) + len(test) == len(labels)

    (x, y), (test_x, test_y) = digits.examples(per_class=4)
    assert (len(x), len(test_x)) == (40, 1757)
    assert y.sum(axis=0).tolist() == [4] * 10
    assert test_y.sum() == 1757
    assert x.min() == 0
    assert x.max() == 1


@pytest.mark.parametrize(("make", "number"), [(quintic_mlp, 7801), (digits_mlp, 3010)])
def test_networks_have_the_parameters_that_they_are_said_to(make, number):
    parameters = eqx.filter(make(jax.random.key(0)), eqx.is_inexact_array)
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data"], "Name a data set (mnist, cifar10) and its folder"),
        (["data", "mnits", "--data-dir", "x"], "did you mean 'mnist'?"),
        (["nist", "mnist"], "'nist' takes no second name; leave 'mnist' out."),
    ],
)
def test_data_sets_are_named_with_their_folder(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
