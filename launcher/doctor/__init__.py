"""`ddp-doctor`: whether this machine, or these hosts, can train, what is wrong and what fixes it; and what ranks do.

    checkup    which checks there are, and the order in which they are made
    findings   what a check has found, and what follows from all of it; as text and as JSON
    probe      asks a question in a process of its own, which may crash or hang; probes: the questions
    ranks      starts ranks that call every collective; trial is one of them
    hosts      what other machines answer
    shm_cleanup  `ddp-doctor sweep`
    calls      `ddp-doctor calls`: what running ranks did last, seen from outside

Each check is a module: it gathers facts, which depend on the machine, and judges them, which does not.
"""
