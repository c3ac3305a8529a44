// Which instruction sets this build has, and which of them this machine can run.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace pyrlstats {

struct Isa {
  const char* name;
  const char* flags;  // what its kernels were compiled with
  bool (*usable)();
  const Kernels* kernels;
};

// Best first.
const std::vector<Isa>& instruction_sets();

// The one of that name; where it is empty, the one PYRLSTATS_ISA names, else the best usable one.
// Throws std::invalid_argument, with the names known, for an unknown or unusable one.
const Isa& choose_isa(const std::string& name);

}  // namespace pyrlstats
