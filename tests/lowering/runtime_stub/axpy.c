// axpy(x[n], alpha[1], y[n]) -> out[n], 8 elements a block, n = 8 * blocks; stands in for Ascend C, see stub_acl.cc.
// The parameters come in alphabetical order, which is how TileLang's code generator emits them.
void axpy_kernel(void** parameters, unsigned block, unsigned blocks) {
  (void)blocks;
  const float alpha = *(const float*)parameters[0];
  float* out = (float*)parameters[1];
  const float* x = (const float*)parameters[2];
  const float* y = (const float*)parameters[3];
  for (unsigned i = 8 * block; i < 8 * (block + 1); ++i) out[i] = alpha * x[i] + y[i];
}
