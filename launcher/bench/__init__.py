"""`ddp-bench`: measures how fast each collective is here, for each size, and how fast it is in other libraries.

`__main__` and `settings` run before the ranks start. `runner` runs in each rank, and uses `collective_table` (what is
called), `implementations` (of which library) and `expected` (the correct results). `report` prints tables, and writes
JSON and pictures.
"""
