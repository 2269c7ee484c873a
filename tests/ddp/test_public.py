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
            "Conv2d CrossEntropyLoss Dropout Flatten Linear MaxPool2d Module Parameter ReLU Sequential Sigmoid Tanh "
            "functional init"
        ),
    ),
    (
        ddp.nn.functional,
        "conv2d cross_entropy dropout linear log_softmax max_pool2d pad relu sigmoid softmax tanh",
    ),
    (
        ddp.nn.init,
        "constant_ kaiming_normal_ kaiming_uniform_ normal_ ones_ uniform_ xavier_normal_ xavier_uniform_ zeros_",
    ),
    (ddp.optim, "SGD Adadelta Adagrad Adam AdamW Lion Optimizer RMSprop lr_scheduler"),
    (
        ddp.autograd,
        "Function backward checkpoint checkpoint_sequential detect_anomaly grad gradcheck set_detect_anomaly",
    ),
]
OF_DDP = """
    Generator Size Tensor abs amax amin arange argmax as_tensor asarray autograd bernoulli bfloat16 bool can_cast cat
    clamp device empty empty_like enable_grad errors exp eye finfo flatten float16 float32 float64 from_dlpack
    from_numpy frombuffer full full_like get_default_dtype get_rng_state iinfo inference_mode initial_seed int8 int16
    int32 int64 is_floating_point is_grad_enabled is_inference_mode_enabled is_tensor linspace log log_softmax logspace
    logsumexp manual_seed matmul max maximum mean min minimum multinomial nn no_grad normal numel ones ones_like optim
    permute promote_types rand rand_like randint randint_like randn randn_like randperm relu reshape result_type
    scalar_tensor seed set_grad_enabled set_printoptions set_rng_state sigmoid softmax sqrt squeeze stack sum tanh
    tensor transpose uint8 unsqueeze where zeros zeros_like
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
    assert names & public <= {"autograd", "errors", "functional", "init", "nn", "optim", "parallel"}  # modules, public


def test_import_is_light() -> None:
    code = "import sys, ddp; print(sorted({'mpi4py', 'cupy', 'pynccl', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
