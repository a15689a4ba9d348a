"""Set up before JAX starts: 16 host devices and a kernel cache beside the tests, shared by all workers of a run."""

import os
import pathlib

import hypothesis
import jax

_ROOT = pathlib.Path(__file__).parent.parent
os.environ.setdefault("GLASS_CACHE_DIR", str(_ROOT / ".cache" / "kernels"))

jax.config.update("jax_num_cpu_devices", 16)

# Property tests try the same examples in every run, so that a failure is of the change that it appears with.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
