#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

namespace pyrlstats {

#define DECLARE(isa)             \
  namespace isa {                \
  extern const Kernels kKernels; \
  }
#ifdef HAVE_ISA_AVX512
DECLARE(avx512)
#endif
#ifdef HAVE_ISA_AVX2
DECLARE(avx2)
#endif
#ifdef HAVE_ISA_NEON
DECLARE(neon)
#endif
DECLARE(portable)

namespace {

bool always() { return true; }

// Every feature that the flags allow the compiler to use.
#ifdef HAVE_ISA_AVX2
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi");
}
#endif
#ifdef HAVE_ISA_AVX512
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const std::vector<Isa>& instruction_sets() {
  static const auto* const all = new std::vector<Isa>{
#ifdef HAVE_ISA_AVX512
      {"avx512", FLAGS_AVX512, has_avx512, &avx512::kKernels},
#endif
#ifdef HAVE_ISA_AVX2
      {"avx2", FLAGS_AVX2, has_avx2, &avx2::kKernels},
#endif
#ifdef HAVE_ISA_NEON
      {"neon", FLAGS_NEON, always, &neon::kKernels},  // part of every arm64
#endif
      {"portable", FLAGS_PORTABLE, always, &portable::kKernels},
  };
  return *all;
}

const Isa& choose_isa(const std::string& name) {
  const char* forced = std::getenv("PYRLSTATS_ISA");
  const std::string wanted = !name.empty() ? name : forced ? forced : "";
  std::string usable;
  for (const Isa& isa : instruction_sets()) {
    if (!isa.usable()) continue;
    if (wanted.empty() || wanted == isa.name) return isa;
    usable += (usable.empty() ? "" : ", ") + std::string(isa.name);
  }
  throw std::invalid_argument("instruction set \"" + wanted +
                              "\" is unknown or not usable on this machine; usable: " + usable);
}

}  // namespace pyrlstats
