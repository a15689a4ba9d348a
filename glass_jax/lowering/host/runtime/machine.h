// The machine that a kernel runs on: blocks of three cores (one cube core, two vector cores), seven pipes a core, and
// the memories that they share. A core's scalar program only records what each pipe shall do; the scheduler does it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "entry.h"
#include "fiber.h"
#include "races.h"

namespace glass {

enum Pipe : uint8_t { kScalar, kV, kM, kMTE1, kMTE2, kMTE3, kFIX, kPipes };  // numbered as pipe_t
enum Space : uint8_t { kUB0, kUB1, kL1, kL0A, kL0B, kL0C, kScaleA, kScaleB, kSpaces };
inline constexpr int kCores = 3, kIds = 32;
inline constexpr int kTracks = kCores * kPipes;  // what a vector clock counts: the pipes of a block

// Bytes of each memory of the 950. 8 KiB of UB belong to the compiler. The scale factors of MX products lie beside L0A
// and L0B, in memories whose addresses are a sixteenth of the data's.
inline constexpr size_t kBytes[kSpaces] = {248 << 10, 248 << 10, 512 << 10, 64 << 10,
                                           64 << 10,  256 << 10, 4 << 10,   4 << 10};

const char* name_of(Pipe pipe);
const char* name_of(Space space);
const char* name_of_core(int core);

// For each pipe of a block how many of its ops are known to have happened; last, which barrier of all blocks.
using Clock = std::array<uint32_t, kTracks + 1>;
void join(Clock& clock, const Clock& other);

// What a pipe does next. Signals carry an identity (a flag, a counter, a lock) and the pipe that they come from or go
// to.
struct Op {
  enum Kind : uint8_t { kWork, kSet, kWait, kLock, kUnlock, kArrive, kAwait, kBarrier, kOrder };
  Kind kind = kWork;
  uint8_t other = 0;  // kSet, kWait: the other pipe; kArrive, kAwait: a Reach
  uint8_t id = 0;
  uint32_t line = 0;   // of the generated source
  uint32_t count = 0;  // kLock: how many unlocks of this id come before it in program order
  const char* name = "";
  std::function<void()> work;
  std::shared_ptr<const Clock> after;  // kOrder: what the program had waited for before it issued the ops that follow
};

// Whom a signal between cores reaches: the other kind of core in the block, the two vector cores, all three, or all
// cores of a kind in all blocks.
enum Reach : uint8_t { kIntra, kSubblock, kWholeBlock, kInter, kReaches };

struct Signal {
  Clock clock;
  uint32_t line;
};

struct Flag {
  std::deque<Signal> set;  // more than one only by a fault
  uint32_t waits = 0;      // which op of the waiting pipe the last wait was
  uint32_t wait_line = 0;
};

struct Queue {
  std::deque<Op> ops;
  Clock clock{};  // of each track, what is known to have happened before the next op; of its own: what has finished
  uint32_t issued = 0;
  uint32_t order = 0;  // which of the program's waits its ops are known to come after
};

struct Core {
  int index = 0;  // 0: cube; 1, 2: vector
  struct Block* block = nullptr;
  Queue pipe[kPipes];
  Flag flag[kPipes][kPipes][kIds];
  std::deque<Signal> counter[kReaches][kIds];
  std::deque<Signal> arrived[kReaches][kIds];  // this core's signals to a group that is not complete yet
  uint32_t locks_asked[kIds] = {}, unlocked[kIds] = {};
  Clock unlock_clock[kIds] = {};
  std::unique_ptr<Fiber> program;  // the scalar program; none where the kernel has nothing for this core
  std::function<bool()> blocked;   // while the program waits: whether it still must
  std::string waits_for;           // and for what, in words
  uint32_t line = 0;               // and where
  uint32_t order = 0;              // how often the program has waited
  uint64_t recorded = 0, pending = 0;
  // Registers that calls set for later ones.
  uint64_t nz_row = 1, nz_column = 1;
  uint32_t pad_value = 0;
  int atomic = 0, atomic_type = 0;
  int hf32 = 0;  // 1: to nearest even; 2: away from zero
  bool hf32_away = false;
};

// Where some bytes are; and, if that is looked for, a flag for each that says that nobody wrote it.
struct Bytes {
  uint8_t* data;
  uint8_t* unwritten;
};

class Memory;
class Findings;
struct Launch;

struct Block {
  int index = 0;
  Launch* launch = nullptr;
  const std::vector<std::unique_ptr<Block>>* together = nullptr;  // it and those that run at the same time
  Memory* memory = nullptr;                                       // of all spaces
  Findings* findings = nullptr;
  Core core[kCores];
};

struct Launch {
  const GlassHostLaunch* request;
  const Kernel* kernel;
  std::vector<void*> arguments;
  std::vector<std::unique_ptr<uint8_t[]>>
      unwritten_flags;                       // of each array, a flag a byte, where unwritten bytes are looked for
  std::vector<Shadow> shadows;               // of the arrays, where races are looked for
  std::vector<std::vector<Clock>> arrivals;  // for each barrier of all blocks, what each block had done when it arrived
  Bytes global(uint32_t buffer, size_t offset) const;
  bool races() const { return request->checks & GLASS_HOST_RACES; }
  bool bounds() const { return request->checks & GLASS_HOST_BOUNDS; }
  bool unwritten() const { return request->checks & GLASS_HOST_UNWRITTEN; }
};

// Where this OS thread is: the block and core whose program or op it runs, and for an op its pipe.
struct Position {
  Block* block = nullptr;
  Core* core = nullptr;
  Pipe pipe = kScalar;
  const char* name = "";
  int track() const { return core->index * kPipes + pipe; }
};
extern thread_local Position here;

// Records an op of a pipe of the core whose program runs. The line is that of the statement which the program is at.
void record(Pipe pipe, Op op);
void record_work(Pipe pipe, const char* name, std::function<void()> work);
// Stops the program until `ready`; `what` says for what it waits.
void wait_until(std::function<bool()> ready, std::string what);

// Runs blocks to their end. False if they cannot go on; findings say why.
bool run_blocks(std::vector<std::unique_ptr<Block>>& blocks);

}  // namespace glass
