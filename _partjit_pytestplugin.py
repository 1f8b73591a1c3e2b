"""The pytest plugin of partjit: virtual devices before JAX starts, and hypothesis profiles.

It is not in the package because pytest imports it at the start of every run in an environment where partjit is
installed. It does nothing unless its options are used. See `docs/testing.md`.
"""

import os
import sys

import pytest

PROFILE_VARIABLE = "PARTJIT_PROFILE"
"""The hypothesis profile: `deterministic` (the default), `random` or `soak`."""

PROFILES = ("deterministic", "random", "soak")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--partjit-devices` and the setting of the same name."""
    number = "the number of virtual CPU devices that JAX starts with"
    parser.getgroup("partjit").addoption("--partjit-devices", type=int, metavar="N", help=number)
    parser.addini("partjit_devices", number)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Applies the options.

    This runs before the `conftest.py` files: they may use JAX, and a hypothesis profile that they load is kept.
    """
    count = _requested_devices(early_config)
    if count is not None:
        _start_with_devices(count)
    if count is not None or PROFILE_VARIABLE in os.environ:
        _load_profile()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", "needs_devices(n): skip the test where JAX has fewer than n devices")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that need more devices than there are."""
    for mark in item.iter_markers("needs_devices"):
        if len(mark.args) != 1 or not isinstance(mark.args[0], int) or mark.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: needs_devices takes one number: @pytest.mark.needs_devices(8)")
        import jax  # only where the marker is used

        count, needed = len(jax.devices()), mark.args[0]
        if count < needed:
            pytest.skip(f"needs {needed} devices, but there are {count}: run pytest with --partjit-devices={needed}")


def _requested_devices(config: pytest.Config) -> int | None:
    option, setting = config.known_args_namespace.partjit_devices, config.getini("partjit_devices")
    if option is None and not setting:
        return None
    try:
        count = int(setting) if option is None else option
    except ValueError:
        count = 0
    if count < 1:
        given = option if option is not None else setting
        raise pytest.UsageError(f"partjit_devices must be a number of at least 1, but is {given!r}")
    return count


def _start_with_devices(count: int) -> None:
    # The environment as well as the configuration, because subprocesses of tests must see it too.
    #
    # XLA's CPU client sizes its thread pool from NPROC when it is created. A collective blocks one thread per device
    # until all have arrived, so with few threads several virtual devices deadlock.
    os.environ.setdefault("NPROC", str(max(32, 4 * count)))
    # Virtual devices are CPU devices. A platform that is set in the environment takes precedence.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    if "jax" not in sys.modules:
        return
    import jax

    try:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices()) < count:
            raise pytest.UsageError(
                f"{count} devices were requested (--partjit-devices or partjit_devices), but JAX is initialized "
                f"already with {len(jax.devices())}: a plugin that pytest loaded earlier used it. Use JAX in fixtures "
                "and hooks only, or initialize it with enough devices there"
            ) from None


def _load_profile() -> None:
    name = os.environ.get(PROFILE_VARIABLE, PROFILES[0])
    if name not in PROFILES:
        raise pytest.UsageError(f"{PROFILE_VARIABLE} is {name!r}, but the profiles are {', '.join(PROFILES)}")
    try:
        import hypothesis
    except ImportError:
        return
    for profile in PROFILES:
        hypothesis.settings.register_profile(
            f"partjit-{profile}",
            deadline=None,  # the first example of a shape compiles, which takes far longer than the next one
            derandomize=profile == "deterministic",
            max_examples=1000 if profile == "soak" else 100,
            print_blob=True,
            # Explaining which parts of a failing example matter runs it often, and most examples compile: it takes ten
            # times as long as finding and shrinking the example.
            phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
        )
    hypothesis.settings.load_profile(f"partjit-{name}")  # `--hypothesis-profile` comes later, and takes precedence
