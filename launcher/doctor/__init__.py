"""`ddp-doctor`: whether this machine, or these hosts, can train, what is wrong and what fixes it; and what ranks do.

    checkup    the list of checks, in the order in which they are made and shown
    machine    Python, threads, memory, limits, and `ddp-doctor sweep`; mpi, gpu: a check each
    ranks      starts ranks that call every collective; trial is one of them
    findings   what a check has found, as text and as JSON
    probes     asks a question in a process of its own, which may crash or hang

A check gathers facts, which depend on the machine, and judges them, which does not.
"""
