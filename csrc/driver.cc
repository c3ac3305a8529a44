// Runs the engine without Python, for tests under an emulator: argv = instruction set, threads;
// stdin = a batch as tests/test_cpp.py writes it; stdout = the state.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dispatch.h"
#include "engine.h"

using namespace pyrlstats;

template <typename T>
static std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return values;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::vector<int64_t> head = read<int64_t>(10);
  const int64_t count = head[0], slices = head[1], words = head[2];
  const bool by_id = head[3];
  const std::vector<double> clip = read<double>(2);
  Plan plan{};
  const int64_t steps[] = {kItemSize[head[4]], kItemSize[head[5]], kItemSize[head[6]]};
  const std::vector<char> logp = read<char>(count * steps[0]),
                          old_logp = read<char>(count * steps[1]);
  const std::vector<char> members = read<char>(count * steps[2] * (by_id ? 1 : slices));
  std::vector<int64_t> state = read<int64_t>(words);
  plan.logp = {logp.data(), (int)head[4], 1, &count, &steps[0]};
  plan.old_logp = {old_logp.data(), (int)head[5], 1, &count, &steps[1]};
  std::vector<Operand> masks;
  for (int64_t s = 0; s < (by_id ? 1 : slices); ++s) {
    masks.push_back({members.data() + s * count * steps[2], (int)head[6], 1, &count, &steps[2]});
  }
  (by_id ? plan.ids : plan.masks) = masks.data();
  plan.slices = slices;
  plan.mantissa_bits = (int)head[7];
  plan.min_exp = (int)head[8];
  plan.max_exp = (int)head[9];
  plan.clip_low = (float)clip[0];
  plan.clip_high = (float)clip[1];
  accumulate(choose_isa(argv[1]), plan, count, std::atoi(argv[2]), state.data());
  return std::fwrite(state.data(), sizeof(int64_t), state.size(), stdout) == state.size() ? 0 : 1;
}
