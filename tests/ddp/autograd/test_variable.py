"""`Variable`: a tensor by its first name."""

from __future__ import annotations

import ddp
from ddp.autograd import Variable


def test_outside_the_graph_over_the_same_memory() -> None:
    x = ddp.ones(2, requires_grad=True) * 2
    v = Variable(x)
    assert not v.requires_grad
    assert Variable(x, requires_grad=True).is_leaf
    v[0] = 5
    assert x.tolist() == [5, 2]
