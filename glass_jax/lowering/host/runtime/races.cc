#include "races.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "findings.h"
#include "machine.h"
#include "simd.h"

namespace glass {
namespace {

// Barriers passed in regions so far by this OS thread; 0 outside of regions.
thread_local uint32_t barriers = 0, store_barrier = 0;

bool weak(Pipe pipe) { return pipe == kMTE2 || pipe == kMTE3; }

// Whether the op that runs comes after `before`. Copies of one pipe may overtake each other; everything else of a pipe
// goes in its order. Blocks are ordered by the barriers of all of them alone.
bool ordered(const Event& before, const Event& now) {
  const Queue& queue = here.core->pipe[here.pipe];
  if (before.block != now.block) {
    const auto& arrivals = here.block->launch->arrivals;
    const uint32_t known = queue.clock[kTracks];
    return known > 0 && arrivals[known - 1][before.block][before.track] >= before.clock;
  }
  if (before.track != now.track) return queue.clock[before.track] >= before.clock;
  return !weak(here.pipe) || before.clock == now.clock || queue.clock[now.track] >= before.clock;
}

std::string who(const Event& event, const Event& now) {
  std::string text = std::string(event.name) + " on " + name_of(static_cast<Pipe>(event.track % kPipes));
  if (event.block != now.block) text += " of block " + std::to_string(event.block);
  else if (event.track / kPipes != now.track / kPipes)
    text += " of the " + std::string(name_of_core(event.track / kPipes)) + " core";
  return text + " (line " + std::to_string(event.line) + ")";
}

// Bytes of one access that meet one earlier access without order.
struct Conflict {
  Event other;
  bool other_wrote, barrier;
  size_t begin, end;
};

void note(std::vector<Conflict>& conflicts, const Event& other, bool other_wrote, bool barrier, size_t begin,
          size_t end) {
  for (Conflict& conflict : conflicts)
    if (conflict.other == other && conflict.barrier == barrier) {
      conflict.end = end;
      return;
    }
  conflicts.push_back({other, other_wrote, barrier, begin, end});
}

void report_conflict(const Conflict& conflict, const Event& now, Access access, const char* memory) {
  Finding finding;
  finding.rule = conflict.barrier ? "missing_barrier" : "race";
  finding.memory = memory;
  finding.other_pipe = name_of(static_cast<Pipe>(conflict.other.track % kPipes));
  finding.begin = static_cast<int64_t>(conflict.begin);
  finding.end = static_cast<int64_t>(conflict.end);
  finding.other_line = conflict.other.line;
  const std::string bytes =
      "bytes " + std::to_string(conflict.begin) + " to " + std::to_string(conflict.end) + " of " + memory;
  const char* does = access == Access::kRead ? "reads " : "writes ";
  if (conflict.barrier) {
    finding.what = std::string(now.name) + " " + (access == Access::kRead ? "loads " : "stores ") + bytes +
                   ", which it stored on line " + std::to_string(conflict.other.line) +
                   ", and no barrier of memory stands between";
  } else {
    finding.what = who(now, now) + " " + does + bytes + ", which " + who(conflict.other, now) + " " +
                   (conflict.other_wrote ? "writes" : "reads") + ", and nothing orders them";
  }
  report(std::move(finding));
}

// What one access does to the history of bytes that it touches.
void pass(History& history, const Event& now, Access access, size_t begin, size_t end,
          std::vector<Conflict>& conflicts) {
  const bool writes = access != Access::kRead;
  const Event& writer = history.writer;
  if (writer.name != nullptr && !(writer.atomic && now.atomic) && !ordered(writer, now))
    note(conflicts, writer, true, false, begin, end);
  const bool in_region = barriers != 0 && writer.name != nullptr && writer.track == now.track &&
                         writer.clock == now.clock && writer.block == now.block;
  if (in_region && history.stored_after > store_barrier) note(conflicts, writer, true, true, begin, end);
  if (!writes) {
    for (Event& reader : history.readers)
      if (reader.track == now.track && reader.block == now.block) {
        reader = now;
        return;
      }
    history.readers.push_back(now);
    return;
  }
  for (const Event& reader : history.readers)
    if (!ordered(reader, now)) note(conflicts, reader, false, false, begin, end);
  history.writer = now;
  history.readers.clear();
  history.stored_after = barriers;
}

}  // namespace

void Shadow::split(size_t at) {
  auto next = segments_.lower_bound(at);
  if (next == segments_.begin() || (next != segments_.end() && next->first == at)) return;
  auto before = std::prev(next);
  if (before->second.end <= at) return;
  segments_.emplace_hint(next, at, Segment{before->second.end, before->second.history});
  before->second.end = at;
}

void Shadow::join_neighbours(size_t begin, size_t end) {
  auto at = segments_.lower_bound(begin);
  if (at != segments_.begin()) --at;
  while (at != segments_.end()) {
    auto next = std::next(at);
    if (next == segments_.end() || next->first > end) return;
    if (at->second.end == next->first && at->second.history == next->second.history) {
      at->second.end = next->second.end;
      segments_.erase(next);
    } else {
      at = next;
    }
  }
}

void Shadow::touch(size_t begin, size_t end, Access access, const char* memory) {
  if (begin == end) return;
  const uint32_t clock = here.core->pipe[here.pipe].issued + 1;
  const Event now{
      here.name, clock, glass_line, here.block->index, static_cast<uint8_t>(here.track()), access == Access::kAtomic};
  std::vector<Conflict> conflicts;
  split(begin);
  split(end);
  size_t at = begin;
  for (auto segment = segments_.lower_bound(begin); at < end;) {
    const bool gap = segment == segments_.end() || segment->first > at;
    if (gap) {
      const size_t until = segment == segments_.end() ? end : std::min(end, segment->first);
      segment = segments_.emplace_hint(segment, at, Segment{until, {}});
    }
    pass(segment->second.history, now, access, at, segment->second.end, conflicts);
    at = segment->second.end;
    ++segment;
  }
  join_neighbours(begin, end);
  for (const Conflict& conflict : conflicts) report_conflict(conflict, now, access, memory);
}

// A store remembers the number, from 1, of the barriers that stand before it in its region. One for loads counts for
// later stores too: what is stored there was computed from what came after it.
void begin_region() { barriers = 1, store_barrier = 0; }
void end_region() { barriers = 0; }

}  // namespace glass

void glass_memory_barrier(int kind) {
  using namespace glass;
  if (kind == decltype(VST_VLD)::value || kind == decltype(VST_VST)::value || kind == decltype(VV_ALL)::value)
    store_barrier = barriers;
  ++barriers;
}
