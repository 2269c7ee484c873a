"""What a GPU can show of this runtime, beside PyTorch on the same GPU, in two runs of less than ten minutes each.

    python -m benchmarks.gpu.correctness
    python -m benchmarks.gpu

`tasks` says what is trained, `implementation` is a process that trains it with one library, `rows` are the promises,
`__main__` lets the implementations take turns and writes the results.
"""
