// Accesses that nothing orders, whatever the schedule of this run was: vector clocks of pipes, and for every byte who
// last wrote it and who has read it since.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "entry.h"

namespace glass {

// An access: which op of which pipe of which block, and where it stands.
struct Event {
  const char* name = nullptr;
  uint32_t clock = 0, line = 0;
  int32_t block = 0;
  uint8_t track = 0;
  bool atomic = false;  // an update that may happen in any order with others of its kind
  bool operator==(const Event&) const = default;
};

struct History {
  Event writer;
  std::vector<Event> readers;  // since it wrote, the last of each pipe
  uint32_t stored_after = 0;   // of stores in a region of vector code: the barrier that they come after
  bool operator==(const History&) const = default;
};

// The accesses to one memory: segments of bytes of one history.
class Shadow {
 public:
  void clear() { segments_.clear(); }
  // Notes an access by the op which runs, and reports earlier ones that it is not ordered after. `memory` is for the
  // message.
  void touch(size_t begin, size_t end, Access access, const char* memory);

 private:
  struct Segment {
    size_t end;
    History history;
  };
  using Segments = std::map<size_t, Segment>;
  void split(size_t at);
  void join_neighbours(size_t begin, size_t end);

  Segments segments_;
};

// Within a region of vector code loads may overtake stores, up to a barrier or the region's end.
void begin_region();
void end_region();

}  // namespace glass
