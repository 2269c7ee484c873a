"""`ddp-bench`: how fast each collective is here, for each size, against what else could be used in its place.

`__main__` and `settings` run before the ranks, and need no NumPy; `worker` is what runs in each of them, made of
`collective_table` (what is called), `implementations` (by whom) and `expected` (what must come out). `report` prints
tables, and writes JSON and pictures.
"""
