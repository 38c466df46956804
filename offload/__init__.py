"""Carrying a plan out on real memory: tiers, lanes, disk, weight store, KV pages, executor."""
