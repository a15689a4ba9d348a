#include "findings.h"

#include <cstdio>

#include "machine.h"

namespace glass {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

std::string Finding::json() const {
  std::string out = "{\"rule\": " + quoted(rule) + ", \"what\": " + quoted(what);
  const auto text = [&](const char* name, const std::string& value) {
    if (!value.empty()) out += std::string(", \"") + name + "\": " + quoted(value);
  };
  const auto number = [&](const char* name, int64_t value, bool there) {
    if (there) out += std::string(", \"") + name + "\": " + std::to_string(value);
  };
  text("pipe", pipe);
  text("other_pipe", other_pipe);
  text("memory", memory);
  text("core", core);
  number("block", block, block >= 0);
  number("begin", begin, begin != end);
  number("end", end, begin != end);
  number("line", line, line > 0);
  number("other_line", other_line, other_line > 0);
  number("count", static_cast<int64_t>(count), true);
  return out + "}";
}

void Findings::add(Finding finding) {
  const Key key{finding.rule, finding.pipe, finding.other_pipe, finding.memory, finding.line, finding.other_line};
  const auto [at, is_new] = index_.try_emplace(key, all_.size());
  if (is_new) all_.push_back(std::move(finding));
  else all_[at->second].count += finding.count;
}

void Findings::merge(const Findings& later) {
  for (const Finding& finding : later.all_) add(finding);
}

void report(Finding finding) {
  if (here.core != nullptr) {
    if (finding.pipe.empty()) finding.pipe = name_of(here.pipe);
    if (finding.core.empty()) finding.core = name_of_core(here.core->index);
  }
  if (finding.block < 0) finding.block = here.block->index;
  if (finding.line == 0) finding.line = glass_line;
  here.block->findings->add(std::move(finding));
}

}  // namespace glass
