// NEON's intrinsics on a machine without NEON: SIMDe's.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>
