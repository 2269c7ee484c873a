"""What a step did, and which rank was waited for: times of every step, kept on each rank and compared over all.

`Timeline` takes the steps of one model in, `Stats` are what it makes of them, `Contents` says what the buckets hold.
All times are host times: on a GPU, when the host asked for the work, not when the device did it.
"""

from ddp.parallel.timeline.stats import BucketStats, Lateness, Spread, Stats
from ddp.parallel.timeline.steps import Contents, Step
from ddp.parallel.timeline.timeline import Timeline

__all__ = ["BucketStats", "Contents", "Lateness", "Spread", "Stats", "Step", "Timeline"]
