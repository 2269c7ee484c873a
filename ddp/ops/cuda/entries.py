"""The kernels that stand in the tables of ops, and the products: what each file of ops asks of the array module."""

from __future__ import annotations

from ddp.ops import error_function, index, perceptron, products, strips
from ddp.ops.cuda import adding, curves
from ddp.ops.cuda import products as by_gpu

products.PRODUCTS["cupy"] = by_gpu.product
products.COLUMN_SUMS["cupy"] = by_gpu.column_sums
strips.MATMULS["cupy"] = by_gpu.product
index.ADDS["cupy"], index.FLAT_ADDS["cupy"] = adding.add_rows, adding.add_flat
error_function.ERF["cupy"] = curves.function("erf")
error_function.ERFC["cupy"] = curves.function("erfc")
error_function.ERFINV["cupy"] = curves.function("erfinv")

products.linear.launches(by_gpu.linear, by_gpu.linear_backward, native=True, into="adding")
perceptron.linear_act.launches(by_gpu.linear_act, by_gpu.linear_act_backward, native=True, into="adding")
perceptron.feed_forward.launches(by_gpu.feed_forward, by_gpu.feed_forward_backward, native=True, into="adding")
