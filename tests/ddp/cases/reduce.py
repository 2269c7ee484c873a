"""Reductions, and what runs along one dimension."""

from __future__ import annotations

from tests.ddp.cases.table import Case, along, draw, reduction

CASES = [
    *reduction("sum"),
    *reduction("mean"),
    *reduction("amax"),
    *reduction("amin"),
    *(case for case in reduction("logsumexp", always_dim=True) if case.label[:8] != "dim=None"),
    Case("amax", "ties", lambda t, x: t.amax(t.stack([x, x, x - 1]), dim=0), (draw(3),)),
    Case("sum", "all at once", lambda t, x: x.sum(), (draw(2, 3),)),
    Case("logsumexp", "large", lambda t, x: t.logsumexp(x * 400, dim=1), (draw(2, 3),)),
    *along("softmax"),
    *along("log_softmax"),
]
