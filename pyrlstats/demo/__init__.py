"""``pyrlstats demo``: train a small tool-using agent from scratch and show its log-ratio tails slice by slice.

Nothing in here is imported by ``import pyrlstats``; it needs the extra ``pyrlstats[demo]``.
"""
