#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <new>
#include <vector>

namespace glass {
namespace {

thread_local Fiber* running = nullptr;

// Stacks are kept for the next fiber of their size: a launch makes hundreds. Below each lies a page that must not be
// touched.
class Stacks {
 public:
  ~Stacks() {
    for (auto& [bytes, list] : free_)
      for (void* stack : list) munmap(stack, bytes);
  }
  void* take(size_t bytes) {
    std::vector<void*>& list = free_[bytes];
    if (!list.empty()) {
      void* stack = list.back();
      list.pop_back();
      return stack;
    }
    void* stack = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    mprotect(stack, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
    return stack;
  }
  void give(void* stack, size_t bytes) { free_[bytes].push_back(stack); }

 private:
  std::map<size_t, std::vector<void*>> free_;
};
thread_local Stacks stacks;

}  // namespace

Fiber::Fiber(std::function<void()> body, size_t stack_bytes)
    : body_(std::move(body)), stack_(stacks.take(stack_bytes)), stack_bytes_(stack_bytes) {
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack_;
  own_.uc_stack.ss_size = stack_bytes_;
  own_.uc_link = nullptr;
  const uint64_t self = reinterpret_cast<uint64_t>(this);
  makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(self >> 32));
}

Fiber::~Fiber() { stacks.give(stack_, stack_bytes_); }

void Fiber::enter(unsigned low, unsigned high) {
  Fiber* self = reinterpret_cast<Fiber*>(static_cast<uint64_t>(low) | static_cast<uint64_t>(high) << 32);
  self->body_();
  self->ended_ = true;
  suspend();
}

void Fiber::resume() {
  outer_ = running;
  running = this;
  swapcontext(&caller_, &own_);
  running = outer_;
}

void Fiber::suspend() {
  Fiber* self = running;
  swapcontext(&self->own_, &self->caller_);
}

}  // namespace glass
