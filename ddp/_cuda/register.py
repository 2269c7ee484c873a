"""Attaches the device kernels of ops and of array functions. No other module attaches one.

An op without an entry here computes by its formulas, with CuPy's functions. An op that does not support bfloat16
computes in float32, and rounds the result (`ddp.ops.op.Upcast`).
"""

from __future__ import annotations

from typing import Any

from ddp._cuda import (
    array_kernels,
    cross_entropy_kernels,
    cudnn_attention,
    cudnn_convolution,
    device_checks,
    elementwise_kernels,
    embedding_kernels,
    gradient_kernels,
    matmul_kernels,
    norm_kernels,
)
from ddp.ops import (
    activation,
    arrays,
    attention,
    convolution,
    elementwise,
    gradients,
    indexing,
    losses,
    normalization,
    pooling,
    products,
    reduction,
    shape,
    special,
)

# Ops that our own CUDA kernels or NVIDIA's libraries compute. residual: for create_graph, a function that converts the
# device kernel's residual to the one that the op's array formulas (its reference) return.


def _same(xp: Any, residual: Any) -> Any:
    return residual


products.matmul.attach_device_kernel(products.matmul.forward, products.matmul.backward)
products.einsum.attach_device_kernel(products.einsum.forward, products.einsum.backward)
for op, forward, backward in (
    (products.linear, matmul_kernels.linear, matmul_kernels.linear_backward),
    (products.linear_act, matmul_kernels.linear_act, matmul_kernels.linear_act_backward),
    (products.feed_forward, matmul_kernels.feed_forward, matmul_kernels.feed_forward_backward),
    (normalization.layer_norm, norm_kernels.layer_norm, norm_kernels.layer_norm_backward),
    (normalization.rms_norm, norm_kernels.rms_norm, norm_kernels.rms_norm_backward),
    (indexing.embedding, embedding_kernels.embedding, embedding_kernels.embedding_backward),
):
    op.attach_device_kernel(forward, backward, grad_out="accumulate", residual=_same)
convolution.conv2d.attach_device_kernel(
    cudnn_convolution.conv2d, cudnn_convolution.backward, residual=cudnn_convolution.reference_residual
)
convolution.conv_transpose2d.attach_device_kernel(
    cudnn_convolution.conv_transpose2d, cudnn_convolution.backward, residual=cudnn_convolution.reference_residual
)
attention.attention.attach_device_kernel(
    cudnn_attention.attention, cudnn_attention.attention_backward, residual=cudnn_attention.reference_residual
)
activation.dropout.attach_device_kernel(
    elementwise_kernels.dropout, elementwise_kernels.dropout_backward, residual=elementwise_kernels.kept_elements
)
losses.cross_entropy.attach_device_kernel(
    cross_entropy_kernels.cross_entropy, cross_entropy_kernels.cross_entropy_backward, residual=_same
)

# Ops computed by their formulas, whose results get the memory format of the images.
for op in (
    pooling.pad,
    pooling.interpolate,
    pooling.max_pool2d,
    pooling.max_pool2d_with_indices,
    pooling.avg_pool2d,
    pooling.adaptive_avg_pool2d,
    normalization.batch_norm,
    normalization.channel_affine,
    normalization.group_norm,
):
    op.attach_device_kernel(*array_kernels.keep_image_format(op.reference))

# Ops computed by their formulas, whose results get the operands' order of axes in memory.
for op in (
    elementwise.add,
    elementwise.sub,
    elementwise.mul,
    elementwise.div,
    elementwise.neg,
    elementwise.abs,
    elementwise.square,
    elementwise.maximum,
    elementwise.minimum,
    elementwise.where,
    elementwise.clamp,
    activation.relu,
    activation.leaky_relu,
    activation.hardtanh,
    activation.hardsigmoid,
    activation.hardswish,
    activation.sigmoid,
    activation.tanh,
    activation.silu,
    activation.mish,
    activation.softplus,
    activation.gelu,
    activation.elu,
):
    op.attach_device_kernel(*array_kernels.keep_order(op.reference))

# Ops that only move, convert or mask elements. Their own forward and backward are the device kernels, because both take
# bfloat16 without a conversion to float32.
for op in (
    elementwise.cast,
    elementwise.clone,
    elementwise.transfer,
    shape.reshape,
    shape.permute,
    shape.split,
    shape.unbind,
    shape.cat,
    shape.stack,
    shape.flip,
    shape.roll,
    shape.tril,
    shape.triu,
):
    op.attach_device_kernel(op.forward, op.backward)

# Array functions.
arrays.sum_of_squares.attach_device_kernel(array_kernels.sum_of_squares)
products.product.attach_device_kernel(matmul_kernels.product)
products.column_sums.attach_device_kernel(matmul_kernels.column_sums)
products.ones.attach_device_kernel(lambda xp, n, dtype: xp.ones(n, dtype))
products.merges_batches.attach_device_kernel(lambda xp: False)
convolution.tile_bytes.attach_device_kernel(lambda xp: 1 << 28)
attention.score_bytes.attach_device_kernel(lambda xp: attention.DEVICE_SCORE_BYTES)
attention.dropout_seed.attach_device_kernel(array_kernels.dropout_seed)
attention.drawn_masks.attach_device_kernel(elementwise_kernels.drawn_masks)
indexing.assign.attach_device_kernel(array_kernels.assign)
indexing.add_flat.attach_device_kernel(embedding_kernels.add_flat)
indexing.add_rows_into.attach_device_kernel(embedding_kernels.add_rows)
indexing.check_all.attach_device_kernel(device_checks.check_all)
indexing.check_index.attach_device_kernel(device_checks.check_index)
indexing.check_targets.attach_device_kernel(device_checks.check_targets)
shape.concatenate.attach_device_kernel(array_kernels.concatenate)
reduction.accumulate.attach_device_kernel(array_kernels.accumulate)
special.compute_erf.attach_device_kernel(elementwise_kernels.error_function("erf"))
special.compute_erfc.attach_device_kernel(elementwise_kernels.error_function("erfc"))
special.compute_erfinv.attach_device_kernel(elementwise_kernels.error_function("erfinv"))
gradients.total_norm.attach_device_kernel(gradient_kernels.total_norm)
gradients.scale_to_norm.attach_device_kernel(gradient_kernels.scale_to_norm)
gradients.clamp_values.attach_device_kernel(array_kernels.clamp_values)
gradients.unscale.attach_device_kernel(gradient_kernels.unscale)
gradients.update_scale.attach_device_kernel(gradient_kernels.update_scale)
