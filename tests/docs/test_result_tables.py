"""The site's tables of benchmark results: no file is left out, and numbers are the files'."""

from __future__ import annotations

import importlib
import sys

from tests.conftest import ROOT

sys.path.append(str(ROOT / "docs"))

result_tables = importlib.import_module("result_tables")


def test_every_committed_result_has_a_table() -> None:
    sections = result_tables.markdown().split("\n### ")[1:]
    names = sorted(path.stem for path in (ROOT / "benchmarks/results").glob("*.json"))
    assert [section.split("\n")[0] for section in sections] == names
    assert all("\n| median of |" in section for section in sections)


def test_rows_are_medians_named_by_the_keys_that_lead_to_them() -> None:
    result = {
        "n": 2,
        "rows": [{"collective": "reduce", "bytes": 2048, "us": {"ours": [3.0, 1.0, 2.0], "raw": [4000.0]}}],
    }
    assert list(result_tables.rows(result, "", {})) == [("reduce, 2 KiB, us", {"ours": 2.0, "raw": 4000.0})]
    result = {"tasks": {"mlp": {"label": "An MLP", "hooks": {"none": {"step": [0.5], "ratio": 2}}}}}
    assert list(result_tables.rows(result, "", {})) == [("An MLP, hooks, none", {"step": 0.5, "ratio": 2})]
    result = {"rows": {"0": {"label": "A GRU", "floor_seconds": 0.5, "seconds": {"ddp": [1.0, 2.0, 9.0]}}}}
    assert next(result_tables.rows(result, "", {})) == ("A GRU", {"floor_seconds": 0.5, "ours / floor": 4.0})
    result = {"results": {"save": [{"wrong": ""}, {"wrong": "weights differ"}]}}
    assert list(result_tables.rows(result, "", {})) == [("save", {"cases": 2, "wrong": 1})]
