// IEEE arithmetic with subnormals while in scope, whatever the thread was set to
// (torch.set_flush_denormal).
#pragma once
#include <cstdint>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace pyrlstats {

class FloatMode {
 public:
  FloatMode() : saved_(get()) { set(kDefault); }
  ~FloatMode() { set(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__SSE2__)
  using Word = unsigned;
  static constexpr Word kDefault = 0x1f80;  // no exceptions, to nearest, no flushing
  static Word get() { return _mm_getcsr(); }
  static void set(Word v) { _mm_setcsr(v); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;
  static Word get() {
    Word v;
    asm volatile("mrs %0, fpcr" : "=r"(v));
    return v;
  }
  static void set(Word v) { asm volatile("msr fpcr, %0" ::"r"(v)); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word get() { return 0; }
  static void set(Word) {}
#endif
  Word saved_;
};

}  // namespace pyrlstats
