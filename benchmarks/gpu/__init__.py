"""What a GPU can show of this runtime: whether it works, and how fast it is beside PyTorch on the same GPU.

    python -m benchmarks.gpu.first    # less than ten minutes: both
    python -m benchmarks.gpu          # the second alone, with more rounds

`tasks` says what is trained, `worker` is a process that trains it with one library, `__main__` has the promises, lets
the processes take turns and writes the results. `first` runs everything in steps; `first_steps` has some of these.
"""
