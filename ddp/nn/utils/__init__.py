"""Clipping of gradients, parameters as one vector, padding of sequences, and parametrizations."""

from ddp.nn.utils import parametrizations, parametrize, rnn
from ddp.nn.utils.clip_grad import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from ddp.nn.utils.convert_parameters import parameters_to_vector, vector_to_parameters
from ddp.nn.utils.parametrizations import old_spectral_norm as spectral_norm
from ddp.nn.utils.parametrizations import old_weight_norm as weight_norm
from ddp.nn.utils.parametrizations import remove_norm as remove_spectral_norm
from ddp.nn.utils.parametrizations import remove_norm as remove_weight_norm

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "parameters_to_vector"]
__all__ += ["parametrizations", "parametrize", "remove_spectral_norm", "remove_weight_norm", "rnn", "spectral_norm"]
__all__ += ["vector_to_parameters", "weight_norm"]
