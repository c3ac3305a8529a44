// Workspaces of threads, kept between calls: fresh memory would cost page faults (about 100 us a
// call).
#pragma once
#include "dispatch.h"
#include "types.h"

namespace pyrlstats {

// A workspace for one thread while in scope. Throws std::bad_alloc.
class WorkspaceLease {
 public:
  WorkspaceLease(const Isa& isa, const Plan& plan);
  ~WorkspaceLease();
  WorkspaceLease(const WorkspaceLease&) = delete;
  WorkspaceLease& operator=(const WorkspaceLease&) = delete;
  void* memory() const { return memory_; }

 private:
  const Kernels* kernels_;
  uint64_t shape_;
  void* memory_;
  size_t bytes_;
};

}  // namespace pyrlstats
