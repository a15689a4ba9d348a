"""Set up before JAX starts: 16 host devices; caches of kernels and XLA programs that all processes of a run share."""

import os
import pathlib

import hypothesis
import jax
import pytest

_ROOT = pathlib.Path(__file__).parent.parent
os.environ.setdefault("GLASS_CACHE_DIR", str(_ROOT / ".cache" / "kernels"))
# Of programs alone that take XLA long. Processes that tests start read the environment.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_ROOT / ".cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update(
    "jax_persistent_cache_min_compile_time_secs", float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
)

jax.config.update("jax_num_cpu_devices", 16)

# Property tests try the same examples in every run, so that a failure is of the change that it appears with.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Models and modules are judged within a tolerance, and nearly all of their time is XLA's compiler. Everything else,
# bits above all, is tested as a user compiles it, and so are these by `make test-all`.
_QUICKLY_COMPILED = ("fusion", "models", "nn")


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="one case of each test that takes no longer than seconds")


def pytest_collection_modifyitems(config, items):
    """With ``--quick`` the first case of each test stays, of those that ``long_tests.txt`` does not name."""
    if not config.option.quick:
        return
    seen = set((_ROOT / "tests" / "long_tests.txt").read_text().split())
    kept = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name not in seen and item.get_closest_marker("slow") is None:
            kept.append(item)
        seen.add(name)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(autouse=True, scope="module")
def _quickly_compiled(request):
    folder = request.path.relative_to(_ROOT / "tests").parts[0]
    if folder not in _QUICKLY_COMPILED or "not slow" not in request.config.option.markexpr:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
