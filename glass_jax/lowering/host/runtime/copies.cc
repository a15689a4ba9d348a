// Copies into the NPU and between its memories; what leaves it is in copies_out.cc.
#include "copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "machine.h"
#include "memory.h"

namespace glass {
namespace {

constexpr size_t kBlock = 32, kFractal = 512;

const char* offset_by(const void* pointer, int64_t bytes) {
  return reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(pointer) + bytes);
}

void fill(Bytes to, uint8_t value, bool unwritten, size_t size) {
  std::memset(to.data, value, size);
  if (to.unwritten != nullptr) std::memset(to.unwritten, unwritten, size);
}

Bytes after(Bytes bytes, size_t size) {
  return {bytes.data + size, bytes.unwritten == nullptr ? nullptr : bytes.unwritten + size};
}

}  // namespace

// Element (row, column) goes to block `column / C0 * nz_column + row * nz_row` of 32 bytes. What is left of a row's
// last block is zero.
void copy_to_nz(const ToNz& copy, Type type) {
  const uint64_t row_blocks = here.core->nz_row, column_blocks = here.core->nz_column;
  const size_t size = bytes_of(type);
  record_work(kMTE2, copy.transposed ? "asc_copy_gm2l1_dn2nz" : "asc_copy_gm2l1_nd2nz", [=] {
    const uint64_t c0 = kBlock / size;
    // The runs of the source that are contiguous: rows, or columns if it is transposed.
    std::vector<Bytes> runs(copy.transposed ? copy.columns : copy.rows);
    const size_t run = (copy.transposed ? copy.rows : copy.columns) * size;
    for (size_t i = 0; i < runs.size(); ++i)
      runs[i] = in_global(offset_by(copy.source, i * copy.pitch), run, Access::kRead);
    for (uint64_t column = 0; column < copy.columns; column += c0)
      for (uint64_t row = 0; row < copy.rows; ++row) {
        const uint64_t block = column / c0 * column_blocks + row * row_blocks;
        const Bytes to = on_chip(kL1, offset_by(copy.destination, block * kBlock), kBlock, Access::kWrite);
        const size_t elements = std::min(c0, copy.columns - column);
        if (copy.transposed) {
          for (size_t i = 0; i < elements; ++i) move(after(to, i * size), after(runs[column + i], row * size), size);
        } else {
          move(to, after(runs[row], column * size), elements * size);
        }
        if (elements < c0) fill(after(to, elements * size), 0, false, kBlock - elements * size);
      }
  });
}

// Fractals of 16 rows of 32 bytes, column of fractals by column. Transposed, element (r, c) of the part that is copied
// goes to row c and column r of a matrix in the same layout.
void copy_fractals(Fractals kind, const FractalCopy& copy, Type type) {
  const bool to_a = kind == Fractals::kToL0A || kind == Fractals::kToL0ATransposed;
  const bool transposed = kind == Fractals::kToL0ATransposed || kind == Fractals::kToL0BTransposed;
  const Space space = to_a ? kL0A : kL0B;
  const char* name = transposed ? (to_a ? "asc_copy_l12l0a_transpose" : "asc_copy_l12l0b_transpose")
                                : (to_a ? "asc_copy_l12l0a" : "asc_copy_l12l0b");
  const size_t size = bytes_of(type);
  record_work(kMTE1, name, [=] {
    for (int k = 0; k < copy.k_steps; ++k) {
      // One column of fractals of the source is contiguous.
      const int64_t first = int64_t{copy.k_start + k} * copy.source_stride + copy.m_start;
      const size_t column = copy.m_steps * kFractal;
      const Bytes from = on_chip(kL1, offset_by(copy.source, first * kFractal), column, Access::kRead);
      if (!transposed) {
        move(on_chip(space, offset_by(copy.destination, int64_t{k} * copy.destination_stride * kFractal), column,
                     Access::kWrite),
             from, column);
        continue;
      }
      const size_t c0 = kBlock / size;
      for (size_t r = 0; r < copy.m_steps * 16u; r += c0) {
        // C0 rows of this column become C0 rows of one column of the destination.
        const size_t at = r / c0 * copy.destination_stride * kFractal + k * c0 * kBlock;
        const Bytes to = on_chip(space, offset_by(copy.destination, at), c0 * kBlock, Access::kWrite);
        for (size_t i = 0; i < c0; ++i)
          for (size_t c = 0; c < c0; ++c)
            move(after(to, c * kBlock + i * size), after(from, (r + i) * kBlock + c * size), size);
      }
    }
  });
}

void fill_l1(void* destination, uint32_t value, int bytes, const asc_fill_value_config& config) {
  record_work(kMTE2, "asc_fill_l1", [=] {
    for (uint64_t i = 0; i < config.repeat; ++i) {
      const size_t size = config.blk_num * kBlock;
      const Bytes to =
          on_chip(kL1, offset_by(destination, i * (config.blk_num + config.dst_gap) * kBlock), size, Access::kWrite);
      for (size_t at = 0; at < size; at += bytes) std::memcpy(to.data + at, &value, bytes);
      mark_written(to, size);
    }
  });
}

// Rows, each filled up on the left and right: with the value that was set, or with the row's first (left) and, assumed,
// last (right) element. What then is left of the last block of 32 bytes is, assumed, undefined; rows packed one behind
// the other (the pitch is their length) leave none but the last's.
void copy_global_to_ub(void* destination, const void* source, int bursts, uint32_t length, int left, int right,
                       bool constant, uint64_t source_stride, uint64_t destination_stride, int bytes) {
  const uint32_t value = here.core->pad_value;
  record_work(kMTE2, "asc_copy_gm2ub_align", [=] {
    const size_t before = left * bytes, behind = right * bytes, used = before + length + behind;
    for (int i = 0; i < bursts; ++i) {
      const Bytes from = in_global(offset_by(source, i * source_stride), length, Access::kRead);
      const bool packed = destination_stride == length && i + 1 < bursts;
      const size_t whole = packed ? used : (used + kBlock - 1) / kBlock * kBlock;
      const Bytes to = on_chip(own_ub(), offset_by(destination, i * destination_stride), whole, Access::kWrite);
      const auto pad = [&](size_t begin, size_t size, const void* element) {
        for (size_t at = 0; at < size; at += bytes) std::memcpy(to.data + begin + at, element, bytes);
        mark_written(after(to, begin), size);
      };
      pad(0, before, constant ? static_cast<const void*>(&value) : from.data);
      move(after(to, before), from, length);
      pad(before + length, behind, constant ? static_cast<const void*>(&value) : from.data + length - bytes);
      fill(after(to, used), 0xff, true, whole - used);
    }
  });
}

}  // namespace glass

using namespace glass;

void asc_set_gm2l1_nz_para(uint64_t, uint64_t row_stride, uint64_t column_stride, uint64_t) {
  here.core->nz_row = row_stride, here.core->nz_column = column_stride;
}

void asc_set_copy_pad_val(uint32_t value) { here.core->pad_value = value; }

void asc_copy_ub2l1(void* to, void* from, int bursts, int length, int source_gap, int destination_gap) {
  record_work(kMTE3, "asc_copy_ub2l1", [=] {
    const size_t size = length * kBlock;
    for (int i = 0; i < bursts; ++i)
      move(on_chip(kL1, offset_by(to, int64_t{i} * (length + destination_gap) * kBlock), size, Access::kWrite),
           on_chip(own_ub(), offset_by(from, int64_t{i} * (length + source_gap) * kBlock), size, Access::kRead), size);
  });
}
