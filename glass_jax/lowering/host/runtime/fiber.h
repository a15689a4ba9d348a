// A function that can stop in the middle and go on later, in the thread that runs it: a core's scalar program, a SIMT
// thread.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>

namespace glass {

class Fiber {
 public:
  Fiber(std::function<void()> body, size_t stack_bytes);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs until the body suspends itself or ends. Must not be called once it has ended.
  void resume();
  bool ended() const { return ended_; }

  // Called from within a body: returns to whoever resumed it.
  static void suspend();

 private:
  static void enter(unsigned low, unsigned high);

  std::function<void()> body_;
  void* stack_;
  size_t stack_bytes_;
  ucontext_t own_, caller_;
  Fiber* outer_ = nullptr;  // a SIMT thread is resumed while no other fiber of this OS thread runs, or from one
  bool ended_ = false;
};

}  // namespace glass
