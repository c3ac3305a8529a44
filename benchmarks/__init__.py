"""The benchmark suite: one registry of cases, a correctness gate, a roofline of the same run."""
