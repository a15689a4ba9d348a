"""Set up before JAX starts: 16 host devices and a kernel cache beside the tests, shared by all workers of a run."""

import os
import pathlib

import jax

_ROOT = pathlib.Path(__file__).parent.parent
os.environ.setdefault("GLASS_CACHE_DIR", str(_ROOT / ".cache" / "kernels"))

jax.config.update("jax_num_cpu_devices", 16)
