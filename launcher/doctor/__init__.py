"""`ddp-doctor`: whether this machine, or these hosts, can train, what is wrong and what mends it; and what ranks do.

    checkup    which checks there are, and the order in which they are made
    finding    what a check has found, and what follows from all of it
    show       findings as text and as JSON
    aside      a question put to a process of its own, which may crash or hang of it
    probes     the modules that such processes run
    trials     which ranks are started to prove it; ranks starts them, pair is one of them
    reach      what other machines say of themselves, which hosts judges
    leftovers  `ddp-doctor sweep`
    calls      `ddp-doctor calls`: what running ranks did last, seen from outside

Each check is a module: it gathers facts, which depend on the machine, and judges them, which does not.
"""
