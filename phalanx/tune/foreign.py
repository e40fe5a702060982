"""Ray Tune's own search spaces, read into ours. Nothing of Ray is imported: its objects say what they are."""

from __future__ import annotations

from typing import Any

from phalanx.tune.domains import Domain

_RAYS_MODULE = "ray.tune.search.sample"


def is_rays(entry: Any) -> bool:
    """Whether this is a domain of Ray Tune, such as `ray.tune.loguniform(1e-4, 1e-1)`."""
    return type(entry).__module__ == _RAYS_MODULE


def from_ray(domain: Any) -> Domain:
    """Return the same as a domain of ours; ValueError for one that we have no word for."""
    name = type(domain).__name__
    if name == "Categorical":
        return Domain("choice", tuple(domain.categories))
    sampler = domain.get_sampler()
    step = None
    if type(sampler).__name__ == "Quantized":
        step, sampler = sampler.q, sampler.get_sampler()
    word = _word(name, type(sampler).__name__.lstrip("_"), quantised=step is not None)
    if word is None:
        raise ValueError(
            f"Ray's {domain!r} has no word here: use choice, uniform, loguniform, randint or their q forms"
        )
    # Ray's whole numbers end before the upper bound, except in steps.
    high = domain.upper - 1 if name == "Integer" and step is None else domain.upper
    return Domain(word, (domain.lower, high) if step is None else (domain.lower, high, step))


def _word(name: str, sampler: str, *, quantised: bool) -> str | None:
    words = {
        ("Float", "Uniform"): "uniform",
        ("Float", "LogUniform"): "loguniform",
        ("Integer", "Uniform"): "randint",
        ("Integer", "LogUniform"): "lograndint",
    }
    word = words.get((name, sampler))
    return f"q{word}" if word is not None and quantised else word
