"""`ddp-bench`: measures how fast each collective is here, for each size, and how fast it is in other libraries.

`__main__` and `settings` run before the ranks start, and again in each rank. `runner` runs in the ranks, and uses
`collective_table` (the collectives), `implementations` (the libraries) and `expected` (the correct results). `report`
makes tables, and writes JSON and plots.
"""
