"""Search spaces: one vocabulary for Python and TOML, every mistake at once, points that can be repeated."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages import require

from phalanx import tune
from phalanx.errors import ConfigError, UsageError
from phalanx.tools.tune.domains import KINDS, Domain, random_trial
from phalanx.tools.tune.space import SearchSpace, make_search
from phalanx.tools.tune.trial import Objective

require("optuna", "optuna is not installed: pip install 'phalanx[tune]'")


def drawn(space, seed, count):
    method = make_search("random", space, seed, Objective("loss", "min"))
    return [method.point(number, []) for number in range(count)]


def test_toml_and_python_say_the_same(tmp_path):
    (tmp_path / "space.toml").write_text(
        "learning_rate = { loguniform = [1e-4, 0.1] }\n"
        'optimizer = { choice = ["sgd", "adamw"] }\n'
        'momentum = { quniform = [0.5, 0.9, 0.1], when = { optimizer = "sgd" } }\n'
        "batch_size = 32\n"
    )
    python = {
        "learning_rate": tune.loguniform(1e-4, 0.1),
        "optimizer": tune.choice(["sgd", "adamw"]),
        "momentum": tune.quniform(0.5, 0.9, 0.1, when={"optimizer": "sgd"}),
        "batch_size": 32,
    }
    read, built = SearchSpace.read(tmp_path / "space.toml"), SearchSpace(python)
    assert read.to_plain() == built.to_plain()
    points = drawn(built, 7, 40)
    assert points == drawn(read, 7, 40)
    assert points != drawn(read, 8, 40)
    assert all(("momentum" in point) == (point["optimizer"] == "sgd") for point in points)
    assert {point["optimizer"] for point in points} == {"sgd", "adamw"}
    assert all(point["batch_size"] == 32 for point in points)


def test_all_mistakes_are_reported_at_once():
    entries = {
        "a": tune.choice([]),
        "b": tune.uniform(1, 0),
        "c": tune.loguniform(0, 1),
        "d": {"unifrom": [0, 1]},
        "e": tune.uniform(0, 1, when={"optimiser": "sgd"}),
        "optimizer": tune.choice(["sgd", "adamv"]),
        "learning_rate": tune.uniform(-1, 1),
        "g": [1, 2],
        "h": tune.randint(0.5, 3),
        "i": tune.uniform(0, 1, when={"b2": 1}),
        "b2": tune.choice([2, 3]),
        "j": {"uniform": [0]},
        "k": {"uniform": [0, 1], "choice": [1]},
        "l": [0.001, 0.01],
    }
    with pytest.raises(ConfigError) as caught:
        SearchSpace(entries)
    text = str(caught.value)
    for expected in (
        "a: choice of nothing",
        "b: the bounds are reversed: write uniform = [0, 1], or uniform(0, 1) in Python",
        "c: loguniform needs bounds above 0",
        "d: unknown word 'unifrom'. Did you mean 'uniform'?",
        "e: its condition asks for 'optimiser', which is not in the space. Did you mean 'optimizer'?",
        "optimizer = 'adamv': not one of",
        "learning_rate = -1: must be greater than 0",
        "g: a list does not say how to draw from it: write phalanx.tune.uniform(1, 2) for a range, or",
        "l: a list does not say how to draw from it: write phalanx.tune.loguniform(0.001, 0.01) for a range, or",
        "h: randint takes whole numbers; got 0.5",
        "i: its condition b2 = 1 is never true",
        "j: uniform takes low, high; got 1 values",
        "k: one word says what it may be",
    ):
        assert expected in text
    assert len(caught.value.problems) == 13


def test_conditions_in_a_circle():
    with pytest.raises(ConfigError, match="circle: a -> b -> a"):
        SearchSpace({"a": tune.choice([1, 2], when={"b": 1}), "b": tune.choice([1, 2], when={"a": 1})})


def test_a_condition_on_what_does_not_apply_does_not_hold():
    space = SearchSpace(
        {
            "c": tune.uniform(0, 1, when={"b": 2}),
            "b": tune.choice([1, 2], when={"a": True}),
            "a": tune.choice([True, False]),
        }
    )
    for point in drawn(space, 0, 50):
        assert ("b" in point) == point["a"]
        assert ("c" in point) == (point.get("b") == 2)


def test_a_file_that_is_not_a_space(tmp_path):
    with pytest.raises(UsageError, match="no such search space"):
        SearchSpace.read(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match="it is empty"):
        SearchSpace.read(tmp_path / "empty.toml")


def test_the_grid_has_every_point_once():
    space = SearchSpace(
        {
            "optimizer": tune.choice(["sgd", "adamw"]),
            "momentum": tune.quniform(0.1, 0.3, 0.1, when={"optimizer": "sgd"}),
            "layers": tune.qrandint(2, 7, 2),
            "fixed": 1,
        }
    )
    points = space.grid()
    assert len(points) == (3 + 1) * 3
    assert len({tuple(point.items()) for point in points}) == len(points)
    assert {point["layers"] for point in points} == {2, 4, 6}
    assert {point.get("momentum") for point in points} == {0.1, 0.2, 0.3, None}
    with pytest.raises(ConfigError, match="lr = uniform"):
        SearchSpace({"lr": tune.uniform(0, 1)}).grid()


@given(
    st.sampled_from([kind for kind in KINDS if kind != "choice"]),
    st.integers(1, 50),
    st.integers(0, 300),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_draws_and_moves_stay_inside(kind, low, span, step, rng):
    meaning = KINDS[kind]
    span = max(span, step)  # a step that is larger is refused
    bounds = (low, low + span, step)[: 3 if meaning.step else 2]
    domain = Domain(kind, bounds)
    assert domain.mistakes() == []
    value = domain.suggest(random_trial(str(rng.random())), "x")
    for _ in range(5):
        assert low <= value <= low + span
        assert isinstance(value, int) == meaning.integer
        if meaning.step and not meaning.log and low + span > value > low:
            assert math.isclose((value - low) / step % 1, 0, abs_tol=1e-6)
        value = domain.moved(value, rng)


def test_perturbing_moves_only_what_is_named():
    space = SearchSpace({"lr": tune.loguniform(1e-4, 1), "width": tune.randint(1, 64), "kind": tune.choice("abc")})
    start = {"lr": 0.01, "width": 4, "kind": "b"}
    moved = [space.perturbed(start, random.Random(seed), ["lr"]) for seed in range(20)]
    assert all((point["width"], point["kind"]) == (4, "b") for point in moved)
    near = {round(point["lr"], 6) for point in moved}
    assert {0.008, 0.012} <= near
    assert len(near) > 2, "now and then a fresh draw"
    everything = [space.perturbed(start, random.Random(seed)) for seed in range(20)]
    assert {point["kind"] for point in everything} >= {"a", "c"}
    assert all(point["width"] != 4 or point["lr"] != 0.01 for point in everything)


def test_a_step_larger_than_the_range_is_refused():
    with pytest.raises(UsageError, match="the step 5 is larger than the range from 1 to 2"):
        SearchSpace({"layers": tune.qrandint(1, 2, 5)})
