"""What is wrong with generated code, found by executing it on this machine under several orders of its pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glass_jax import config
from glass_jax.hw.model import executor
from glass_jax.hw.rules.base import Violation
from glass_jax.lowering import artifact
from glass_jax.lowering.host import call, launch

_REMEDIES = {
    "race": "order the two by a flag, a barrier or another buffer; a kernel without flags of its own has TileLang's",
    "missing_barrier": "put T.simd.mem_bar between the store and the load",
    "deadlock": "give every wait its set",
    "flag": "pair every set with one wait before the next set",
    "out_of_bounds": "keep the access inside the buffer or array",
    "unwritten_read": "write all that is read, or cut the copy to what was written",
    "step_limit": "make sure that the loop ends",
}
# Differences from the model that rounding alone explains, of the largest value: sums in another order, another exp.
_ROUNDING = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-8}


def of_function(fn: Callable[..., Any], args: Sequence[Any], chip: str) -> list[Violation]:
    """The violations of every kernel that ``fn(*args)`` launches, executed on the operands that it launches them with.

    Args:
      fn: a JAX function.
      args: its arguments; for a ``jax.ShapeDtypeStruct`` normally distributed numbers are made, the same at each call,
        and zeros for integers and booleans: where integers are numbers of pages or rows, pass arrays.
      chip: the chip.
    """
    with call.recorded() as launches, config.configure(chip=chip, implementation="host"):
        jax.block_until_ready(jax.jit(lambda *arrays: fn(*arrays))(*made_operands(args)))
    return [violation for each in launches for violation in of_launch(each)]


def of_kernel(made: artifact.Artifact) -> list[Violation]:
    """The violations of a kernel, executed on operands made as :func:`of_function` makes arguments."""
    inputs = tuple(i for i, argument in enumerate(made.arguments) if not argument.output)
    types = [jax.ShapeDtypeStruct(made.arguments[i].shape, jnp.dtype(made.arguments[i].dtype)) for i in inputs]
    return of_launch(call.Launch(made, inputs, [np.asarray(x) for x in made_operands(types)]))


def of_launch(launched: call.Launch, model: bool = True) -> list[Violation]:
    """The violations of one launch: findings of the runtime, and results that the order or the model contradicts.

    Args:
      launched: the kernel and its operands.
      model: whether to compare with the NPU model, which takes longest.
    """
    made = launched.made
    violations: dict[tuple, Violation] = {}
    first: list[np.ndarray] = []
    for policy in launch.POLICIES:
        results, findings = launch.run(made, launched.operands, launched.inputs, policy)
        for finding in findings:
            key = (finding["rule"], finding.get("line"), finding.get("other_line"), finding.get("memory"))
            violations.setdefault(key, _violation(made, finding, policy))
        first = first or results
        for argument, result, other in zip(_outputs(made), results, first, strict=True):
            if result.tobytes() != other.tobytes() and ("order", argument.name) not in violations:
                share = np.mean(_bytes(result) != _bytes(other))
                violations["order", argument.name] = Violation(
                    "host-order",
                    made.entry,
                    None,
                    f"{argument.name} is not the same under every order of the pipes: {share:.1%} of its bytes differ "
                    f"between {launch.POLICIES[0].name} and {policy.name}",
                    "look for a race: two pipes reach one address and no flag orders them",
                )
    return [*violations.values(), *(_differences(launched, first) if model else ())]


def made_operands(types: Sequence[Any]) -> list[Any]:
    """Arrays for those of ``types`` that are no arrays, see :func:`of_function`."""
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return [jax.tree.map(array, each) for each in types]


def _violation(made: artifact.Artifact, finding: dict, policy: launch.Policy) -> Violation:
    """A finding of the runtime. It names lines of the generated code, which keeps none of the kernel's own."""
    rule = finding["rule"]
    place = f"{made.entry}.asc:{finding['line']}" if "line" in finding else made.entry
    where = [f"block {finding['block']}"] if "block" in finding else []
    where += [str(finding[name]) for name in ("core", "memory") if name in finding]
    where += [f"bytes {finding['begin']} to {finding['end']}"] if "begin" in finding else []
    where += [f"against line {finding['other_line']}"] if "other_line" in finding else []
    times = f", {finding['count']} times" if finding["count"] > 1 else ""
    return Violation(
        f"host-{rule.replace('_', '-')}",
        made.entry,
        place,
        f"{finding['what']} ({', '.join([*where, policy.name])}{times})",
        _REMEDIES.get(rule, "see docs/host.md"),
    )


def _outputs(made: artifact.Artifact) -> list[artifact.Argument]:
    return [argument for argument in made.arguments if argument.output]


def _differences(launched: call.Launch, results: Sequence[np.ndarray]) -> Iterator[Violation]:
    """Results that differ from the NPU model's by more than rounding."""
    made = launched.made
    outputs = tuple(i for i, argument in enumerate(made.arguments) if argument.output)
    model = jax.jit(lambda *operands: executor.run(made.program, operands, outputs, launched.inputs))
    for argument, got, want in zip(_outputs(made), results, model(*launched.operands), strict=True):
        got, want = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (got, want))
        largest = np.max(np.abs(want), initial=0.0, where=np.isfinite(want))
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        with np.errstate(invalid="ignore"):
            near = np.abs(got - want) <= _ROUNDING.get(argument.dtype, 0.0) * largest
        wrong = ~(same | near)
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            yield Violation(
                "host-differs",
                made.entry,
                None,
                f"{int(wrong.sum())} of {wrong.size} elements of {argument.name} are not the NPU model's, up to "
                f"rounding, the first at {list(place)}: {got[place]:g}, and the model says {want[place]:g}",
                "the generated code does not do what the kernel says: see docs/tilelang-faults.md",
            )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)
