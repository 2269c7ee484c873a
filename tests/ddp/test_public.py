"""What `import ddp` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import ddp

PUBLIC = [
    (
        ddp.nn,
        (
            "CELU ELU GELU GLU GRU LSTM RNN SELU AdaptiveAvgPool1d AdaptiveAvgPool2d AvgPool1d AvgPool2d BCELoss "
            "BCEWithLogitsLoss BatchNorm1d BatchNorm2d Bilinear Buffer Conv1d Conv2d ConvTranspose1d ConvTranspose2d "
            "CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss Dropout Dropout1d Dropout2d Embedding Flatten Fold "
            "GRUCell GaussianNLLLoss GroupNorm Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity "
            "InstanceNorm1d InstanceNorm2d KLDivLoss L1Loss LSTMCell LayerNorm LeakyReLU Linear LogSigmoid LogSoftmax "
            "MSELoss MarginRankingLoss MaxPool1d MaxPool2d Mish Module ModuleDict ModuleList MultiheadAttention "
            "NLLLoss PReLU PairwiseDistance Parameter ParameterDict ParameterList PixelShuffle PixelUnshuffle "
            "PoissonNLLLoss RMSNorm RNNCell ReLU ReLU6 Sequential SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax "
            "Softmin Softplus Softsign Tanh Threshold Transformer TransformerDecoder TransformerDecoderLayer "
            "TransformerEncoder TransformerEncoderLayer TripletMarginLoss TripletMarginWithDistanceLoss Unflatten "
            "Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad2d functional init utils"
        ),
    ),
    (
        ddp.nn.functional,
        (
            "adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d batch_norm bilinear binary_cross_entropy "
            "binary_cross_entropy_with_logits celu conv1d conv2d conv_transpose1d conv_transpose2d "
            "cosine_embedding_loss cosine_similarity cross_entropy dropout dropout1d dropout2d elu embedding fold "
            "gaussian_nll_loss gelu glu group_norm hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss "
            "instance_norm interpolate kl_div l1_loss layer_norm leaky_relu linear log_softmax logsigmoid "
            "margin_ranking_loss max_pool1d max_pool2d mish mse_loss nll_loss normalize one_hot pad pairwise_distance "
            "pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6 relu_ rms_norm "
            "scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softplus "
            "softsign tanh threshold triplet_margin_loss triplet_margin_with_distance_loss unfold"
        ),
    ),
    (
        ddp.nn.init,
        (
            "calculate_gain constant_ dirac_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ "
            "sparse_ trunc_normal_ uniform_ xavier_normal_ xavier_uniform_ zeros_"
        ),
    ),
    (
        ddp.nn.utils,
        (
            "clip_grad_norm_ clip_grad_value_ clip_grads_with_norm_ get_total_norm parameters_to_vector rnn "
            "vector_to_parameters"
        ),
    ),
    (ddp.optim, "SGD Adadelta Adagrad Adam AdamW Lion Optimizer RMSprop lr_scheduler"),
    (
        ddp.optim.lr_scheduler,
        (
            "ChainedScheduler ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LRScheduler "
            "LambdaLR LinearLR MultiStepLR MultiplicativeLR OneCycleLR PolynomialLR ReduceLROnPlateau SequentialLR StepLR"
        ),
    ),
    (
        ddp.autograd,
        "Function backward checkpoint checkpoint_sequential detect_anomaly grad gradcheck set_detect_anomaly",
    ),
]
OF_DDP = """
    Generator Size Tensor abs absolute acos acosh add addcdiv addcmul addmm addmv addr all allclose amax amin aminmax
    amp any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_strided
    as_tensor asarray asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d autograd baddbmm bernoulli bfloat16
    bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm bool
    broadcast_shapes broadcast_tensors broadcast_to bucketize can_cast cartesian_prod cat ceil chunk clamp clamp_max
    clamp_min clip column_stack concat concatenate cos cosh count_nonzero cummax cummin cumprod cumsum device diag
    diag_embed diagonal div divide dot double dstack dtype e einsum empty empty_like enable_grad eq equal erf erfc
    erfinv errors exp exp2 expm1 eye finfo fix flatten flip fliplr flipud float float16 float32 float64 floor
    floor_divide fmax fmin fmod frac from_dlpack from_numpy frombuffer full full_like gather ge get_default_dtype
    get_rng_state greater greater_equal gt half histc hstack hypot iinfo index_add index_copy index_fill index_put
    index_select inf inference_mode initial_seed inner int int8 int16 int32 int64 is_floating_point is_grad_enabled
    is_inference_mode_enabled is_tensor isclose isfinite isin isinf isnan kron kthvalue le lerp less less_equal linalg
    linspace load log log1p log2 log10 log_softmax logaddexp logical_and logical_not logical_or logical_xor logit
    logspace logsumexp long lt manual_seed masked_fill masked_scatter masked_select matmul max maximum mean median
    meshgrid min minimum mm moveaxis movedim msort mul multinomial multiply mv nan nan_to_num nanmean nansum narrow ne
    neg negative newaxis nn no_grad nonzero norm normal not_equal numel ones ones_like optim outer permute pi positive
    pow prod promote_types rand rand_like randint randint_like randn randn_like randperm ravel reciprocal relu remainder
    repeat_interleave reshape result_type return_types roll rot90 round rsqrt rsub save scalar_tensor scatter
    scatter_add searchsorted seed select set_grad_enabled set_printoptions set_rng_state short sigmoid sign sin sinh
    softmax sort split split_with_sizes sqrt square squeeze stack std std_mean sub subtract sum swapaxes swapdims t take
    take_along_dim tan tanh tensor tensor_split tensordot tile topk transpose tril tril_indices triu triu_indices
    true_divide trunc uint8 unbind unflatten unique unique_consecutive unsqueeze var var_mean vstack where xlogy zeros
    zeros_like
"""


@pytest.mark.parametrize(("module", "names"), PUBLIC, ids=lambda x: getattr(x, "__name__", ""))
def test_all_is_pinned(module: types.ModuleType, names: str) -> None:
    assert module.__all__ == names.split()


def test_all_of_ddp_is_pinned() -> None:
    # DataParallel and parallel come from the floor above, and are pinned there.
    assert [name for name in ddp.__all__ if name not in ("DataParallel", "parallel")] == OF_DDP.split()


@pytest.mark.parametrize("module", [ddp, *(module for module, _ in PUBLIC)], ids=lambda m: m.__name__)
def test_every_public_name_has_a_docstring(module: types.ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) or isinstance(value, types.ModuleType):
            assert value.__doc__, name


def test_no_module_bears_the_name_of_a_public_function_or_class() -> None:
    public = {name for module, _ in PUBLIC for name in module.__all__} | set(ddp.__all__)
    names = {name.rpartition(".")[2] for name in sys.modules if name.startswith("ddp.")}
    modules = {"amp", "autograd", "errors", "functional", "init", "linalg", "lr_scheduler", "nn", "optim", "parallel"}
    modules |= {"return_types", "rnn", "utils"}
    assert names & public <= modules


def test_import_is_light() -> None:
    code = "import sys, ddp; print(sorted({'mpi4py', 'cupy', 'pynccl', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
