"""Flash attention on the NPU model, against XLA and interpreted Pallas with the same tiles; its verification."""

from __future__ import annotations

import json
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import glass_jax as glass
from benchmarks import measure
from benchmarks.measure import Report, Verdict
from glass_jax.lowering.tilelang.kernels.mla_prefill import QUERIES as TILE

LENGTH, HEAD_DIM = 1024, 128
DTYPE = jnp.bfloat16
SCALE = HEAD_DIM**-0.5

_VERIFY = """
import json, time
import glass_jax as glass
from glass_jax.lowering.tilelang.kernels.mla_prefill import MlaPrefillKernel
seconds = []
sizes = dict(batch={heads}, heads=1, q_length={length}, k_length={length}, d={d}, dv={d}, dtype={dtype!r})
kernel = MlaPrefillKernel(**sizes, scale={scale}, causal=False, segments=False).build("950DT")
for _ in range({times}):
    start = time.perf_counter()
    assert glass.verify(kernel, chip="950DT") == []
    seconds.append(time.perf_counter() - start)
print(json.dumps(seconds))
"""


def npu_model() -> list[Report]:
    """One head and eight."""
    return [_compared(heads) for heads in (1, 8)]


def _compared(heads: int) -> Report:
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (heads, LENGTH, HEAD_DIM), DTYPE) for key in keys]
    model = jax.jit(npu_attention)
    model.lower(*arrays)  # TileLang compiles the kernel, which is not what is measured
    jax.clear_caches()
    start = time.perf_counter()
    model.lower(*arrays).compile()
    compilation = time.perf_counter() - start
    sides = {
        "XLA, written plainly": jax.jit(plain),
        "XLA, jax.nn.dot_product_attention": jax.jit(dot_product_attention),
        "NPU model": model,
        "Pallas interpreted": jax.jit(pallas_attention),
    }
    seconds = measure.interleaved(
        {name: lambda function=function: function(*arrays) for name, function in sides.items()}
    )
    seconds["NPU model, traced and compiled"] = compilation
    xla = min(value for name, value in seconds.items() if name.startswith("XLA"))
    verdicts = [
        Verdict("NPU model over XLA's attention", seconds["NPU model"] / xla, promise=("at most", 3)),
        Verdict("NPU model faster than interpreted Pallas by", seconds["Pallas interpreted"] / seconds["NPU model"]),
        Verdict("NPU model, traced and compiled", compilation, "s", ("at most", 3)),
    ]
    shape = f"{heads} x {LENGTH} x {LENGTH} x {HEAD_DIM}"
    return Report(f"bfloat16 attention {shape} in tiles of {TILE} queries and {TILE} keys", seconds, verdicts)


def npu_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The kernel of ``mla_prefill`` on the NPU model, each head a batch of one."""
    operands = (x[:, :, None] for x in (q, k, v))
    return glass.mla_prefill(*operands, causal=False, implementation="npu_model")[0][:, :, 0]


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``softmax(q k' / sqrt(d)) v``, scores in float32."""
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * SCALE
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("hqk,hkd->hqd", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by JAX, which wants the heads after the sequence."""
    return jnp.swapaxes(jax.nn.dot_product_attention(*(jnp.swapaxes(x, 0, 1) for x in (q, k, v))), 0, 1)


def pallas_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same as an interpreted Pallas kernel, with the tiles and the online softmax of the Ascend kernel."""

    def body(q_ref, k_ref, v_ref, out_ref):
        def step(tile, state):
            m, total, o = state
            rows = pl.ds(tile * TILE, TILE)
            s = jnp.dot(q_ref[0], k_ref[0, rows, :].T, preferred_element_type=jnp.float32) * SCALE
            new = jnp.maximum(m, s.max(-1))
            p, worth = jnp.exp(s - new[:, None]), jnp.exp(m - new)
            product = jnp.dot(p.astype(v.dtype), v_ref[0, rows, :], preferred_element_type=jnp.float32)
            return new, total * worth + p.sum(-1), o * worth[:, None] + product

        nothing = (jnp.full(TILE, -jnp.inf), jnp.zeros(TILE), jnp.zeros((TILE, HEAD_DIM)))
        _, total, o = jax.lax.fori_loop(0, LENGTH // TILE, step, nothing)
        out_ref[0] = (o / total[:, None]).astype(out_ref.dtype)

    tile = pl.BlockSpec((1, TILE, HEAD_DIM), lambda head, query: (head, query, 0))
    whole = pl.BlockSpec((1, LENGTH, HEAD_DIM), lambda head, query: (head, 0, 0))
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0], LENGTH // TILE),
        in_specs=[tile, whole, whole],
        out_specs=tile,
        interpret=True,
    )(q, k, v)


def verification() -> list[Report]:
    """``glass.verify`` of the kernel, with an empty cache and again."""
    code = _VERIFY.format(heads=8, length=LENGTH, d=HEAD_DIM, scale=SCALE, dtype=jnp.dtype(DTYPE).name, times=6)
    with tempfile.TemporaryDirectory() as cache:
        first, *again = json.loads(measure.python(code, {"GLASS_CACHE_DIR": cache}))
    seconds = {"compiled by TileLang and verified": first, "verified again": statistics.median(again)}
    verdict = Verdict("every rule on the compiled kernel", seconds["verified again"], "s")
    return [Report("verifying the attention kernel", seconds, [verdict])]
