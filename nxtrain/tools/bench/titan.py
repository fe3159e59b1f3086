"""Training step of torchtitan's Llama for `nxtrain bench train`, with AMP, compiled blocks and fused AdamW.

torchtitan's own trainer needs document masks, which plain causal attention does not. So its model uses
`scaled_dot_product_attention` here, which torchtitan has for other models. Verified with torchtitan 0.3.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nxtrain.tools.bench.clocks import Clocks
from nxtrain.tools.bench.train import Workload
from nxtrain.tools.bench.training import CLIP, LR, Step, batch, hf_config


def titan_step(work: Workload, clocks: Clocks) -> Step:
    """Make a function that runs one training step of torchtitan's model.

    Parameters are float32. With `bf16`, matrix products are bfloat16 by AMP.
    """
    from torchtitan.components.loss import cross_entropy_loss

    torch.manual_seed(0)
    model = _model(hf_config(work))
    model.to(clocks.device)
    model.init_states()
    for block in model.layers.values():
        block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    inputs, targets = (x.to(clocks.device) for x in batch(work))

    def step() -> Tensor:
        with torch.autocast(clocks.device.type, torch.bfloat16, enabled=work.precision == "bf16"):
            loss: Tensor = cross_entropy_loss(model(inputs), targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _model(shape: dict[str, Any]) -> Any:
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    dim = shape["hidden_size"]
    vocab_size = shape["vocab_size"]
    num_heads = shape["num_attention_heads"]
    head_size = shape.get("head_dim") or dim // num_heads
    drawn = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    norm = RMSNorm.Config(normalized_shape=dim, eps=shape["rms_norm_eps"], param_init={"weight": nn.init.ones_})
    rope = ComplexRoPE.Config(
        dim=head_size,
        max_seq_len=shape["max_position_embeddings"],
        theta=shape["rope_theta"],
        scaling="llama" if shape["rope_scaling"] else "none",
    )

    def block() -> Any:
        return Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=dim,
                n_heads=num_heads,
                n_kv_heads=shape["num_key_value_heads"],
                head_dim=head_size,
                wqkv_param_init=drawn,
                wo_param_init=drawn,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=shape["intermediate_size"], w1_param_init=drawn, w2w3_param_init=drawn
            ),
        )

    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        enable_weight_tying=shape["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=drawn),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=drawn),
        layers=[block() for _ in range(shape["num_hidden_layers"])],
    ).build()
