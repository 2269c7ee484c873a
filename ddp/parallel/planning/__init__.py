"""The bucket plan: which gradients travel together, and when that changes.

`plan` holds the value and the cut by size, `choosing` the cut by measured times, `probe` measures the wire, `watch`
when gradients come; `planner` decides when to make a new plan of all that.
"""
