"""`ddp-doctor`: tells whether this machine, or a list of hosts, can train, what is wrong, and what fixes it.

`ddp-doctor calls PID` shows the last collectives of a rank.

    checkup    the list of checks, in the order in which they are made and shown
    machine    Python, threads, memory, limits, and `ddp-doctor sweep`; mpi, gpu: one check each
    ranks      starts ranks that call every collective; trial: the program of these ranks
    findings   what a check has found, as text and as JSON
    probes     asks a question in a process of its own, which may crash or hang

A check first gathers facts of the machine. Then another function turns the facts into findings.
"""
