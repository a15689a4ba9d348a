// What a launch found: one entry for each kind at each place, with the numbers of the first time and how often it was
// met.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace glass {

struct Finding {
  std::string rule;  // race, deadlock, out_of_bounds, unwritten_read, missing_barrier, flag, step_limit, call
  std::string what;  // a sentence with the numbers
  std::string pipe, other_pipe, memory, core;
  int block = -1;
  int64_t begin = 0, end = 0;  // bytes of the memory, or of the array in global memory
  uint32_t line = 0, other_line = 0;
  uint64_t count = 1;

  std::string json() const;
};

class Findings {
 public:
  void add(Finding finding);
  void merge(const Findings& later);
  const std::vector<Finding>& all() const { return all_; }

 private:
  using Key = std::tuple<std::string, std::string, std::string, std::string, uint32_t, uint32_t>;
  std::vector<Finding> all_;
  std::map<Key, size_t> index_;
};

// Adds to the findings of the block that runs, with its core, pipe, block and line filled in.
void report(Finding finding);

}  // namespace glass
