"""Random numbers: seeds as a function of the run, the rank and a position, and generator states that can be saved."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

RNG_FORMAT = 1
_MASK = (1 << 64) - 1


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed Python, NumPy and torch (all devices) from the run's seed and the rank."""
    seeds = np.random.SeedSequence([seed, rank]).generate_state(2)
    random.seed(int(seeds[0]))
    np.random.seed(int(seeds[0]))
    torch.manual_seed(int(seeds[1]))


def rng_state() -> dict[str, Any]:
    """Return every generator's state as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "format": RNG_FORMAT,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def derive_seed(*parts: int) -> int:
    """Mix integers into one 64-bit seed (SplitMix64): near positions give unrelated seeds."""
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_process(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators of this process."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which also seeds every accelerator: the data path must not change those.
    torch.default_generator.manual_seed(seed)


class rng_scope:
    """Run a block with generators seeded by `seed`, and restore this process's generators afterwards."""

    __slots__ = ("_numpy", "_python", "_seed", "_torch")

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._python = _PYTHON.copy()
        self._torch = torch.default_generator.get_state()
        self._numpy = _NUMPY.lend()
        seed_process(self._seed)

    def __exit__(self, *error: object) -> None:
        _PYTHON.put_back(self._python)
        torch.default_generator.set_state(self._torch)
        _NUMPY.uninstall(*self._numpy)


class _PythonGenerator:
    """Python's global generator, whose state is copied as memory: `getstate` makes 625 integers, once per batch.

    Its object holds the position in a block of words, then these, right after the head that every object has. Where
    that is not so (another interpreter), the state is copied by `getstate`.
    """

    def __init__(self) -> None:
        self._generator: Any = vars(random)["_inst"]  # whose methods the functions of `random` are
        self._memory = (ctypes.c_char * (4 * _KEY_WORDS + 4)).from_address(id(self._generator) + object.__basicsize__)
        *words, position = self._generator.getstate()[1]
        self._is_known = np.frombuffer(self._memory.raw, np.uint32).tolist() == [position, *words]

    def copy(self) -> Any:
        """Return the state, with the second of two normal numbers that are drawn at once."""
        return (self._memory.raw, self._generator.gauss_next) if self._is_known else self._generator.getstate()

    def put_back(self, state: Any) -> None:
        """Restore what `copy` returned."""
        if self._is_known:
            self._memory.raw, self._generator.gauss_next = state
        else:
            self._generator.setstate(state)


class _NumpyGenerator:
    """NumPy's global generator, which is replaced by another one while data are read.

    Copying its state takes 100 times longer than replacing it, and this happens once per batch. A replacement only
    loses the second of two normal numbers that NumPy draws at once. So the state is copied where numbers were drawn
    since the last replacement, or such a second number is stored.
    """

    def __init__(self) -> None:
        self._numpy_generator: object = None
        self._mark: tuple[int, ...] = ()
        self._words: Any = None

    def lend(self) -> tuple[Any, Any]:
        """Install a generator for the data; return what `uninstall` needs."""
        generator = mtrand.get_bit_generator()
        state = None
        if generator is not self._numpy_generator or self._mark != self._position():
            state = np.random.get_state(legacy=False)
        # A nested scope needs another generator.
        mtrand.set_bit_generator(_FOR_DATA if generator is not _FOR_DATA else np.random.MT19937())
        return generator, state

    def uninstall(self, generator: Any, state: Any) -> None:
        """Restore the process's generator."""
        mtrand.set_bit_generator(generator)
        if state is None:
            return
        has_second = bool(state["has_gauss"])
        if has_second:
            np.random.set_state(state)
        is_plain = isinstance(generator, np.random.MT19937) and generator is not _FOR_DATA and not has_second
        self._numpy_generator = generator if is_plain else None
        if is_plain:
            self._words = (ctypes.c_uint32 * (_KEY_WORDS + 1)).from_address(generator.ctypes.state_address)
            self._mark = self._position()

    def _position(self) -> tuple[int, ...]:
        """Return what changes when a number is drawn: MT19937's position in its block of words, and two of them."""
        words = self._words
        return words[_KEY_WORDS], words[0], words[_KEY_WORDS - 1]


_KEY_WORDS = 624
"""Words of MT19937's block; in NumPy's memory its position follows them."""
_FOR_DATA = np.random.MT19937()
_NUMPY = _NumpyGenerator()
_PYTHON = _PythonGenerator()
