// SIMT threads. One runs after the other until it must wait for others: at a barrier of all threads, or in an operation
// that the threads of its warp do together. Then the next ones go on, each on a stack of its own.
#include "simt.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "findings.h"
#include "machine.h"
#include "memory.h"

__thread uint3 threadIdx;
__thread uint3 blockIdx;

namespace glass {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kThreadStack = 64 << 10;

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kEnded };

struct Thread {
  State state = State::kReady;
  Fiber* fiber = nullptr;  // once it has waited
  uint3 index;
  uint32_t line = 0;
  Warp op;
  uint64_t value;
  int argument;
  Type type;
  bool unwritten = false;  // whether what it stores next may depend on bytes of UB that nobody wrote
};

// The region that runs.
struct Region {
  std::vector<Thread> threads;
  unsigned current = 0;
};
thread_local Region* region = nullptr;

void wait_as(State state) {
  Thread& self = region->threads[region->current];
  const unsigned index = region->current;
  self.state = state;
  self.line = glass_line;
  Fiber::suspend();
  region->current = index;
  threadIdx = self.index;
  glass_line = self.line;
}

template <class T>
uint64_t reduce(const std::vector<Thread*>& lanes, Warp op) {
  T result{};
  bool first = true;
  for (const Thread* lane : lanes) {
    T value;
    std::memcpy(&value, &lane->value, sizeof(T));
    if (first) result = value;
    else if (op == Warp::kAdd) result = T(result + value);
    else if (op == Warp::kMax ? result < value : value < result) result = value;
    first = false;
  }
  uint64_t word = 0;
  std::memcpy(&word, &result, sizeof(T));
  return word;
}

// Lanes are added one after the other (assumed).
uint64_t reduce(const std::vector<Thread*>& lanes, Warp op, Type type) {
  switch (type) {
    case Type::kF32: return reduce<float>(lanes, op);
    case Type::kF16: return reduce<half>(lanes, op);
    case Type::kS32: return reduce<int32_t>(lanes, op);
    case Type::kU32: return reduce<uint32_t>(lanes, op);
    case Type::kS64: return reduce<int64_t>(lanes, op);
    default: return reduce<uint64_t>(lanes, op);
  }
}

// The lanes of a warp that wait in it have all arrived: each gets its result.
void do_together(std::vector<Thread>& threads, unsigned begin, unsigned end) {
  std::vector<Thread*> lanes;
  for (unsigned i = begin; i < end; ++i)
    if (threads[i].state == State::kInWarp) lanes.push_back(&threads[i]);
  // Lanes that wait in different operations have parted: those of the first go on first.
  const Warp op = lanes.front()->op;
  std::erase_if(lanes, [op](const Thread* lane) { return lane->op != op; });
  std::array<uint64_t, kWarp> results{};
  const uint64_t reduced =
      op == Warp::kAdd || op == Warp::kMax || op == Warp::kMin ? reduce(lanes, op, lanes.front()->type) : 0;
  for (const Thread* lane : lanes) {
    const unsigned at = static_cast<unsigned>(lane - &threads[begin]);
    uint64_t& result = results[at];
    switch (op) {
      case Warp::kShuffleXor: {
        // From a lane that does not take part: the own value (assumed).
        const unsigned from = at ^ static_cast<unsigned>(lane->argument);
        const bool there = from < end - begin && threads[begin + from].state == State::kInWarp;
        result = there ? threads[begin + from].value : lane->value;
        break;
      }
      case Warp::kBallot:
      case Warp::kActive:
        for (const Thread* other : lanes)
          if (other->value != 0) result |= uint64_t{1} << (other - &threads[begin]);
        break;
      default: result = reduced; break;
    }
  }
  for (Thread* lane : lanes) {
    lane->value = results[lane - &threads[begin]];
    lane->state = State::kReady;
  }
}

// Lets threads that wait go on, if those for which they wait have come. False if nobody can.
bool release(std::vector<Thread>& threads) {
  const unsigned count = static_cast<unsigned>(threads.size());
  bool all_at_barrier = true;
  for (unsigned begin = 0; begin < count; begin += kWarp) {
    const unsigned end = std::min(begin + kWarp, count);
    bool ready = false, in_warp = false;
    for (unsigned i = begin; i < end; ++i) {
      ready |= threads[i].state == State::kReady;
      in_warp |= threads[i].state == State::kInWarp;
    }
    if (!ready && in_warp) {
      do_together(threads, begin, end);
      return true;
    }
    all_at_barrier &= !ready && !in_warp;
  }
  if (!all_at_barrier) return false;
  bool any = false;
  for (Thread& thread : threads)
    if (thread.state == State::kAtBarrier) thread.state = State::kReady, any = true;
  return any;
}

void report_stuck(const std::vector<Thread>& threads) {
  const auto waits = [](const Thread& thread) { return thread.state != State::kEnded; };
  const auto stuck = std::find_if(threads.begin(), threads.end(), waits);
  if (stuck == threads.end()) return;
  Finding finding;
  finding.rule = "deadlock";
  finding.line = stuck->line;
  finding.what = std::to_string(std::count_if(threads.begin(), threads.end(), waits)) + " of " +
                 std::to_string(threads.size()) + " threads wait for others that never come, thread " +
                 std::to_string(stuck - threads.begin()) + " first";
  report(std::move(finding));
}

void run_threads(unsigned x, unsigned y, unsigned z, const std::function<void()>& body) {
  Region here_now;
  here_now.threads.resize(static_cast<size_t>(x) * y * z);
  for (unsigned i = 0; i < here_now.threads.size(); ++i) here_now.threads[i].index = {i % x, i / x % y, i / x / y};
  region = &here_now;
  blockIdx = {static_cast<uint32_t>(block_idx), 0, 0};
  const uint32_t line = glass_line;
  std::vector<std::unique_ptr<Fiber>> fibers;
  unsigned next = 0;
  const auto start_threads = [&] {
    // A stack serves threads one after the other until one has to wait on it; that one keeps it.
    while (next < here_now.threads.size()) {
      const unsigned index = next++;
      here_now.current = index;
      threadIdx = here_now.threads[index].index;
      glass_line = line;
      body();
      here_now.threads[index].state = State::kEnded;
      if (here_now.threads[index].fiber != nullptr) return;
    }
  };
  while (next < here_now.threads.size()) {
    fibers.push_back(std::make_unique<Fiber>(start_threads, kThreadStack));
    fibers.back()->resume();
    if (!fibers.back()->ended()) here_now.threads[here_now.current].fiber = fibers.back().get();
  }
  while (release(here_now.threads))
    for (Thread& thread : here_now.threads)
      while (thread.state == State::kReady) thread.fiber->resume();
  report_stuck(here_now.threads);
  region = nullptr;
}

}  // namespace

void* element(const void* at, size_t size, Access access) {
  const Space ub = own_ub();
  const uintptr_t base = reinterpret_cast<uintptr_t>(here.block->memory->data(ub)),
                  address = reinterpret_cast<uintptr_t>(at);
  const bool in_ub = address < (1u << 20) || (address >= base && address < base + kBytes[ub]);
  const Bytes bytes = in_ub ? on_chip(ub, at, size, access) : in_global(at, size, access);
  if (here.pipe == kScalar) ++here.core->pipe[kScalar].issued;
  if (bytes.unwritten == nullptr) return bytes.data;
  // Threads compute whole tiles, also where nothing was loaded and nothing will be stored: as for registers of vectors,
  // what was not written counts where it reaches global memory. The next store of a thread that read it depends on it.
  Thread* thread = region == nullptr ? nullptr : &region->threads[region->current];
  const bool follows = in_ub && thread != nullptr && access != Access::kAtomic;
  if (follows && access == Access::kRead) {
    thread->unwritten |= std::memchr(bytes.unwritten, 1, size) != nullptr;
    return bytes.data;
  }
  if (access != Access::kWrite || (thread != nullptr && thread->unwritten && !in_ub)) {
    const InArray place =
        in_ub ? InArray{0, static_cast<int64_t>(address < base ? address : address - base), true} : locate(at, size);
    const char* memory = in_ub ? name_of(ub) : here.block->launch->request->buffers[place.buffer].name;
    if (access == Access::kWrite) std::memset(bytes.unwritten, 1, size);
    const char* does = access == Access::kWrite ? "stores what depends on bytes that nobody wrote:" : "reads what nobody wrote:";
    check_written(bytes, size, memory, place.offset, does);
  }
  if (access == Access::kRead) return bytes.data;
  std::memset(bytes.unwritten, follows && thread->unwritten, size);
  if (thread != nullptr) thread->unwritten = false;
  return bytes.data;
}

void record_threads(const char* name, unsigned x, unsigned y, unsigned z, void (*run)(const void* arguments),
                    const void* arguments, size_t size) {
  std::vector<uint64_t> copy((size + 7) / 8);
  std::memcpy(copy.data(), arguments, size);
  record_work(kV, name, [=] { run_threads(x, y, z, [&] { run(copy.data()); }); });
}

uint64_t warp(Warp op, uint64_t value, int argument, Type type) {
  Thread& self = region->threads[region->current];
  self.op = op, self.value = value, self.argument = argument, self.type = type;
  wait_as(State::kInWarp);
  return self.value;
}

namespace {

template <class T>
uint64_t update(Atomic op, uint8_t* at, uint64_t word) {
  T old, value;
  std::memcpy(&old, at, sizeof(T));
  std::memcpy(&value, &word, sizeof(T));
  const T result = op == Atomic::kAdd ? T(old + value) : (op == Atomic::kMax) == (old < value) ? value : old;
  std::memcpy(at, &result, sizeof(T));
  uint64_t before = 0;
  std::memcpy(&before, &old, sizeof(T));
  return before;
}

}  // namespace

uint64_t atomic(Atomic op, void* at, uint64_t value, Type type) {
  uint8_t* to = static_cast<uint8_t*>(element(at, bytes_of(type), Access::kAtomic));
  switch (type) {
    case Type::kF32: return update<float>(op, to, value);
    case Type::kF16: return update<half>(op, to, value);
    case Type::kBF16: return update<bfloat16_t>(op, to, value);
    case Type::kS32: return update<int32_t>(op, to, value);
    case Type::kU32: return update<uint32_t>(op, to, value);
    case Type::kS64: return update<int64_t>(op, to, value);
    default: return update<uint64_t>(op, to, value);
  }
}

uint8_t* ub_base() { return here.block->memory->data(own_ub()); }

void record_region(const char* name, void (*run)(const uint64_t* arguments), const uint64_t* arguments, int count) {
  record_work(kV, name, [run, words = std::vector<uint64_t>(arguments, arguments + count)] {
    begin_region();
    run(words.data());
    end_region();
  });
}

}  // namespace glass

void asc_syncthreads() { glass::wait_as(glass::State::kAtBarrier); }
uint32_t laneid() { return glass::region->current % glass::kWarp; }
