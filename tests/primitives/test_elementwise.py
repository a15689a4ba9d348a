"""An elementwise operation of one operand, made of its formula and what elementwise kernels share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import glass_jax as glass
import numpy_reference as ref
from glass_jax.lowering.tilelang.kernels.elementwise import ElementwiseKernel
from glass_jax.primitives import elementwise
from glass_jax.primitives.operation import Params


@dataclasses.dataclass(frozen=True)
class ReluSquaredKernel(ElementwiseKernel):
    operation = "relu_squared"
    operands = 1

    def build(self, chip):
        import tilelang.ascend.language as T
        from tilelang.ascend.language import simd as S

        @T.macro
        def formula(x, mask):
            positive = S.vrelu(x, mask)
            return S.vmul(positive, positive, mask)

        tiles, array = self.tiles(chip, formula), self.array

        @T.prim_func
        def relu_squared(x: array, out: array):
            tiles(x, None, out)

        return relu_squared


RELU_SQUARED = elementwise.operation(lambda x: jnp.square(jax.nn.relu(x)), ReluSquaredKernel)


def relu_squared(x, implementation=None):
    return RELU_SQUARED.bind(x, params=Params.chosen(implementation))


@pytest.mark.parametrize("implementation", ["xla", "npu_model"])
@pytest.mark.parametrize(("shape", "dtype"), [((3, 41), "float32"), ((70, 130), "bfloat16"), ((0, 3), "float16")])
def test_values(shape, dtype, implementation):
    x = ref.random(np.random.default_rng(0), shape, dtype)
    out = relu_squared(x, implementation)
    assert out.dtype == x.dtype and out.shape == shape
    ref.assert_close(out, np.maximum(ref.f64(x), 0) ** 2)


def test_rules():
    x = 1 + ref.random(np.random.default_rng(0), (3, 4), "float32")  # away from the kink's second derivative
    x = jnp.where(jnp.abs(x) < 0.1, 0.5, x)
    check_grads(relu_squared, (x,), order=2, modes=("fwd", "rev"), rtol=1e-2)
    np.testing.assert_array_equal(jax.vmap(relu_squared, 1)(x), relu_squared(x).T)
    mesh = jax.make_mesh((3,), ("d",), devices=jax.devices()[:3], axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        out = relu_squared(jax.device_put(x, jax.P("d")))
    assert jax.typeof(out).sharding.spec == jax.P("d", None)
    np.testing.assert_array_equal(out, relu_squared(x))


@pytest.mark.parametrize("chip", ["950DT", pytest.param("950PR", marks=pytest.mark.slow)])
def test_the_chips_take_it(chip):
    assert glass.verify(relu_squared, jax.ShapeDtypeStruct((4096, 2048), "bfloat16"), chip=chip) == []
