"""Transformer layers in a row: an encoder, a decoder, and both together."""

from __future__ import annotations

import copy
import math
from typing import Any

from ddp._tensor.core import Tensor
from ddp._tensor.creation import full, ones
from ddp._tensor.dtypes import bool_
from ddp.nn import functional, init
from ddp.nn._container import ModuleList
from ddp.nn._module import Module
from ddp.nn._norm import LayerNorm
from ddp.nn._transformer import Activation, TransformerDecoderLayer, TransformerEncoderLayer


class TransformerEncoder(Module):
    """num_layers copies of encoder_layer in a row, and `norm` after the last.

    enable_nested_tensor, mask_check: for PyTorch's signature; there are no nested tensors here.
    """

    def __init__(
        self,
        encoder_layer: Module,
        num_layers: int,
        norm: Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__()
        self.layers = ModuleList([copy.deepcopy(encoder_layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """src and masks: as TransformerEncoderLayer has them. is_causal: None looks whether the mask is causal."""
        causal = is_triangle(mask) if is_causal is None else is_causal
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=causal)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """num_layers copies of decoder_layer in a row, and `norm` after the last."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList([copy.deepcopy(decoder_layer) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As TransformerDecoderLayer has them. tgt_is_causal: None looks whether tgt_mask is causal."""
        causal = is_triangle(tgt_mask) if tgt_is_causal is None else tgt_is_causal
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, causal, memory_is_causal)
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder and a decoder with a LayerNorm after each, or custom_encoder and custom_decoder in their place.

    The other arguments are those of the layers. Source: Vaswani et al. 2017, arXiv:1706.03762.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = functional.relu,
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        where = {"device": device, "dtype": dtype}
        if custom_encoder is None:
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, **where)
            encoder_layer = TransformerEncoderLayer(*options, **where)
            custom_encoder = TransformerEncoder(encoder_layer, num_encoder_layers, norm)
        if custom_decoder is None:
            norm = LayerNorm(d_model, layer_norm_eps, bias=bias, **where)
            decoder_layer = TransformerDecoderLayer(*options, **where)
            custom_decoder = TransformerDecoder(decoder_layer, num_decoder_layers, norm)
        self.encoder = custom_encoder
        self.decoder = custom_decoder
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first
        for param in self.parameters():
            if param.ndim > 1:
                init.xavier_uniform_(param)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """src: (S, N, d_model), tgt: (T, N, d_model), N first if batch_first, or no N; like tgt."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            tgt_is_causal,
            memory_is_causal,
        )

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """(sz, sz): 0 up to the diagonal, -inf above it."""
        return full((sz, sz), -math.inf, device=device, dtype=dtype).triu(1)


def is_triangle(mask: Tensor | None) -> bool:
    """Whether `mask` hides from each of L queries exactly the keys after it, so that it need not be read."""
    if mask is None or mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        return False
    if mask.dtype == bool_:
        causal = ones(mask.shape, dtype=bool_, device=mask.device).triu(1)
    else:
        causal = Transformer.generate_square_subsequent_mask(mask.shape[0], mask.device, mask.dtype)
    return bool((mask == causal).all())
