"""The host functions of the situations: what users have, which knows NumPy and nothing of jax.

They live in a module of their own, so that a colocated function refers to them and their records, and copies neither.
"""

import io
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SEEN: list[Any] = []
"""What the functions that return nothing have seen."""


def seen() -> list[Any]:
    """What they have seen in this run, in an order that does not depend on how calls overlap."""
    found = sorted(SEEN)
    SEEN.clear()
    return found


# Records


def log(loss: Any) -> None:
    value = float(loss)
    SEEN.append(value)
    _text.write(f"loss {value:.4f}\n")


def log_step(step: Any, loss: Any) -> None:
    number, value = int(step), float(loss)
    SEEN.append((number, value))
    _text.write(f"step {number}: loss {value:.4f}\n")


class Tracker:
    """Counts what it has logged."""

    def __init__(self) -> None:
        self._count = 0

    def log(self, loss: Any) -> None:
        self._count += 1
        log(loss)


class Accuracy:
    """Counts right predictions."""

    def __init__(self) -> None:
        self._right = self._count = 0

    def update(self, predicted: Any, labels: Any) -> None:
        self._right += int(np.sum(np.asarray(predicted) == np.asarray(labels)))
        self._count += len(labels)

    def reset(self) -> None:
        SEEN.append((self._right, self._count))
        self._right = self._count = 0


def log_text(text: str, loss: Any) -> None:
    value = float(loss)
    SEEN.append((text, value))
    _text.write(f"{text}: loss {value:.4f}\n")


def log_metrics(metrics: Mapping[str, Any]) -> None:
    values = {name: float(value) for name, value in metrics.items()}
    SEEN.append([*values.values()])
    _text.write(", ".join(f"{name} {value:.4f}" for name, value in values.items()))


def progress(i: Any) -> None:
    """As a progress bar does it: it counts, and writes ten times a second."""
    global _due
    SEEN.append(int(i))
    now = time.perf_counter()
    if now >= _due:
        _due = now + 0.1
        _text.write(f"\r{len(SEEN)} it")


class _Forgetful(io.StringIO):
    """A file that does not grow."""

    def write(self, text: str) -> int:
        self.seek(0)
        return super().write(text)


_text = _Forgetful()
_due = 0.0


def augmented(batch: Any) -> np.ndarray:
    """A batch of bytes, as floats, mirrored."""
    floats = np.asarray(batch).astype(np.float32) / 255
    return np.flip(floats, 1) - floats.mean()


def save(params: Iterable[Any]) -> None:
    """Writes a checkpoint."""
    arrays = [*map(np.asarray, params)]
    with tempfile.TemporaryFile() as file:
        np.savez(file, *arrays)
    SEEN.append(float(sum(array[0, 0] for array in arrays)))


# Judgments


def damping(mean: Any) -> Any:
    """The factor of a controller that looks at a state now and then."""
    return np.float32(1 / (1 + abs(float(mean))))


class Controller:
    """The same controller, which counts how often it looked."""

    def __init__(self) -> None:
        self.looks = 0

    def damping(self, mean: Any) -> Any:
        self.looks += 1
        return damping(mean)


class Stopper:
    """Stops when the loss has not become better by a thousandth for three epochs."""

    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0

    def goes_on(self, loss: float) -> bool:
        if loss < self.best * 0.999:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.bad < 3


def rate(number: Any) -> Any:
    """A schedule: the rate of a step by its number."""
    return np.float32(1 / (1 + int(number) / 100))


class Text:
    """A text that ends after so many tokens; then the next one begins."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.letters: list[str] = []

    def add(self, token: Any) -> Any:
        self.letters.append(chr(97 + int(token) % 26))
        if len(self.letters) < self.length:
            return np.bool_("." not in self.letters[-3:])
        self.letters.clear()
        return np.bool_(False)


class LossScale:
    """The scale of a loss: halved after a step that was not finite, doubled after 20 that were."""

    def __init__(self) -> None:
        self.scale, self.good = 1024.0, 0

    def begin_again(self, _: Any) -> None:
        self.scale, self.good = 1024.0, 0

    def told(self, is_finite: Any) -> tuple[np.float32]:
        self.good = self.good + 1 if bool(is_finite) else 0
        if not self.good:
            self.scale /= 2
        elif self.good % 20 == 0 and self.scale < 2**15:
            self.scale *= 2
        return (np.float32(self.scale),)


class Walk:
    """An environment: where an action leads, and the reward for it."""

    def __init__(self) -> None:
        self.state = np.zeros(8, np.float32)

    def begin_again(self, _: Any) -> None:
        self.state = np.zeros(8, np.float32)

    def told(self, action: Any) -> tuple[np.ndarray, np.float32]:
        self.state = np.tanh(self.state + np.asarray(action) + np.float32(0.1)).astype(np.float32)
        return self.state.copy(), np.float32(self.state.sum())


def smoothed(x: np.ndarray) -> np.ndarray:
    """Each number and half of the one before."""
    result = x * np.float32(0.5)
    result[1:] += x[:-1] * np.float32(0.25)
    return result


_stopper = Stopper()


def begin_epochs() -> None:
    global _stopper
    _stopper = Stopper()


def goes_on(loss: Any) -> Any:
    return np.bool_(_stopper.goes_on(float(loss)))


# Data


class Batches:
    """A data set that begins again after its last batch; reading one takes so many seconds."""

    def __init__(self, count: int, shape: tuple[int, ...], seconds: float = 0.0) -> None:
        self.batches = np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32)
        self.seconds = seconds
        self.taken = 0

    def next(self) -> np.ndarray:
        if self.seconds:
            time.sleep(self.seconds)
        self.taken += 1
        return self.batches[(self.taken - 1) % len(self.batches)]


class Clock:
    """A clock, which ticks when it is read, so that all ways read the same; it begins again after so many ticks."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ticks = 0

    def read(self) -> np.float32:
        time.perf_counter()
        self.ticks = self.ticks % self.count + 1
        return np.float32(self.ticks)


TABLE = np.random.default_rng(0).normal(size=(50_000, 64)).astype(np.float32)


def look_up(ids: Any) -> np.ndarray:
    """The rows of an embedding that is too large for the devices."""
    return TABLE[ids]


# An environment


def env_step(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eight carts with poles: observation, reward, and whether an episode has ended, which begins the next one."""
    x, v, angle, spin = state.T
    force = 10.0 * np.tanh(action)
    push = (force + 0.05 * spin**2 * np.sin(angle)) / 1.1
    turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    state = np.stack([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn], axis=1)
    done = (np.abs(state[:, 0]) > 2.4) | (np.abs(state[:, 2]) > 0.4)
    state[done] = 0.01
    return state.astype(np.float32), np.where(done, 0, 1).astype(np.float32), done
