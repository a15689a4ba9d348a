#include "sync.h"

#include <string>

#include "findings.h"
#include "machine.h"

namespace glass {
namespace {

// An id that the hardware does not have: a finding, and the call has no effect.
bool valid(const char* call, int64_t id, int64_t most) {
  if (id >= 0 && id < most) return true;
  Finding finding;
  finding.rule = "flag";
  finding.what = std::string(call) + " is called with id " + std::to_string(id) + ", but ids go from 0 to " +
                 std::to_string(most - 1);
  report(std::move(finding));
  return false;
}

void signal(Op::Kind kind, pipe_t pipe, int other, int64_t id, const char* name, int64_t most) {
  if (!valid(name, id, most)) return;
  Op op;
  op.kind = kind;
  op.other = static_cast<uint8_t>(other);
  op.id = static_cast<uint8_t>(id);
  op.name = name;
  record(static_cast<Pipe>(pipe), std::move(op));
}

// The program's own waits stop it; what it issues later comes after.
void program_waited(const Clock& clock) {
  join(here.core->pipe[kScalar].clock, clock);
  ++here.core->order;
}

void program_waits(std::deque<Signal>& signals, const std::string& what) {
  if (signals.empty()) wait_until([&signals] { return !signals.empty(); }, what);
  program_waited(signals.front().clock);
  signals.pop_front();
}

void counter(Op::Kind kind, Reach reach, pipe_t pipe, int64_t id, const char* name) {
  const int64_t most = reach == kIntra && here.core->index == 0 ? kIds : 16;
  if (kind == Op::kAwait && pipe == PIPE_S) {
    if (valid(name, id, most))
      program_waits(here.core->counter[reach][id], "counter " + std::to_string(id) + " of another core");
  } else {
    signal(kind, pipe, reach, id, name, most);
  }
}

}  // namespace

bool is_cube_core() { return here.core->index == 0; }

const char* name_of(Pipe pipe) {
  static constexpr const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
  return names[pipe];
}

const char* name_of(Space space) {
  static constexpr const char* names[] = {"UB", "UB", "L1", "L0A", "L0B", "L0C", "L0A's scales", "L0B's scales"};
  return names[space];
}

const char* name_of_core(int core) {
  static constexpr const char* names[] = {"cube", "first vector", "second vector"};
  return names[core];
}

}  // namespace glass

using namespace glass;

int64_t asc_get_sub_block_id() { return here.core->index == 2; }
int64_t asc_get_sub_block_num() { return here.block->launch->kernel->cube ? 2 : 1; }
int64_t asc_get_block_idx() { return here.block->index; }
int64_t asc_get_block_num() { return here.block->launch->request->block_dim; }

void asc_sync_notify(pipe_t from, pipe_t to, event_t id) { signal(Op::kSet, from, to, id, "asc_sync_notify", 8); }

void asc_sync_wait(pipe_t from, pipe_t to, event_t id) {
  if (to != PIPE_S) {
    signal(Op::kWait, to, from, id, "asc_sync_wait", 8);
  } else if (valid("asc_sync_wait", id, 8)) {
    Flag& flag = here.core->flag[from][kScalar][id];
    program_waits(flag.set, "flag " + std::to_string(id) + " from " + name_of(static_cast<Pipe>(from)));
    flag.waits = ++here.core->pipe[kScalar].issued;
    flag.wait_line = glass_line;
  }
}

void asc_sync_pipe(pipe_t pipe) {
  if (pipe == PIPE_ALL || pipe == PIPE_S) return asc_sync();
  signal(Op::kBarrier, pipe, 0, 0, "asc_sync_pipe", 1);
}

void asc_sync() {
  Core& core = *here.core;
  if (core.pending > 0) wait_until([&core] { return core.pending == 0; }, "all of its pipes");
  Clock all{};
  for (int pipe = 0; pipe < kPipes; ++pipe) {
    join(all, core.pipe[pipe].clock);
    all[core.index * kPipes + pipe] = core.pipe[pipe].issued;
  }
  program_waited(all);
}

void asc_lock(pipe_t pipe, int id, ascMutexExecuteMode mode) {
  if (mode == ASC_LOCK_NON_BLOCK || !valid("asc_lock", id, kIds)) return;
  Core& core = *here.core;
  const uint32_t asked = core.locks_asked[id];
  if (pipe == PIPE_S) {
    if (core.unlocked[id] < asked)
      wait_until([&core, id, asked] { return core.unlocked[id] >= asked; }, "mutex " + std::to_string(id));
    return program_waited(core.unlock_clock[id]);
  }
  Op op;
  op.kind = Op::kLock;
  op.id = static_cast<uint8_t>(id);
  op.count = asked;
  op.name = "asc_lock";
  record(static_cast<Pipe>(pipe), std::move(op));
}

void asc_unlock(pipe_t pipe, int id, ascMutexExecuteMode mode) {
  if (mode == ASC_LOCK_NON_BLOCK || !valid("asc_unlock", id, kIds)) return;
  ++here.core->locks_asked[id];
  signal(Op::kUnlock, pipe, 0, id, "asc_unlock", kIds);
}

#define GLASS_COUNTER(name, reach) \
  void asc_sync_##name##_arrive(pipe_t pipe, int64_t id) { \
    counter(Op::kArrive, reach, pipe, id, "asc_sync_" #name "_arrive"); \
  } \
  void asc_sync_##name##_wait(pipe_t pipe, int64_t id) { \
    counter(Op::kAwait, reach, pipe, id, "asc_sync_" #name "_wait"); \
  }
GLASS_COUNTER(intra, kIntra)
GLASS_COUNTER(subblock, kSubblock)
GLASS_COUNTER(block, kWholeBlock)
GLASS_COUNTER(inter, kInter)
#undef GLASS_COUNTER
