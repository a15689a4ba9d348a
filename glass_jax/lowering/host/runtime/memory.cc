#include "memory.h"

#include <algorithm>
#include <string>

#include "findings.h"
#include "races.h"

namespace glass {
namespace {

// Bytes for accesses that fall outside of everything. What earlier calls returned stays valid: a copy holds several.
Bytes nobodys(size_t size) {
  thread_local std::vector<std::vector<uint8_t>> areas;
  if (areas.empty() || areas.back().size() < 2 * size) areas.emplace_back(std::max<size_t>(4 * size, 1 << 16));
  std::vector<uint8_t>& area = areas.back();
  std::memset(area.data(), 0xff, size);
  std::memset(area.data() + area.size() / 2, 0, size);
  return {area.data(), here.block->launch->unwritten() ? area.data() + area.size() / 2 : nullptr};
}

// Generated code counts addresses from 0. UB alone has real ones, of the core's own UB, since SIMT threads dereference
// them; the cube core's pointers into UB are those of the first vector core, whichever UB a copy then writes.
size_t offset_in(Space space, const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (space > kUB1 || address < (1u << 20)) return address;
  return address - reinterpret_cast<uintptr_t>(here.block->memory->data(own_ub()));
}

void report_out_of_bounds(const char* memory, int64_t offset, size_t size, uint64_t bytes, Access access) {
  const int64_t end = offset + static_cast<int64_t>(size);
  Finding finding;
  finding.rule = "out_of_bounds";
  finding.memory = memory;
  finding.begin = offset;
  finding.end = end;
  finding.what = std::string(here.name) + " " + (access == Access::kRead ? "reads" : "writes") + " bytes " +
                 std::to_string(offset) + " to " + std::to_string(end) + " of " + memory + ", which has " +
                 std::to_string(bytes);
  report(std::move(finding));
}

}  // namespace

Memory::Memory(bool flags) : flags_(flags) {
  for (int space = 0; space < kSpaces; ++space) {
    data_[space].reset(new uint8_t[kBytes[space]]);
    if (flags) unwritten_[space].reset(new uint8_t[kBytes[space]]);
    low_[space] = 0, high_[space] = kBytes[space];
  }
}

void Memory::poison() {
  for (int space = 0; space < kSpaces; ++space) {
    if (low_[space] < high_[space]) {
      std::memset(data_[space].get() + low_[space], 0xff, high_[space] - low_[space]);
      if (flags_) std::memset(unwritten_[space].get() + low_[space], 1, high_[space] - low_[space]);
    }
    low_[space] = kBytes[space], high_[space] = 0;
    shadows_[space].clear();
  }
}

Bytes on_chip(Space space, const void* pointer, size_t size, Access access) {
  const size_t offset = offset_in(space, pointer);
  if (offset > kBytes[space] || size > kBytes[space] - offset) {
    report_out_of_bounds(name_of(space), static_cast<int64_t>(offset), size, kBytes[space], access);
    return nobodys(size);
  }
  Memory& memory = *here.block->memory;
  if (access != Access::kRead) memory.wrote(space, offset, offset + size);
  if (here.block->launch->races()) memory.shadow(space).touch(offset, offset + size, access, name_of(space));
  return memory.at(space, offset);
}

InArray locate(const void* pointer, size_t size) {
  const GlassHostLaunch& request = *here.block->launch->request;
  const uint8_t* bytes = static_cast<const uint8_t*>(pointer);
  uint32_t nearest = 0;
  for (uint32_t i = 0; i < request.num_buffers; ++i) {
    const uint8_t* begin = static_cast<const uint8_t*>(request.buffers[i].data);
    if (bytes >= begin && bytes + size <= begin + request.buffers[i].bytes) return {i, bytes - begin, true};
    // An address outside of all is told as one beyond the array that begins closest before it.
    const uint8_t* best = static_cast<const uint8_t*>(request.buffers[nearest].data);
    if (bytes >= begin && (bytes < best || begin > best)) nearest = i;
  }
  return {nearest, bytes - static_cast<const uint8_t*>(request.buffers[nearest].data), false};
}

Bytes in_global(const void* pointer, size_t size, Access access) {
  Launch& launch = *here.block->launch;
  const InArray place = locate(pointer, size);
  if (place.inside) {
    const size_t offset = static_cast<size_t>(place.offset);
    const GlassHostBuffer& array = launch.request->buffers[place.buffer];
    // Arrays that the kernel only reads are not followed: nobody writes them.
    if (launch.races() && (array.result != 0 || access != Access::kRead))
      launch.shadows[place.buffer].touch(offset, offset + size, access, array.name);
    return launch.global(place.buffer, offset);
  }
  const GlassHostBuffer& buffer = launch.request->buffers[place.buffer];
  report_out_of_bounds(buffer.name, place.offset, size, buffer.bytes, access);
  return nobodys(size);
}

void move(Bytes to, Bytes from, size_t size) {
  std::memcpy(to.data, from.data, size);
  if (to.unwritten == nullptr) return;
  if (from.unwritten != nullptr) std::memcpy(to.unwritten, from.unwritten, size);
  else std::memset(to.unwritten, 0, size);
}

void move_out(Bytes to, Bytes from, size_t size, Space space, const void* pointer) {
  std::memcpy(to.data, from.data, size);
  mark_written(to, size);
  check_move_out(from, size, space, pointer);
}

void check_move_out(Bytes from, size_t size, Space space, const void* pointer) {
  check_written(from, size, name_of(space), static_cast<int64_t>(offset_in(space, pointer)),
                "takes to global memory what nobody wrote, or what was computed from such bytes:");
}

void check_written(Bytes bytes, size_t size, const char* memory, int64_t offset, const char* does) {
  if (!any_unwritten(bytes, size)) return;
  const uint8_t* first = static_cast<const uint8_t*>(std::memchr(bytes.unwritten, 1, size));
  const int64_t begin = offset + (first - bytes.unwritten);
  int64_t end = begin;
  while (end < offset + static_cast<int64_t>(size) && bytes.unwritten[end - offset] != 0) ++end;
  Finding finding;
  finding.rule = "unwritten_read";
  finding.memory = memory;
  finding.begin = begin;
  finding.end = end;
  finding.what = std::string(here.name) + " " + does + " bytes " + std::to_string(begin) + " to " +
                 std::to_string(end) + " of " + memory;
  report(std::move(finding));
}

Space own_ub() { return here.core->index == 2 ? kUB1 : kUB0; }

}  // namespace glass
