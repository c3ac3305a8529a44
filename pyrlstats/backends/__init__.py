"""Engines that fill a state from a batch of tokens: one file each, every one with ``accumulate``."""
