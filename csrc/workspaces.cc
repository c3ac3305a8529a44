#include "workspaces.h"

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

namespace pyrlstats {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kKept = 32;  // at most so many idle workspaces

struct Idle {
  const Kernels* kernels;
  uint64_t shape;  // what the memory's division depends on
  void* memory;
  size_t bytes;
};

struct Shelf {
  std::mutex mutex;
  std::vector<Idle> idle;
};

Shelf* shelf = nullptr;

Shelf& shared_shelf() {
  // The child of a fork may have inherited a locked mutex: it leaves the parent's shelf alone.
  static const int registered = [] {
    shelf = new Shelf;
    return pthread_atfork(nullptr, nullptr, [] { shelf = new Shelf; });
  }();
  (void)registered;
  return *shelf;
}

uint64_t shape_of(const Plan& plan) {
  return (uint64_t)plan.slices << 32 | (uint64_t)(plan.ids != nullptr) << 31 |
         (uint64_t)plan.mantissa_bits << 16 | (uint64_t)(uint8_t)plan.min_exp << 8 |
         (uint64_t)(uint8_t)plan.max_exp;
}

}  // namespace

WorkspaceLease::WorkspaceLease(const Isa& isa, const Plan& plan)
    : kernels_(isa.kernels), shape_(shape_of(plan)) {
  Shelf& from = shared_shelf();
  {
    std::lock_guard<std::mutex> lock(from.mutex);
    for (size_t i = from.idle.size(); i-- > 0;) {
      if (from.idle[i].kernels == kernels_ && from.idle[i].shape == shape_) {
        memory_ = from.idle[i].memory;
        bytes_ = from.idle[i].bytes;
        from.idle.erase(from.idle.begin() + (std::ptrdiff_t)i);
        return;
      }
    }
  }
  bytes_ = (kernels_->workspace_bytes(plan) + kPage - 1) / kPage * kPage;
  // zero pages from the system: most of a workspace is never touched
  memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
}

WorkspaceLease::~WorkspaceLease() {
  Shelf& to = shared_shelf();
  std::lock_guard<std::mutex> lock(to.mutex);
  to.idle.push_back({kernels_, shape_, memory_, bytes_});
  if (to.idle.size() > kKept) {
    munmap(to.idle.front().memory, to.idle.front().bytes);
    to.idle.erase(to.idle.begin());
  }
}

}  // namespace pyrlstats
