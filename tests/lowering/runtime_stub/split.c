// split(pairs[2 * n]) -> low[n], high[n]: even and odd elements, 8 pairs a block; stands in for Ascend C, see
// stub_acl.cc.
void split_kernel(void** parameters, unsigned block, unsigned blocks) {
  (void)blocks;
  float* high = (float*)parameters[0];
  float* low = (float*)parameters[1];
  const float* pairs = (const float*)parameters[2];
  for (unsigned i = 8 * block; i < 8 * (block + 1); ++i) {
    low[i] = pairs[2 * i];
    high[i] = pairs[2 * i + 1];
  }
}
