"""The package's metadata: lower bounds, extras, version and types."""

import re
import tomllib
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_lower_bounds_are_the_tested_ones():
    tested = dict(
        re.findall(r"^(\w+)==(.*)$", (ROOT / ".ci/lower-bounds.txt").read_text(), re.M)
    )
    bounds = [requirement.split(",")[0] for requirement in PROJECT["dependencies"]]
    admitted = dict(bound.split(">=") for bound in bounds)
    tested.pop("jaxlib")
    assert tested == admitted


def test_cuda_extras_are_jax_own():
    extras = PROJECT["optional-dependencies"]
    assert extras["cuda12"] == ["jax[cuda12]"]
    assert extras["cuda13"] == ["jax[cuda13]"]


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {PROJECT['version']}" in citation


def test_the_package_is_typed():
    assert (ROOT / "gnlin" / "py.typed").exists()
