"""`ddp-bench`: how fast each collective is here, for each size, against what else could be used in its place.

`__main__` and `settings` run before the ranks start; `runner` is what runs in each rank, made of `collective_table`
(what is called), `implementations` (by whom) and `expected` (the correct results). `report` prints tables, and writes
JSON and pictures.
"""
