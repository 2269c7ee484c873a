"""What a GPU can show of this runtime, beside PyTorch on the same GPU, in two runs of less than ten minutes each.

    python -m benchmarks.gpu.correctness
    python -m benchmarks.gpu

`tasks` says what is trained, `worker` is a process that trains it with one library, `__main__` has the promises, lets
the processes take turns and writes the results.
"""
