"""Forward and backward of ops, on arrays. Most files hold one family of ops, with the formula above each pair."""

from ddp.ops import activation as activation
from ddp.ops import attention as attention
from ddp.ops import convolution as convolution
from ddp.ops import elementwise as elementwise
from ddp.ops import gradients as gradients
from ddp.ops import indexing as indexing
from ddp.ops import losses as losses
from ddp.ops import normalization as normalization
from ddp.ops import pooling as pooling
from ddp.ops import products as products
from ddp.ops import recurrent as recurrent
from ddp.ops import reduction as reduction
from ddp.ops import shape as shape
from ddp.ops import softmax_ops as softmax_ops
from ddp.ops import special as special
from ddp.ops.op import OPS as OPS
from ddp.ops.op import Op as Op
