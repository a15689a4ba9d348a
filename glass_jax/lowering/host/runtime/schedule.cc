// Runs a block: the scalar programs as far as they go, then pipes in the order that a policy chooses, until all is
// done.
#include <algorithm>
#include <string>

#include "findings.h"
#include "machine.h"

__thread uint32_t glass_line = 0;
__thread int block_idx = 0;

namespace glass {

thread_local Position here;

namespace {

constexpr uint64_t kMostPending = 1 << 16;  // a program that is so far ahead of its pipes waits for them
constexpr uint64_t kMostOps = 1 << 22;      // a block with more than so many is taken to be one that never ends

// A generator of its own: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

bool ready(const Core& core, Pipe pipe) {
  if (core.pipe[pipe].ops.empty()) return false;
  const Op& op = core.pipe[pipe].ops.front();
  switch (op.kind) {
    case Op::kWait: return !core.flag[op.other][pipe][op.id].set.empty();
    case Op::kAwait: return !core.counter[op.other][op.id].empty();
    case Op::kLock: return core.unlocked[op.id] >= op.count;
    default: return true;
  }
}

Clock finished(const Core& core, Pipe pipe) {
  Clock clock = core.pipe[pipe].clock;
  clock[core.index * kPipes + pipe] = core.pipe[pipe].issued;
  return clock;
}

void flag_finding(const std::string& what, uint32_t other_line) {
  Finding finding;
  finding.rule = "flag";
  finding.what = what;
  finding.other_line = other_line;
  report(std::move(finding));
}

// Sets a flag. It must have been waited for since it was last set, and not by chance: the wait must be ordered before.
void set_flag(Core& core, Pipe pipe, const Op& op) {
  const Pipe other = static_cast<Pipe>(op.other);
  Flag& flag = core.flag[pipe][other][op.id];
  const std::string what = "flag " + std::to_string(op.id) + " from " + name_of(pipe) + " to " + name_of(other);
  if (!flag.set.empty()) {
    flag_finding(what + " is set again before it was waited for", flag.set.front().line);
  } else if (flag.waits != 0 && core.pipe[pipe].clock[core.index * kPipes + other] < flag.waits && pipe != other) {
    flag_finding(what + " may be set again before it was waited for: nothing orders the wait before this",
                 flag.wait_line);
  }
  flag.set.push_back({finished(core, pipe), op.line});
}

void raise(std::deque<Signal>& counter, Signal signal, const std::string& what) {
  if (counter.size() == 15)
    flag_finding(what + " is raised for the sixteenth time before it is waited for; it counts to 15",
                 counter.front().line);
  counter.push_back(signal);
}

// A signal between cores goes to all whom it may concern.
void arrive(Block& block, Core& core, const Op& op) {
  const Signal signal{finished(core, here.pipe), op.line};
  const std::string what = "counter " + std::to_string(op.id) + " between cores";
  if (op.other == kIntra) {
    // The vector cores' signals 0 to 15 are the cube core's 0 to 15 and 16 to 31, and the other way round.
    if (core.index == 0) raise(block.core[op.id < 16 ? 1 : 2].counter[kIntra][op.id & 15], signal, what);
    else raise(block.core[0].counter[kIntra][op.id + 16 * (core.index - 1)], signal, what);
    return;
  }
  // A group's counter rises once all of the group have arrived; each then waits for its own.
  std::vector<Core*> group;
  for (const std::unique_ptr<Block>& each : *block.together)
    for (Core& other : each->core) {
      if (op.other != kInter && each.get() != &block) continue;
      if (op.other != kWholeBlock && (other.index == 0) != (core.index == 0)) continue;
      if (other.program != nullptr) group.push_back(&other);
    }
  core.arrived[op.other][op.id].push_back(signal);
  if (!std::all_of(group.begin(), group.end(), [&](Core* c) { return !c->arrived[op.other][op.id].empty(); })) return;
  // What all of a block had done is known to its own cores as a clock, and to the others by the barrier's number.
  std::vector<Clock> done(op.other == kInter ? block.launch->request->block_dim : 0);
  Clock own{};
  for (Core* member : group) {
    const Clock& clock = member->arrived[op.other][op.id].front().clock;
    if (op.other == kInter) join(done[member->block->index], clock);
    else join(own, clock);
    member->arrived[op.other][op.id].pop_front();
  }
  std::vector<std::vector<Clock>>& arrivals = block.launch->arrivals;
  if (op.other == kInter) {
    if (!arrivals.empty())
      for (size_t i = 0; i < done.size(); ++i) join(done[i], arrivals.back()[i]);
    arrivals.push_back(done);
  }
  for (Core* member : group) {
    Signal all{op.other == kInter ? done[member->block->index] : own, op.line};
    if (op.other == kInter) all.clock[kTracks] = static_cast<uint32_t>(arrivals.size());
    raise(member->counter[op.other][op.id], all, what);
  }
}

// Does what an op says, in the place that `here` tells.
void execute(const Op& op) {
  Block& block = *here.block;
  Core& core = *here.core;
  const Pipe pipe = here.pipe;
  Queue& queue = core.pipe[pipe];
  switch (op.kind) {
    case Op::kWork:
      op.work();
      ++queue.issued;
      break;
    case Op::kSet: set_flag(core, pipe, op); break;
    case Op::kWait: {
      Flag& flag = core.flag[op.other][pipe][op.id];
      join(queue.clock, flag.set.front().clock);
      flag.set.pop_front();
      flag.waits = ++queue.issued;  // a wait counts as an op, so that a later signal tells that it is over
      flag.wait_line = op.line;
      break;
    }
    case Op::kLock: join(queue.clock, core.unlock_clock[op.id]); break;
    case Op::kUnlock:
      ++core.unlocked[op.id];
      join(core.unlock_clock[op.id], finished(core, pipe));
      break;
    case Op::kArrive: arrive(block, core, op); break;
    case Op::kAwait: {
      std::deque<Signal>& counter = core.counter[op.other][op.id];
      join(queue.clock, counter.front().clock);
      counter.pop_front();
      break;
    }
    case Op::kBarrier: queue.clock[core.index * kPipes + pipe] = queue.issued; break;
    case Op::kOrder: join(queue.clock, *op.after); break;
  }
}

void step(Block& block, Core& core, Pipe pipe) {
  Queue& queue = core.pipe[pipe];
  const Op op = std::move(queue.ops.front());
  queue.ops.pop_front();
  --core.pending;
  here = {&block, &core, pipe, op.name};
  glass_line = op.line;
  block_idx = block.index;
  execute(op);
}

// Goes on with a core's program. False if it ended or must still wait.
bool advance(Block& block, Core& core) {
  if (core.program == nullptr || core.program->ended()) return false;
  if (core.blocked && core.blocked()) return false;
  core.blocked = nullptr;
  here = {&block, &core, kScalar, "the scalar program"};
  block_idx = block.index;
  glass_line = core.line;
  core.program->resume();
  core.line = glass_line;
  return true;
}

std::string waiting(const Core& core, Pipe pipe) {
  const Op& op = core.pipe[pipe].ops.front();
  const std::string id = std::to_string(op.id);
  std::string what = std::string(name_of(pipe)) + " of the " + name_of_core(core.index) + " core (line " +
                     std::to_string(op.line) + ") waits for ";
  if (op.kind == Op::kWait) what += "flag " + id + " from " + name_of(Pipe(op.other));
  else if (op.kind == Op::kAwait) what += "counter " + id + " of another core";
  else
    what += "mutex " + id + ", unlocked " + std::to_string(core.unlocked[op.id]) + " of " + std::to_string(op.count) +
            " times";
  return what;
}

bool any_left(Block& block) {
  std::string what;
  Finding finding;
  for (Core& core : block.core) {
    here = {&block, &core, kScalar, ""};
    if (core.program != nullptr && !core.program->ended()) {
      what += (what.empty() ? "" : "; ") + std::string("the program of the ") + name_of_core(core.index) +
              " core (line " + std::to_string(core.line) + ") waits for " + core.waits_for;
      if (finding.line == 0)
        finding.line = core.line, finding.pipe = name_of(kScalar), finding.core = name_of_core(core.index);
    }
    for (int p = 0; p < kPipes; ++p) {
      const Pipe pipe = static_cast<Pipe>(p);
      if (core.pipe[pipe].ops.empty()) continue;
      what += (what.empty() ? "" : "; ") + waiting(core, pipe);
      const Op& op = core.pipe[pipe].ops.front();
      if (finding.line == 0)
        finding.line = op.line, finding.pipe = name_of(pipe), finding.core = name_of_core(core.index);
      if (finding.other_pipe.empty() && op.kind == Op::kWait) finding.other_pipe = name_of(Pipe(op.other));
    }
  }
  if (what.empty()) return false;
  finding.rule = "deadlock";
  finding.what = "nothing can go on: " + what;
  report(std::move(finding));
  return true;
}

void check_left_signals(Block& block) {
  for (Core& core : block.core) {
    here = {&block, &core, kScalar, ""};
    for (int from = 0; from < kPipes; ++from)
      for (int to = 0; to < kPipes; ++to)
        for (int id = 0; id < kIds; ++id)
          if (!core.flag[from][to][id].set.empty()) {
            glass_line = core.flag[from][to][id].set.front().line;
            here.pipe = static_cast<Pipe>(from);
            flag_finding("flag " + std::to_string(id) + " from " + name_of(Pipe(from)) + " to " + name_of(Pipe(to)) +
                             " is still set at the end: the next kernel finds it so",
                         0);
          }
    for (int reach = 0; reach < kReaches; ++reach)
      for (int id = 0; id < kIds; ++id)
        if (!core.counter[reach][id].empty()) {
          glass_line = core.counter[reach][id].front().line;
          here.pipe = kScalar;
          flag_finding(
              "counter " + std::to_string(id) + " between cores is above 0 at the end: the next kernel finds it so", 0);
        }
  }
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void record(Pipe pipe, Op op) {
  Core& core = *here.core;
  Queue& queue = core.pipe[pipe];
  op.line = glass_line;
  if (pipe == kScalar) return execute(op);  // the program is its own pipe, and never waits here
  if (core.recorded == kMostOps) {
    Finding finding;
    finding.rule = "step_limit";
    finding.what = "the program has issued " + std::to_string(kMostOps) + " instructions and is taken not to end";
    report(std::move(finding));
    wait_until([] { return false; }, "its end, which does not come");
  }
  if (queue.order != core.order) {
    queue.order = core.order;
    Op order;
    order.kind = Op::kOrder;
    order.line = op.line;
    order.after = std::make_shared<const Clock>(core.pipe[kScalar].clock);
    queue.ops.push_back(std::move(order));
    ++core.pending;
  }
  queue.ops.push_back(std::move(op));
  ++core.recorded, ++core.pending;
  if (core.pending > kMostPending)
    wait_until([&core] { return core.pending < kMostPending / 2; }, "its pipes to catch up");
}

void record_work(Pipe pipe, const char* name, std::function<void()> work) {
  Op op;
  op.name = name;
  op.work = std::move(work);
  record(pipe, std::move(op));
}

void wait_until(std::function<bool()> is_ready, std::string what) {
  Core& core = *here.core;
  const Position place = here;
  const uint32_t line = glass_line;
  core.blocked = [is_ready = std::move(is_ready)] { return !is_ready(); };
  core.waits_for = std::move(what);
  Fiber::suspend();
  here = place;
  glass_line = line;
  block_idx = place.block->index;
}

bool run_blocks(std::vector<std::unique_ptr<Block>>& blocks) {
  for (const std::unique_ptr<Block>& block : blocks) block->together = &blocks;
  const GlassHostLaunch& request = *blocks.front()->launch->request;
  static constexpr Pipe early[] = {kMTE2, kMTE1, kM, kV, kFIX, kMTE3}, late[] = {kMTE3, kFIX, kV, kM, kMTE1, kMTE2};
  const Pipe* order = request.policy == GLASS_HOST_LOADS_LAST ? late : early;
  Random random(request.seed * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(blocks.front()->index) + 1);
  struct Place {
    Block* block;
    Core* core;
    Pipe pipe;
  };
  std::vector<Place> places;
  for (const std::unique_ptr<Block>& block : blocks)
    for (Core& core : block->core)
      if (core.program != nullptr)
        for (int i = 0; i < 6; ++i) places.push_back({block.get(), &core, order[i]});
  const auto do_step = [](const Place& place) { step(*place.block, *place.core, place.pipe); };
  size_t turn = 0;
  std::vector<size_t> can;
  for (bool going = true; going;) {
    going = false;
    for (const std::unique_ptr<Block>& block : blocks)
      for (Core& core : block->core) going |= advance(*block, core);
    switch (request.policy) {
      case GLASS_HOST_RANDOM:
        can.clear();
        for (size_t i = 0; i < places.size(); ++i)
          if (ready(*places[i].core, places[i].pipe)) can.push_back(i);
        if (!can.empty()) going = true, do_step(places[can[random.next() % can.size()]]);
        break;
      case GLASS_HOST_LOADS_FIRST:
      case GLASS_HOST_LOADS_LAST:
        // The first that can goes as far as it can.
        for (const Place& place : places)
          if (ready(*place.core, place.pipe)) {
            going = true;
            while (ready(*place.core, place.pipe)) do_step(place);
            break;
          }
        break;
      default:
        for (size_t i = 0; i < places.size(); ++i) {
          const Place& place = places[(turn + i) % places.size()];
          if (!ready(*place.core, place.pipe)) continue;
          going = true;
          do_step(place);
          turn = (turn + i + 1) % places.size();
          break;
        }
    }
  }
  bool done = true;
  for (const std::unique_ptr<Block>& block : blocks) {
    if (any_left(*block)) done = false;
    else check_left_signals(*block);
  }
  return done;
}

}  // namespace glass
