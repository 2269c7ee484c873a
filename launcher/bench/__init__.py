"""`ddp-bench`: how fast each collective is here, for each size, beside what else could be used in its place.

This file imports nothing. `cli`, `settings` and `preflight` come before the ranks, and need no NumPy; `rank` is what
runs in each of them, made of `kinds` (what is called), `implementations` (by whom), `expected` (what must come out),
`timing`, `table` and `fit`; `record` and `plot` are what is kept.
"""
