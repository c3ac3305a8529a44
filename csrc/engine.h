// One call: chunks shared among threads, combined in the order of the tokens.
#pragma once
#include "dispatch.h"
#include "types.h"

namespace pyrlstats {

// Adds tokens [0, count) to the state at `state` (state.py has its layout: counts, histogram, sums,
// maxima).
void accumulate(const Isa& isa, const Plan& plan, int64_t count, int threads, int64_t* state);

// Adds tokens [0, count) to counts[digits.count][kDigits].
void count_digits(const Isa& isa, const Plan& plan, const Digits& digits, int64_t count,
                  int threads, int64_t* counts);

// Where the empty sections of the groups asked for lie; null for the others.
struct GroupSections {
  int64_t *entropy, *probabilities, *truncation, *policy_clip;
};

// Fills the sections, groups.updates and groups.sums from tokens [0, count).
void accumulate_groups(const Isa& isa, const Plan& plan, const GroupPlan& groups,
                       const GroupSections& sections, int64_t count, int threads);

}  // namespace pyrlstats
