#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace pyrlstats {
namespace {

class Pool {
 public:
  // False where another call has the pool.
  bool run(int threads, const std::function<void(int)>& task) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < threads - 1) start_worker();
      task_ = &task;
      wanted_ = running_ = threads - 1;
      ++round_;
    }
    wake_.notify_all();
    task(0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return running_ == 0; });
    task_ = nullptr;
    return true;
  }

 private:
  void start_worker() {
    const int index = ++workers_;
    std::thread([this, index, seen = round_] { work(index, seen); }).detach();
  }

  void work(int index, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (index > wanted_) continue;
      const std::function<void(int)>* task = task_;
      lock.unlock();
      (*task)(index);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int)>* task_ = nullptr;
  int workers_ = 0, wanted_ = 0, running_ = 0;
  uint64_t round_ = 0;
};

// Never destroyed: its threads outlive the interpreter's end.
std::atomic<Pool*> pool{nullptr};

Pool& shared_pool() {
  static std::mutex making;
  if (Pool* made = pool.load()) return *made;
  // The child of a fork has none of the threads, and perhaps a locked mutex: it forgets the
  // parent's pool.
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool.store(nullptr);
    new (&making) std::mutex;
  });
  (void)registered;
  std::lock_guard<std::mutex> lock(making);
  if (!pool.load()) pool.store(new Pool);
  return *pool.load();
}

}  // namespace

void run_on_threads(int threads, const std::function<void(int)>& task) {
  if (threads < 2 || !shared_pool().run(threads, task)) task(0);
}

}  // namespace pyrlstats
