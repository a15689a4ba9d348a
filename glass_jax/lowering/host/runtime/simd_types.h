// Lists of lane types, for which bodies of templates are compiled: GLASS_FLOATS(X) says X(type) for each.
#pragma once

#define GLASS_FLOATS(X) X(float) X(half)
#define GLASS_ALL_FLOATS(X) GLASS_FLOATS(X) X(bfloat16_t)
#define GLASS_SIGNED(X) X(int8_t) X(int16_t) X(int32_t)
#define GLASS_UNSIGNED(X) X(uint8_t) X(uint16_t) X(uint32_t)
#define GLASS_INTEGERS(X) GLASS_SIGNED(X) GLASS_UNSIGNED(X) X(int64_t) X(uint64_t)
#define GLASS_NUMBERS(X) GLASS_ALL_FLOATS(X) GLASS_INTEGERS(X)
#define GLASS_BYTES(X) X(float8_e4m3_t) X(float8_e5m2_t) X(float8_e8m0_t) X(float4_e2m1x2_t) X(float4_e1m2x2_t)
#define GLASS_ALL(X) GLASS_NUMBERS(X) GLASS_BYTES(X)
