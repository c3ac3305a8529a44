// A few threads that wait for work, shared by every call of the process.
#pragma once
#include <functional>

namespace pyrlstats {

// Runs task(0) .. task(threads - 1) at once, the first on the calling thread, and returns when all
// are done. Where another call has the pool the calling thread runs task(0) alone: tasks must share
// their work by themselves. Safe after fork: the child starts a pool of its own. task must not
// throw.
void run_on_threads(int threads, const std::function<void(int)>& task);

}  // namespace pyrlstats
