"""The named tuples that functions with several results return, each under the name of its function."""

from ddp._tensor.results import aminmax, cummax, cummin, kthvalue, max, median, min, sort, topk

__all__ = ["aminmax", "cummax", "cummin", "kthvalue", "max", "median", "min", "sort", "topk"]
