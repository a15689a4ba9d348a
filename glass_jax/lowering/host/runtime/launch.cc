// A launch: arguments, blocks and the threads that share them, findings.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "findings.h"
#include "machine.h"
#include "memory.h"

namespace glass {
namespace {

std::unique_ptr<Block> new_block(Launch& launch, int index, Memory& memory, Findings& findings) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->launch = &launch;
  block->memory = &memory;
  block->findings = &findings;
  const Kernel& kernel = *launch.kernel;
  for (int i = 0; i < kCores; ++i) {
    Core& core = block->core[i];
    core.index = i;
    core.block = block.get();
    // A kernel without a cube part runs on one vector core a block.
    const bool runs = i == 0 ? kernel.cube : kernel.vector && (i == 1 || kernel.cube);
    if (runs)
      core.program = std::make_unique<Fiber>([&launch, &kernel] { kernel.entry(launch.arguments.data()); }, 1 << 20);
  }
  return block;
}

// Runs blocks one after the other until there are no more.
bool run_in_thread(Launch& launch, std::atomic<uint32_t>& next, std::vector<Findings>& findings) {
  Memory memory(launch.unwritten());
  bool done = true;
  for (uint32_t i = next++; i < launch.request->block_dim; i = next++) {
    memory.poison();
    std::vector<std::unique_ptr<Block>> one;
    one.push_back(new_block(launch, static_cast<int>(i), memory, findings[i]));
    done &= run_blocks(one);
  }
  return done;
}

bool run_together(Launch& launch, std::vector<Findings>& findings) {
  std::vector<std::unique_ptr<Memory>> memories;
  std::vector<std::unique_ptr<Block>> blocks;
  for (uint32_t i = 0; i < launch.request->block_dim; ++i) {
    memories.push_back(std::make_unique<Memory>(launch.unwritten()));
    memories.back()->poison();
    blocks.push_back(new_block(launch, static_cast<int>(i), *memories.back(), findings[i]));
  }
  return run_blocks(blocks);
}

}  // namespace

Bytes Launch::global(uint32_t buffer, size_t offset) const {
  uint8_t* flags = unwritten_flags.empty() ? nullptr : unwritten_flags[buffer].get();
  return {static_cast<uint8_t*>(request->buffers[buffer].data) + offset, flags == nullptr ? nullptr : flags + offset};
}

int run_kernel(const GlassHostLaunch* request, const Kernel& kernel) {
  if (request->abi != GLASS_HOST_ABI) return 1;
  Launch launch;
  launch.request = request;
  launch.kernel = &kernel;
  for (uint32_t i = 0; i < request->num_buffers; ++i) launch.arguments.push_back(request->buffers[i].data);
  if (launch.races()) launch.shadows.resize(request->num_buffers);
  if (launch.unwritten())
    for (uint32_t i = 0; i < request->num_buffers; ++i) {
      const GlassHostBuffer& buffer = request->buffers[i];
      launch.unwritten_flags.emplace_back(buffer.result ? new uint8_t[buffer.bytes] : nullptr);
      if (buffer.result) std::memset(launch.unwritten_flags.back().get(), 1, buffer.bytes);
    }
  std::vector<Findings> findings(request->block_dim);
  bool done = true;
  if (request->block_dim > 0 && kernel.together) {
    done = run_together(launch, findings);
  } else {
    // Checks keep shadows of global memory, which blocks share.
    const bool one_by_one = kernel.ordered || launch.races() || launch.unwritten();
    const uint32_t threads =
        one_by_one ? 1 : std::clamp<uint32_t>(request->threads, 1, std::max<uint32_t>(request->block_dim, 1));
    std::atomic<uint32_t> next{0};
    std::atomic<bool> all_done{true};
    const auto work = [&] {
      if (!run_in_thread(launch, next, findings)) all_done = false;
    };
    std::vector<std::thread> others;
    for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    done = all_done;
  }
  here = {};
  Findings all;
  for (const Findings& of_block : findings) all.merge(of_block);
  if (request->report != nullptr)
    for (const Finding& finding : all.all()) request->report(request->context, finding.json().c_str());
  return done ? 0 : 1;
}

}  // namespace glass
