// The vector type of the instruction set that this object is compiled for (ISA): each header
// defines the same names, so that the algorithm is written once.
#pragma once
#include "types.h"

#define SIMD_STRING(name) #name
#define SIMD_FILE(name) SIMD_STRING(simd_##name.h)
#define SIMD_HEADER(name) SIMD_FILE(name)
#include SIMD_HEADER(ISA)
