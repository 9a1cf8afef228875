"""The model: Kimi K2.5's mixture-of-experts transformer, at any size.

Composer 2 starts from Kimi K2.5 (report §3, claims M1–M4), which is DeepSeek-V3's layout with other numbers:
multi-head latent attention (MLA), a first dense layer, then layers whose feed-forward part is a router that
sends each token to K of E small experts, plus one expert that every token shares. Every number stands in
`Config`; `Config()` is the released Kimi K2.5: 1.0264T parameters, 32B active. A toy has smaller ones.

    router   s = sigmoid(x W_r)             scores, fp32
             ids = top-K of s + b           b: correction bias, moved by the load, never by the gradient
             g = s[ids] / Σ s[ids] · scale  gates; the gradient reaches the router through them
    layer    y = Σ_k g_k · E_ids_k(x) + E_shared(x)

Legend: B batch, T tokens, S cached tokens, N = B·T, D width, H heads, E experts, K experts per token, R rank
of the key-value latent, dn / dr / dv per-head width of the position-free key, the rotary key and the value.

Differences from the released model:
1. The latent norms use eps 1e-6 and the others 1e-5, as in transformers' implementation of this architecture.
2. `positional_heads` > 0 starts that many heads of layer 0 as heads that look 1, 2, … tokens back
   (`look_back`). It is an initialisation, not a change of the architecture: 0, the default, is Kimi's. The
   toy needs it because copying from the context is the first thing that an agent does, and a model trained
   for two minutes does not discover it by itself.
3. Weights are initialised with std `init_std`, or 1/√fan_in where it is 0 (small widths want the latter).
4. Left out: the vision tower, the sequence-wise auxiliary loss, and routing limited to groups of experts
   (DeepSeek-V3 has 8 groups and so routes otherwise; Kimi has 1).

    python moe.py           parameters, FLOPs, cache and wire bytes of the full size; router replay; exactness
    python moe.py --bench   the experts beside transformers' (where installed), both ways; last line JSON
"""
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import kernels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Config:
    """Every number of the architecture. Defaults: Kimi K2.5's released text configuration."""
    vocab_size: int = 163_840
    dim: int = 7168                    # D, width of the residual stream
    n_layers: int = 61
    n_dense_layers: int = 1            # the first layers have an ordinary feed-forward part
    n_heads: int = 64                  # H
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512            # R
    qk_nope_head_dim: int = 128        # dn
    qk_rope_head_dim: int = 64         # dr
    v_head_dim: int = 128              # dv
    ffn_dim: int = 18_432              # hidden width of the dense layers
    expert_dim: int = 2048             # hidden width of one expert
    n_experts: int = 384               # E
    n_experts_per_tok: int = 8         # K
    n_shared_experts: int = 1
    route_scale: float = 2.827         # gates sum to this
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    rope_theta: float = 50_000.0
    rope_factor: float = 64.0          # YaRN: the range is rope_factor · rope_original_len tokens
    rope_original_len: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    init_std: float = 0.02             # 0: 1/√fan_in
    positional_heads: int = 0          # ours: heads of layer 0 that start as "look n tokens back"
    precision: str = "native"          # arithmetic of the experts (P2): native, mxfp8, nvfp4; a CPU emulates
    dispatch: str = "native"           # what routed rows travel in (S4): native, or mxfp8 there, bf16 back

    def __post_init__(self) -> None:
        if not 1 <= self.n_experts_per_tok <= self.n_experts:
            raise ValueError(f"n_experts_per_tok = {self.n_experts_per_tok} must be between 1 and "
                             f"n_experts = {self.n_experts}")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise ValueError(f"n_dense_layers = {self.n_dense_layers} must be between 0 and "
                             f"n_layers = {self.n_layers}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even: rotation turns pairs")
        if self.precision not in ("native", "mxfp8", "nvfp4"):
            raise ValueError(f"precision = {self.precision!r}: choose native, mxfp8 or nvfp4")
        if self.dispatch not in ("native", "mxfp8"):
            raise ValueError(f"dispatch = {self.dispatch!r}: choose native or mxfp8")
        low = self.precision != "native" or self.dispatch != "native"
        if low and (self.dim % 32 or self.expert_dim % 32):
            raise ValueError(f"dim = {self.dim} and expert_dim = {self.expert_dim} must be multiples of 32, "
                             "the block of MXFP8; or choose native precision and dispatch")
        if self.positional_heads > self.n_heads:
            raise ValueError(f"positional_heads = {self.positional_heads} exceeds n_heads = {self.n_heads}")

    @property
    def max_len(self) -> int:
        """Longest sequence that the rotary positions cover, in tokens."""
        return int(self.rope_factor * self.rope_original_len)

    @property
    def n_moe_layers(self) -> int:
        return self.n_layers - self.n_dense_layers


# ---------------------------------------------------------------------------------------- rotary positions


def yarn_inverse_frequencies(c: Config) -> Tensor:
    """Inverse frequencies of the rotary pairs under YaRN (arXiv 2309.00071), float32 [dr / 2].

    Pairs that turn more than beta_fast times within the original length keep θ^(−2i/dr), pairs that turn less
    than beta_slow times are slowed by the factor, the ones between are blended linearly.
    """
    pairs = torch.arange(0, c.qk_rope_head_dim, 2, dtype=torch.float64)
    plain = c.rope_theta ** (-pairs / c.qk_rope_head_dim)
    if c.rope_factor == 1:
        return plain.float()

    def pair_that_turns(times: float) -> float:
        turns = math.log(c.rope_original_len / (times * 2 * math.pi))
        return c.qk_rope_head_dim * turns / (2 * math.log(c.rope_theta))

    low = max(math.floor(pair_that_turns(c.rope_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(c.rope_beta_slow)), c.qk_rope_head_dim - 1)
    ramp = ((torch.arange(len(pairs), dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (plain * (1 - ramp) + plain / c.rope_factor * ramp).float()


def softmax_scale(c: Config) -> float:
    """1/√(dn + dr), times the square of YaRN's temperature 0.1 ln(factor) + 1 (Kimi's mscales are both 1)."""
    temperature = 0.1 * math.log(c.rope_factor) + 1 if c.rope_factor > 1 else 1.0
    return (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * temperature ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (0, 1), (2, 3), … of x [..., dr] by the angles of cos and sin [..., dr / 2]. The turned
    first members come first, then the second ones: the same in queries and keys, so products agree."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


# ----------------------------------------------------------------------------------------- cache and state


class Cache:
    """Latent key-value cache (M1): per layer and token the normalised latent (R) and the turned key (dr).

    `kv` [L, B, S, R + dr]; `lengths` [B] counts the valid tokens of each row. What lies beyond a row's length
    is never seen, because attention masks by position, and is overwritten when the row grows: shrinking
    `lengths` is all it takes to forget rejected drafts.
    """

    def __init__(self, c: Config, n_rows: int, capacity: int, n_layers: int | None = None,
                 dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        width = c.kv_lora_rank + c.qk_rope_head_dim
        self.kv = torch.zeros(n_layers or c.n_layers, n_rows, capacity, width, dtype=dtype, device=device)
        self.lengths = torch.zeros(n_rows, dtype=torch.long, device=device)

    @property
    def capacity(self) -> int:
        return self.kv.shape[2]


@dataclass
class Context:
    """What the layers of one forward pass share: angles, mask, cache rows, routes to replay and recorded."""
    cos: Tensor                                  # [B, T, dr / 2]
    sin: Tensor
    positions: Tensor                            # [B, T]
    mask: Tensor | None                          # [B, 1, T, S] bool, None: plain causal
    cache: Cache | None = None
    rows: Tensor | None = None                   # [B] rows of the cache; None: all of them in order
    span: int = 0                                # cached positions 0 … span − 1 are looked at
    replay: Tensor | None = None                 # [B, T, L_moe, K] expert ids, −1: the router's own choice
    plausibility: float = 0.0                    # M4, see `replayed_ids`
    real: Tensor | None = None                   # [B, T] False: padding, not counted in the balance
    routes: list[Tensor] | None = None           # filled with [B, T, K] per MoE layer when recording
    cp: dist.ProcessGroup | None = None          # T tokens are this rank's share of the row, mask is a list
    seen: set[int] = field(default_factory=set)  # MoE layers that have counted: recomputation must not


# ------------------------------------------------------------------------------------------------ attention


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 §2.1; the names are the public checkpoints').

    Two forms with the same result. Training projects latents up to keys and values of every head (`_plain`).
    Decoding folds the up-projection into the query and the output, so that only the latents are touched
    (`_absorbed`). Both are given the latents: this call's, the cache's, or those of other ranks too.

        q_nopeᵀ (W_uk c) = (W_ukᵀ q_nope)ᵀ c          Σ_s p_s (W_uv c_s) = W_uv (Σ_s p_s c_s)
    """

    def __init__(self, c: Config):
        super().__init__()
        self.c, self.scale = c, softmax_scale(c)
        self.q_a_proj = nn.Linear(c.dim, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
        q_width, kv_width = c.qk_nope_head_dim + c.qk_rope_head_dim, c.qk_nope_head_dim + c.v_head_dim
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.n_heads * q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.dim, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, c.n_heads * kv_width, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.v_head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, ctx: Context, layer: int) -> Tensor:
        q_nope, q_rope, latent, k_rope = self.project(x, ctx)
        if ctx.cp is not None:
            latent, k_rope = gather_latents(latent, k_rope, ctx.cp)
        if ctx.cache is None:
            return self.o_proj(self._plain(q_nope, q_rope, latent, k_rope, ctx.mask))
        kv = self._write(latent, k_rope, ctx, layer)
        return self.o_proj(self._absorbed(q_nope, q_rope, kv, ctx.mask))

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B, T, H, dn], [B, T, H, dr]; latents [B, T, R] and turned rotary keys [B, T, dr] of x."""
        c = self.c
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (c.n_heads, -1))                                             # [B, T, H, dn + dr]
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = rotate(q_rope, ctx.cos.unsqueeze(2), ctx.sin.unsqueeze(2))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        return q_nope, q_rope, latent, rotate(k_rope, ctx.cos, ctx.sin)

    def _plain(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None
               ) -> Tensor:
        """T queries over S latents; mask [B, 1, T, S], or None: causal and T = S. Returns [B, T, H · dv]."""
        c = self.c
        kv = self.kv_b_proj(latent).unflatten(-1, (c.n_heads, -1))                       # [B, S, H, dn + dv]
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k = torch.cat((k_nope, k_rope.unsqueeze(2).expand(-1, -1, c.n_heads, -1)), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                                 # [B, H, T, ·]
        if isinstance(mask, list):
            out = attend_chunks(q, k, v, mask, self.scale)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale)
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    def _write(latent: Tensor, k_rope: Tensor, ctx: Context, layer: int) -> Tensor:
        """Store entries [B, T, ·] at their rows and positions; returns rows up to `span`, [B, S, R + dr]."""
        # A masked key enters as 0 · value, and 0 · NaN is NaN. So a NaN token is cached as a latent of zeros
        # with a rotary key of NaN: who looks at it gets NaN by the score, the row's next user gets 0 · 0.
        bad = latent.isnan().any(-1, keepdim=True)
        new = torch.cat((latent.masked_fill(bad, 0.0), k_rope.masked_fill(bad, math.nan)), dim=-1)
        kv = ctx.cache.kv[layer]
        rows = torch.arange(kv.shape[0], device=kv.device) if ctx.rows is None else ctx.rows
        kv[rows.unsqueeze(1), ctx.positions] = new.to(kv.dtype)
        return kv[:, :ctx.span] if ctx.rows is None else kv[ctx.rows, :ctx.span]

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        c = self.c
        w = self.kv_b_proj.weight.view(c.n_heads, -1, c.kv_lora_rank)
        w_uk, w_uv = w.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)  # [H, dn, R], [H, dv, R]
        B, T = q_nope.shape[:2]
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, w_uk), q_rope), dim=-1)    # [B, T, H, R + dr]
        q = (q * self.scale).flatten(1, 2)
        scores = (kv @ q.transpose(1, 2)).transpose(1, 2)  # the long side first: a CPU is a third faster
        scores = scores.view(B, T, c.n_heads, kv.shape[1])
        scores = scores.masked_fill_(~mask.transpose(1, 2), float("-inf"))
        mixed = scores.softmax(dim=-1).flatten(1, 2) @ kv[..., :c.kv_lora_rank]          # [B, T · H, R]
        return torch.einsum("bthr,hvr->bthv", mixed.view(B, T, c.n_heads, c.kv_lora_rank), w_uv).flatten(2)


# --------------------------------------------------------------------------------------------- feed-forward


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)). Dense layers and the shared expert."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """The router's weight [E, D], the correction bias [E] and the load [E] that moves it.

    The two buffers stay float32 whatever type the model is cast to: the bias moves in steps of 1e-3, which
    bf16 cannot add to a bias of 0.3.
    """

    def __init__(self, c: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.n_experts, c.dim))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_experts))
        self.register_buffer("load", torch.zeros(c.n_experts), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True) -> Router:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            if self._buffers[name].dtype != old.dtype:
                self._buffers[name] = old.to(self._buffers[name].device)
        return self


def replayed_ids(scores: Tensor, own: Tensor, replay: Tensor, plausibility: float) -> Tensor:
    """Router replay (M3) with the plausibility filter (M4, report §6.2): ids [N, K] from `own` and `replay`.

        threshold = plausibility · lowest of the scores [N, E] among the router's own top-K

    The report says only that the threshold derives from the router's own top-K; this formula is ours. A
    replayed expert below it gives its place to the router's best candidate that is not there yet.
    plausibility = 0 is plain replay, ∞ is no replay. Rows of −1 keep the router's choice.
    """
    ids = torch.where(replay[:, :1] < 0, own, replay)
    if plausibility <= 0:
        return ids
    own_scores, ids_scores = scores.gather(1, own), scores.gather(1, ids)
    keep = ids_scores >= plausibility * own_scores.min(dim=1, keepdim=True).values
    kept = torch.where(keep, ids, -1)
    taken = (own.unsqueeze(2) == kept.unsqueeze(1)).any(2)               # [N, K] own candidate already there
    free_rank = (~keep).cumsum(1) - 1                                    # 0 for the first free slot, 1, …
    candidates = own.gather(1, taken.int().argsort(dim=1, stable=True))  # untaken first, best first
    return torch.where(keep, ids, candidates.gather(1, free_rank.clamp(min=0)))


class MoE(nn.Module):
    """Router, E routed experts as two stacked weights, and the shared expert (M1, M2)."""
    parallel: Parallel | None = None

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.gate = Router(c)
        self.w_gate_up = nn.Parameter(torch.empty(c.n_experts, 2 * c.expert_dim, c.dim))
        self.w_down = nn.Parameter(torch.empty(c.n_experts, c.dim, c.expert_dim))
        self.shared_experts = MLP(c.dim, c.expert_dim * c.n_shared_experts) if c.n_shared_experts else None

    def forward(self, x: Tensor, ctx: Context, moe_layer: int) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])                                                # [N, D]
        ids, weights = self.route(flat, ctx, moe_layer)
        if moe_layer not in ctx.seen:                                                    # not when recomputed
            ctx.seen.add(moe_layer)
            if ctx.routes is not None:
                ctx.routes.append(ids.view(*x.shape[:2], ids.shape[1]))
            if self.training and torch.is_grad_enabled():
                self._count(ids, ctx.real)
        y = self.routed(flat, ids, weights).view(x.shape)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def route(self, flat: Tensor, ctx: Context, moe_layer: int) -> tuple[Tensor, Tensor]:
        """Expert ids [N, K] and gates [N, K] of tokens [N, D], the ids replayed where `ctx` says so."""
        c, gate = self.c, self.gate
        logits = F.linear(kernels.wide(flat), kernels.wide(gate.weight))  # fp32 at least, in every model
        ids, weights, scores = kernels.route(logits, gate.e_score_correction_bias, c.n_experts_per_tok,
                                             c.route_scale)
        if ctx.replay is None:
            return ids, weights
        replay = ctx.replay[:, :, moe_layer].reshape(-1, c.n_experts_per_tok).long()
        ids = replayed_ids(scores.detach(), ids, replay, ctx.plausibility)
        chosen = scores.gather(1, ids)                                   # live: gradients flow
        return ids, chosen / (chosen.sum(1, keepdim=True) + 1e-20) * c.route_scale

    def routed(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Σ_k weights[n, k] · E_ids[n, k](flat[n]) of tokens [N, D]: what expert parallelism replaces."""
        if self.parallel is not None and self.parallel.ep is not None:
            return routed_across(self, flat, ids, weights)
        rows = dispatch_rows(flat) if self.c.dispatch == "mxfp8" else flat
        return kernels.experts(rows, ids, weights, self.w_gate_up, self.w_down, self.c.precision)

    @torch.no_grad()
    def _count(self, ids: Tensor, real: Tensor | None) -> None:
        ids = ids if real is None else ids[real.flatten()]
        self.gate.load += torch.bincount(ids.flatten(), minlength=self.c.n_experts)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Auxiliary-loss-free balancing (DeepSeek-V3 §2.1.2), once per optimizer step: raise the bias of
        experts that got fewer tokens than the mean, lower the others, keep the mean, count anew."""
        load = self.gate.load
        if self.parallel is not None:
            dist.all_reduce(load, group=self.parallel.world)
        delta = rate * torch.sign(load.mean() - load)
        self.gate.e_score_correction_bias += delta - delta.mean()
        load.zero_()


# ------------------------------------------------------------------------------------------------ the model


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.layer, self.moe_layer = layer, layer - c.n_dense_layers
        self.input_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = MLP(c.dim, c.ffn_dim) if layer < c.n_dense_layers else MoE(c)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), ctx, self.layer)
        h = self.post_attention_layernorm(x)
        return x + (self.mlp(h, ctx, self.moe_layer) if isinstance(self.mlp, MoE) else self.mlp(h))


class Transformer(nn.Module):
    """Tokens [B, T] to hidden states [B, T, D] after the final norm; `lm_head` makes logits [B, T, V]."""
    parallel: Parallel | None = None
    recompute = False                            # keep the layers' inputs, compute the rest again in backward

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.n_layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)
        self.register_buffer("inverse_frequencies", yarn_inverse_frequencies(c), persistent=False)

    def context(self, positions: Tensor, doc: Tensor | None = None, cache: Cache | None = None,
                rows: Tensor | None = None, replay: Tensor | None = None, plausibility: float = 0.0,
                real: Tensor | None = None, record: bool = False) -> Context:
        """Angles and mask for tokens at `positions` [B, T]: causal, within documents `doc` [B, T] if given.

        ValueError for positions beyond the rotary range or the cache, and for routes of another model.
        """
        span = int(positions.max()) + 1 if positions.numel() and not positions.is_meta else 0
        if span > self.config.max_len:
            raise ValueError(f"{span} tokens exceed the rotary range of {self.config.max_len} "
                             f"(rope_factor · rope_original_len)")
        if replay is not None:
            self._check_routes(replay, positions)
        angles = positions.unsqueeze(-1) * self.inverse_frequencies      # [B, T, dr / 2], float32
        dtype, mask = self.embed_tokens.weight.dtype, None
        cp = self.parallel.cp if self.split_rows else None
        if cache is not None:
            if span > cache.capacity:
                raise ValueError(f"position {span - 1} does not fit a cache of {cache.capacity} tokens a row")
            keys = torch.arange(span, device=positions.device)
            mask = (keys <= positions.unsqueeze(-1)).unsqueeze(1)                        # [B, 1, T, S]
        elif cp is not None:
            if doc is None:
                raise ValueError("context parallelism needs doc and positions of whole rows, cut by zigzag")
            mask = zigzag_masks(doc, cp)
        elif doc is not None:
            causal = torch.ones(doc.shape[1], doc.shape[1], dtype=torch.bool, device=doc.device).tril()
            mask = ((doc.unsqueeze(2) == doc.unsqueeze(1)) & causal).unsqueeze(1)        # [B, 1, T, T]
        return Context(angles.cos().to(dtype), angles.sin().to(dtype), positions, mask, cache, rows, span,
                       replay, plausibility, real, [] if record else None, cp)

    @property
    def split_rows(self) -> bool:
        """Does every rank hold only its share of each row's tokens?"""
        return self.parallel is not None and self.parallel.cp is not None

    def _check_routes(self, replay: Tensor, positions: Tensor) -> None:
        want = (*positions.shape, self.config.n_moe_layers, self.config.n_experts_per_tok)
        if tuple(replay.shape) != want:
            raise ValueError(f"routes to replay are {tuple(replay.shape)}, not {want}: [B, T, L, K] with L "
                             "the MoE layers; dense layers have none")
        if replay.numel() and int(replay.max()) >= self.config.n_experts:
            raise ValueError(f"routes to replay name expert {int(replay.max())}, and there are "
                             f"{self.config.n_experts}")

    def forward(self, tokens: Tensor, ctx: Context | None = None) -> Tensor:
        if ctx is None:
            ctx = self.context(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        x = self.embed_tokens(tokens)                                                    # [B, T, D]
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, ctx, use_reentrant=False)
            else:
                x = layer(x, ctx)
        return self.norm(x)

    def balance(self, rate: float) -> None:
        """Move every router's correction bias by its load since the last call."""
        for module in self.modules():
            if isinstance(module, MoE):
                module.balance(rate)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fill all weights from one seeded generator, in the order of their names (norms stay 1)."""
        initialise(self, self.config, seed)
        if self.config.positional_heads:
            look_back(self.layers[0].self_attn, self.embed_tokens, self.config)


@torch.no_grad()
def initialise(module: nn.Module, c: Config, seed: int) -> None:
    """Normal(0, init_std), or 1/√fan_in where init_std is 0; embeddings then have std 1; norms stay at 1."""
    g = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if p.dim() < 2:
            nn.init.ones_(p)
        else:
            std = c.init_std or (1.0 if "embed_tokens" in name else p.shape[-1] ** -0.5)
            p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=g))


def look_back(attn: Attention, embed: nn.Embedding, c: Config) -> None:
    """Start the first `positional_heads` heads of layer 0 so that head h looks h + 1 tokens back.

    A head that copies needs to know what stood before each token; with random weights that knowledge takes
    thousands of steps to appear. The construction: coordinate 0 of every embedding is one constant; the
    rotary key reads only it, the same vector u at every position; head h's rotary query reads it too, as u
    turned by −(h + 1) positions. Then

        q_i · k_j ∝ Σ_pairs cos(ω (i − j − (h + 1)))

    is largest at j = i − (h + 1). Only fast pairs take part (ω > 0.05): a slow one cannot tell neighbours
    apart and would only weigh in the norm of token j. Everything stays trainable.
    """
    dn, dr, level, gain = c.qk_nope_head_dim, c.qk_rope_head_dim, 4.0, 6.0
    frequencies = yarn_inverse_frequencies(c)
    embed.weight[:, 0] = level * embed.weight.std()
    u = torch.zeros(dr)
    u[0::2] = (frequencies > 0.05).float()
    attn.kv_a_proj_with_mqa.weight[c.kv_lora_rank:] = 0
    attn.kv_a_proj_with_mqa.weight[c.kv_lora_rank:, 0] = u * gain / level
    attn.q_a_proj.weight[0] = 0
    attn.q_a_proj.weight[0, 0] = 4.0
    heads = attn.q_b_proj.weight.view(c.n_heads, dn + dr, c.q_lora_rank)
    for h in range(c.positional_heads):
        angle = -(h + 1) * frequencies
        turned = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten()  # u turned back, by pairs
        heads[h] = 0
        heads[h, dn:, 0] = turned * gain / math.sqrt(c.q_lora_rank) / attn.scale / math.sqrt(dr)


# ---------------------------------------------------------------------------------------------- checkpoints

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
          "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Stored(NamedTuple):
    """A tensor inside a mapped file: nothing is read before `tensor` is called and its values are used."""
    data: Tensor                                 # the whole file as bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int                                   # byte in the file
    end: int

    def tensor(self) -> Tensor:
        raw = self.data[self.start:self.end]
        if self.start % self.dtype.itemsize:     # some writers do not align: copy
            raw = raw.clone()
        return raw.view(self.dtype).view(self.shape)


def read_safetensors(path: str | os.PathLike) -> dict[str, Stored]:
    """The tensors of one safetensors file, memory-mapped.

    The format: a little-endian uint64 n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data,
    one tensor after the other without gaps. A file that is cut off, too long or contradicts itself is a
    ValueError; the format has no checksum, so a flipped bit in the data goes unseen.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        if size < 8 or n > size - 8:
            raise ValueError(f"{path}: {size} bytes do not hold a header of {n}: cut off, or another format")
        text = f.read(n)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [(name, DTYPES[e["dtype"]], tuple(map(int, e["shape"])), int(start), int(end))
                   for name, e in header.items() for start, end in (e["data_offsets"],)]
        entries.sort(key=lambda e: e[3:])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged header ({type(error).__name__}: {error})") from None
    data, at, out = torch.from_file(str(path), size=size, dtype=torch.uint8), 0, {}
    for name, dtype, shape, start, end in entries:
        if start != at or min(shape, default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: {name} claims bytes {start} to {end} for {list(shape)} of {dtype}, "
                             f"and the one before it ends at {at}")
        out[name], at = Stored(data, dtype, shape, 8 + n + start, 8 + n + end), end
    if 8 + n + at != size:
        raise ValueError(f"{path}: {size} bytes, but its header describes {8 + n + at}: cut off or damaged")
    return out


def unpack_int4(packed: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    """Kimi K2.5's experts: compressed-tensors' "pack-quantized", 4 bits, symmetric, a scale per group.

    packed int32 [out, ⌈in / 8⌉] holds q + 8, the first column in the lowest four bits; scale [out, groups];
    shape holds [out, in]. Returns q · scale, [out, in], in the type of `scale`.
    """
    (rows, columns), groups = shape.tolist(), scale.shape[-1]
    words = (rows, -(-columns // 8))
    if packed.dtype != torch.int32 or packed.shape != words or len(scale) != rows or columns % groups:
        raise ValueError(f"{packed.dtype} {list(packed.shape)} with scales {list(scale.shape)} does not hold "
                         f"{rows} x {columns} numbers of 4 bits")
    q = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15).flatten(1)[:, :columns] - 8
    return (q.unflatten(1, (groups, -1)) * scale.float().unsqueeze(-1)).flatten(1).to(scale.dtype)


def unpack_fp8(codes: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """DeepSeek-V3's and Kimi K2's weights: E4M3 codes [out, in], float32 scales per 128 x 128; to bf16."""
    want = tuple(-(-n // block) for n in codes.shape)
    if tuple(scale.shape) != want:
        raise ValueError(f"weight_scale_inv is {list(scale.shape)}, not {list(want)}")
    full = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return (codes.float() * full[:codes.shape[0], :codes.shape[1]]).bfloat16()


class Checkpoint(Mapping[str, Tensor]):
    """A folder of safetensors shards (or one file) as a lazy mapping from public names to tensors.

    Names are DeepSeek-V3's and Kimi K2's: `model.layers.3.mlp.experts.17.gate_proj.weight`. Kimi K2.5's
    `language_model.` in front is taken off, and what lacks it (the vision tower) is left out. A quantised
    weight appears as one `….weight` and is unpacked when asked for. The rest are views of the mapped files,
    so that a rank which asks for its own experts reads only those.
    """

    def __init__(self, path: str | os.PathLike):
        self.stored: dict[str, Stored] = {}
        for file, names in _shards(Path(path)).items():
            tensors = read_safetensors(file)
            if names is not None and names != tensors.keys():
                raise ValueError(f"{file} and the index disagree about {_few(names ^ tensors.keys())}")
            if twice := self.stored.keys() & tensors:
                raise ValueError(f"{file} repeats {_few(twice)}")
            self.stored |= tensors
        prefix = "language_model."
        if any(name.startswith(prefix) for name in self.stored):
            self.stored = {n.removeprefix(prefix): t for n, t in self.stored.items() if n.startswith(prefix)}
        parts = ("_scale", "_shape", "_scale_inv")
        self.names = [n.removesuffix("_packed") for n in self.stored if not n.endswith(parts)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> Tensor:
        get = lambda part: self.stored[name + part].tensor()
        if name + "_packed" in self.stored:
            return unpack_int4(get("_packed"), get("_scale"), get("_shape"))
        return unpack_fp8(get(""), get("_scale_inv")) if name + "_scale_inv" in self.stored else get("")

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of what `[name]` returns, without unpacking it."""
        if name + "_packed" in self.stored:
            shape = self.stored[name + "_shape"].tensor()
            return tuple(shape.tolist()), self.stored[name + "_scale"].dtype
        stored = self.stored[name]
        return stored.shape, torch.bfloat16 if name + "_scale_inv" in self.stored else stored.dtype


def _few(names: Iterable[str], n: int = 5) -> str:
    names = sorted(names)
    return f"{len(names)} tensors: " + ", ".join(names[:n]) + (", …" if len(names) > n else "")


def _shards(path: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint, with the names that its index promises in each (None: there is no index)."""
    if not path.is_dir():
        return {path: None}
    index = path / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path}: no *.safetensors in this folder")
        return dict.fromkeys(files)
    try:
        where = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: damaged ({type(error).__name__}: {error})") from None
    files: dict[Path, set[str]] = {}
    for name, file in where.items():
        files.setdefault(path / Path(file).name, set()).add(name)        # an index never leads elsewhere
    if lost := [file.name for file in files if not file.exists()]:
        raise ValueError(f"{path}: {len(lost)} files of the index are not there: {', '.join(lost[:5])}")
    return files


def public_views(model: Transformer, experts: range | None = None) -> Iterator[tuple[str, Tensor]]:
    """(public name, view into the model) of every tensor of a checkpoint: to be written, or copied into.

    experts: which ids the stacked weights hold, a rank's share under expert parallelism; None: all.
    """
    experts = experts or range(model.config.n_experts)
    for name, tensor in model.state_dict().items():
        public = name if name.startswith("lm_head.") else "model." + name
        if not public.endswith(("w_gate_up", "w_down")):
            yield public, tensor
            continue
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor            # a rank's DTensor
        if len(tensor) != len(experts):
            raise ValueError(f"{name} holds {len(tensor)} experts, not the {len(experts)} of {experts}")
        yield from expert_views(public, tensor, experts)


def expert_views(name: str, stacked: Tensor, experts: Iterable[int]) -> Iterator[tuple[str, Tensor]]:
    """(public name, view) per expert and projection of `name`, ….w_gate_up [E, 2I, D] or ….w_down [E, D, I]."""
    base, _, last = name.rpartition(".")
    for e, w in zip(experts, stacked):
        for part, view in zip(("gate", "up"), w.chunk(2)) if last == "w_gate_up" else (("down", w),):
            yield f"{base}.experts.{e}.{part}_proj.weight", view


@torch.no_grad()
def load(model: Transformer, path: str | os.PathLike | Checkpoint, experts: range | None = None) -> None:
    """Copy a checkpoint into a model, tensor by tensor; `experts` as in `public_views`.

    Names, shapes and types are all checked before the first copy: a refused checkpoint (ValueError) leaves
    the model as it was. Types may widen (bf16 into float32) and not narrow. MTP layers are passed over.
    """
    source = path if isinstance(path, Checkpoint) else Checkpoint(path)
    views, problems = dict(public_views(model, experts)), []
    if missing := views.keys() - source.keys():
        problems.append(f"not in the checkpoint: {_few(missing)}")
    if unknown := _unknown(views.keys(), source, model.config):
        problems.append(f"not in the model: {_few(unknown)}")
    for name in sorted(views.keys() & source.keys()):
        (shape, dtype), view = source.spec(name), views[name]
        if shape != tuple(view.shape):
            problems.append(f"{name} is {list(shape)} in the checkpoint and {list(view.shape)} in the model")
        elif dtype not in FLOATS or torch.promote_types(dtype, view.dtype) != view.dtype:
            problems.append(f"{name} is {dtype} in the checkpoint and {view.dtype} in the model, which loses "
                            "digits: load into a wider model")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("this checkpoint does not fit: " + "; ".join(problems[:5]) + more)
    for name, view in views.items():
        view.copy_(source[name])


def _unknown(known: Iterable[str], source: Checkpoint, c: Config) -> list[str]:
    """Names without a place in the model. Other ranks' experts, MTP layers behind the model's last layer and
    the rotary tables of old checkpoints are no such names: they are passed over."""
    def any_expert(name: str) -> str:
        return re.sub(r"(?<=\.experts\.)\d+", lambda e: "all" if int(e[0]) < c.n_experts else e[0], name)

    patterns = {any_expert(name) for name in known}
    found = (re.fullmatch(r"(model\.layers\.(\d+)\.)eh_proj\.weight", name) for name in source)
    mtp = tuple(m[1] for m in found if m and int(m[2]) >= c.n_layers)
    return [name for name in source if any_expert(name) not in patterns
            and not name.startswith(mtp) and not name.endswith("rotary_emb.inv_freq")]


def save(folder: str | os.PathLike, tensors: Mapping[str, Tensor], shard_bytes: int = 5 << 30) -> None:
    """Write safetensors shards of at most about `shard_bytes`, and the index last; `tensors` keep their
    names: `save(folder, dict(public_views(model)))`. A folder with a checkpoint in it is refused."""
    folder, shards, size = Path(folder), [{}], 0
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors*")):
        raise ValueError(f"{folder} holds a checkpoint already: choose another folder")
    for name, t in tensors.items():
        if size and size + t.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = t
        size += t.nbytes
    n, where = len(shards), {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if n == 1 else f"model-{i:05}-of-{n:05}.safetensors"
        write_safetensors(folder / file, shard)
        where |= dict.fromkeys(shard, file)
    if n > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file in the format that `read_safetensors` describes; it appears whole or not at all."""
    names, at = {dtype: name for name, dtype in DTYPES.items()}, 0
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())          # keeps all aligned
    for name, t in ordered:
        header[name] = dict(dtype=names[t.dtype], shape=list(t.shape), data_offsets=[at, at + t.nbytes])
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    with open(part, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, t in ordered:
            f.write(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    os.replace(part, path)


# ------------------------------------------------------------------------ rows on their way (S2, S3, S4)


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Callable, back: Callable, mxfp8: bool) -> Tensor:
        ctx.back = back
        if mxfp8:
            return kernels.mxfp8_unpack(there(kernels.mxfp8_pack(x)), x.dtype)
        return there(x.bfloat16()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(dy.bfloat16()).to(dy.dtype), None, None, None


def _stay(rows: Tensor) -> Tensor:
    return rows


def dispatch_rows(x: Tensor, there: Callable = _stay, back: Callable = _stay) -> Tensor:
    """Rows [S, D] to the ranks of their experts (S4): packed in MXFP8, 33 bytes for 32 values. The gradient
    comes back in bf16 and ignores the rounding. `there` exchanges rows between ranks, `back` undoes it; with
    the defaults nothing moves, which is how one process does the same arithmetic as many."""
    return _Transport.apply(x, there, back, True)


def combine_rows(y: Tensor, there: Callable = _stay, back: Callable = _stay) -> Tensor:
    """Rows [S, D] of the experts' outputs on their way home, in bf16 both ways (S4); arguments as above."""
    return _Transport.apply(y, there, back, False)


def expert_traffic(c: Config, n_tokens: int, ep: int) -> dict[str, int]:
    """Bytes that a rank sends in one MoE layer's forward pass, when routing is even (S4): a row per (token,
    expert) of another rank, as MXFP8 there and as bf16 back; "bf16" is the sum with bf16 both ways. DeepEP
    also sends a token only once to a rank that has several of its experts; that is left out."""
    rows = n_tokens * c.n_experts_per_tok * (ep - 1) // ep
    there, back = rows * c.dim * 33 // 32, rows * c.dim * 2
    return {"rows": rows, "dispatch": there, "combine": back, "sum": there + back, "bf16": 2 * back}


def latent_traffic(c: Config, length: int, cp: int) -> dict[str, int]:
    """Bytes in bf16 that a rank receives in one layer's forward pass over a row of `length` tokens split over
    `cp` ranks (S2): of latents, and of keys and values if those were gathered instead."""
    others = length * (cp - 1) // cp
    full = c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    return {"latents": 2 * others * (c.kv_lora_rank + c.qk_rope_head_dim), "keys_values": 2 * others * full}


def causal_pairs(length: int, cp: int, zigzag: bool = True) -> list[int]:
    """(query, key) pairs under the causal mask on each of `cp` ranks, which is attention's work (S3).

    The row is cut into 2·cp chunks of n tokens; chunk j has n²·j + n(n + 1)/2 pairs. Zigzag: rank i takes
    chunks i and 2·cp − 1 − i, and all ranks have the same. Otherwise it takes neighbours, 2i and 2i + 1.
    """
    n, left = divmod(length, 2 * cp)
    if left:
        raise ValueError(f"{length} tokens do not divide into 2 · {cp} chunks: pad to a multiple of {2 * cp}")
    pairs = [n * n * j + n * (n + 1) // 2 for j in range(2 * cp)]
    return [pairs[i] + pairs[-1 - i] if zigzag else pairs[2 * i] + pairs[2 * i + 1] for i in range(cp)]


# ------------------------------------------------------------------------------- across ranks (S1 to S4)


@dataclass
class Parallel:
    """The process groups that this rank's model works in. None: not split that way.

    Every rank holds E / ep experts of every MoE layer and T / cp tokens of every row. `world` has all ranks:
    the load that moves the routers' biases is summed over it. With `cp` set to None for a while every rank of
    the group reads whole rows, as evaluation does.
    """
    world: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None


def parallelise(module: nn.Module, parallel: Parallel | None) -> None:
    """Tell a model (or MTP layers) which groups it works in; with an `ep`, `shard_experts` it too."""
    for m in module.modules():
        if isinstance(m, (Transformer, MoE)):
            m.parallel = parallel


def shard_experts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every stacked expert weight becomes a DTensor that is cut along the experts over the 1-D `mesh`.

    DTensors and not plain slices: optimizers, norms and checkpoints then know that the ranks' parts differ.
    Plain slices under one name count as copies when a checkpoint is written: all but one rank's are lost.
    """
    from torch.distributed.tensor import Shard, distribute_tensor  # costs a second: not at the top

    for m in module.modules():
        if isinstance(m, MoE):
            if m.c.n_experts % mesh.size():
                raise ValueError(f"{m.c.n_experts} experts do not divide over {mesh.size()} ranks (EP)")
            for name in ("w_gate_up", "w_down"):
                whole = getattr(m, name)
                cut = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(m, name, nn.Parameter(cut, whole.requires_grad))


def local_part(weight: Tensor) -> Tensor:
    """This rank's experts of a stacked weight: [E / ep, ·, ·], or all of them where nothing is cut."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def all_to_all(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows to the ranks of a group: the first send[0] to rank 0, and so on; zeros are allowed."""
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


class _Exchange(torch.autograd.Function):
    """`there` with a gradient that takes the way `back`."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


def routed_across(moe: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`MoE.routed` with the experts spread over the ranks of an expert-parallel group (S1, S4).

    Sort this rank's (token, slot) pairs by expert, and so by rank; tell each rank how many rows come for each
    of its experts; send the rows; sort what arrived by expert; compute; send the results home the way they
    came; weigh and add them there. A rank without tokens, or whose experts nobody chose, takes part with 0
    rows: staying away would leave the others waiting. x [N, D], ids and weights [N, K]; returns [N, D].
    """
    group, quantised = moe.parallel.ep, moe.c.dispatch == "mxfp8"
    w_gate_up, w_down = local_part(moe.w_gate_up), local_part(moe.w_down)
    ranks, (N, K), local = group.size(), ids.shape, len(w_gate_up)
    p = kernels.plan(ids, moe.c.n_experts)
    counts = torch.empty_like(p.counts)                                                  # [ranks · E / ranks]
    dist.all_to_all_single(counts, p.counts, group=group)
    counts = counts.view(ranks, local)                                                   # [source, my expert]
    # The numbers of rows must be known on the host: one synchronisation a layer on a GPU (DeepEP avoids it).
    send, receive = p.counts.view(ranks, local).sum(1).tolist(), counts.sum(1).tolist()
    there = partial(all_to_all, send=send, receive=receive, group=group)
    back = partial(all_to_all, send=receive, receive=send, group=group)
    # A copy of each token per slot, then a permutation: in backward no two rows meet, so nothing is atomic.
    rows = x.unsqueeze(1).expand(N, K, -1).reshape(N * K, -1)[p.order]
    rows = (dispatch_rows if quantised else _Exchange.apply)(rows, there, back)    # by source, then expert
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(counts.flatten())
    order = expert.argsort(stable=True)
    y = kernels.grouped_experts(rows[order], counts.sum(0), w_gate_up, w_down, moe.c.precision)
    y = y[order.argsort()]
    y = (combine_rows if quantised else _Exchange.apply)(y, back, there)[p.inverse]      # [N · K, D], at home
    return (y.view(N, K, -1) * weights.unsqueeze(2)).sum(1).to(x.dtype)


def zigzag(length: int, cp: int, rank: int) -> Tensor:
    """Positions of a row that rank `rank` of `cp` holds (S3): of 2·cp chunks the `rank`-th from each end."""
    n, left = divmod(length, 2 * cp)
    if left:
        raise ValueError(f"{length} tokens do not divide into 2 · {cp} chunks: pad to a multiple of {2 * cp}")
    chunk = torch.arange(n)
    return torch.cat((chunk + rank * n, chunk + (2 * cp - 1 - rank) * n))


def whole_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [B, T / cp, ·] to [B, T, ·] in the order of the sequence, without a gradient."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    first, last = zip(*(part.chunk(2, dim=1) for part in parts))
    return torch.cat((*first, *reversed(last)), dim=1)


def own_gradient(dx: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Backward of `whole_rows`: Σ over ranks of the gradient [B, T, ·], this rank's tokens of it."""
    chunks, n = dx.chunk(2 * group.size(), dim=1), group.size()
    parts = [torch.cat((chunks[i], chunks[2 * n - 1 - i]), dim=1) for i in range(n)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)                    # sums, for the loss is a sum over ranks
    return out


def gather_latents(latent: Tensor, k_rope: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The latents [B, T, R] and rotary keys [B, T, dr] of whole rows from every rank's share (S2).

    R + dr numbers a token travel, where keys and values of H heads would be H (dn + dr + dv), 36 times as
    many. Each rank then projects all of them itself.
    """
    both = torch.cat((latent, k_rope), dim=-1)
    both = _Exchange.apply(both, partial(whole_rows, group=group), partial(own_gradient, group=group))
    return both.split([latent.shape[-1], k_rope.shape[-1]], dim=-1)


def zigzag_masks(doc: Tensor, group: dist.ProcessGroup) -> list[tuple[int, Tensor]]:
    """For each of this rank's two chunks: how many keys it may look at, and which.

    doc [B, T / cp]: numbers of documents. Rows of one document each need no mask but "causal, aligned at the
    end", which fused kernels know; others get [B, 1, n, keys]. Keys behind a chunk are not touched: that is
    what makes the work equal.
    """
    docs, n = whole_rows(doc, group), doc.shape[1] // 2
    whole, masks = bool((docs == docs[:, :1]).all()), []
    for start in (group.rank() * n, (2 * group.size() - 1 - group.rank()) * n):
        end = start + n
        if whole:
            masks.append((end, causal_lower_right(n, end)))
            continue
        causal = torch.ones(n, end, dtype=torch.bool, device=doc.device).tril(start)
        same = docs[:, start:end].unsqueeze(2) == docs[:, :end].unsqueeze(1)
        masks.append((end, (same & causal).unsqueeze(1)))
    return masks


def attend_chunks(q: Tensor, k: Tensor, v: Tensor, masks: list[tuple[int, Tensor]], scale: float) -> Tensor:
    """Attention of two chunks of queries [B, H, T / cp, ·] on the keys before their ends, of [B, H, T, ·]."""
    attend = partial(F.scaled_dot_product_attention, scale=scale)
    return torch.cat([attend(q_n, k[:, :, :end], v[:, :, :end], attn_mask=mask)
                      for q_n, (end, mask) in zip(q.chunk(2, dim=2), masks)], dim=2)


def ahead(x: Tensor, n: int, parallel: Parallel | None) -> Tensor:
    """x [B, T, ·] of n positions later in its row; the last n get the first ones. The row may be spread over
    ranks: shifting a rank's own tokens would be wrong at the edge of every chunk. No gradient where it is."""
    if parallel is None or parallel.cp is None:
        return x.roll(-n, dims=1)
    group = parallel.cp
    index = zigzag(x.shape[1] * group.size(), group.size(), group.rank()).to(x.device)
    return whole_rows(x, group).roll(-n, dims=1)[:, index]


# ------------------------------------------------------------------------------------------------- counting


def count(c: Config) -> dict[str, int]:
    """Parameters of a configuration by part, counted on the meta device; "active" is per token, head and
    embedding included. The correction biases are buffers, E per MoE layer, and stand beside the sum."""
    with torch.device("meta"):
        model = Transformer(c)
    parts = dict(experts=0, shared=0, router=0, attention=0, dense=0, embedding=0, head=0, norms=0)
    marks = {"w_gate_up": "experts", "w_down": "experts", "shared": "shared", "mlp.gate.weight": "router",
             "norm": "norms", "self_attn": "attention", "embed": "embedding", "lm_head": "head", "": "dense"}
    for name, p in model.named_parameters():
        parts[next(part for mark, part in marks.items() if mark in name)] += p.numel()
    total, idle = sum(parts.values()), c.n_experts - c.n_experts_per_tok
    return {**parts, "total": total, "active": total - parts["experts"] * idle // c.n_experts,
            "biases": c.n_moe_layers * c.n_experts}


def count_mtp(c: Config) -> int:
    """Parameters of one multi-token prediction module: a block, the projection of two inputs, three norms."""
    with torch.device("meta"):
        block = Block(c, c.n_layers)
    return sum(p.numel() for p in block.parameters()) + 2 * c.dim ** 2 + 3 * c.dim


def flops_per_token(c: Config, length: int) -> tuple[float, float]:
    """(matrix products, attention) of a training step, forward and backward, per token at a length, causal.

    6 FLOPs per active weight (embedding look-up left out); attention: 3 · 2 · H (dn + dr + dv) · length / 2
    per layer.
    """
    n = count(c)
    heads = c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    return 6.0 * (n["active"] - n["embedding"]), 3.0 * heads * length * c.n_layers


# ---------------------------------------------------------------------------------------------- demonstration

SMALL = Config(vocab_size=97, dim=64, n_layers=5, n_heads=4, q_lora_rank=32, kv_lora_rank=32, ffn_dim=96,
               qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, expert_dim=32, n_experts=32,
               n_experts_per_tok=4, rope_original_len=64, rope_factor=4.0, init_std=0.0)


def show_size(c: Config) -> None:
    n = count(c)
    print("Kimi K2.5, where the parameters are")
    for part, size in (n | {"with 1 MTP": n["total"] + count_mtp(c)}).items():
        print(f"    {part:10} {size:>22,}  {100 * size / n['total']:7.3f} %")
    for length in (32_768, 262_144):
        linear, attention = (f / 1e9 for f in flops_per_token(c, length))
        share = attention / (linear + attention)
        print(f"training FLOPs per token at {length:7,}: {linear + attention:6.0f} G, attention {share:.0%}")


def show_bytes(c: Config) -> None:
    latent = 2 * c.n_layers * (c.kv_lora_rank + c.qk_rope_head_dim)
    plain = 2 * c.n_layers * c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    print(f"cache per token in bf16, all layers: {latent:,} bytes of latents, {plain:,} of plain multi-head "
          f"attention's keys and values ({plain / latent:.1f}x)")
    for length, cp in ((32_768, 2), (262_144, 8)):
        t = latent_traffic(c, length, cp)
        work = causal_pairs(length, cp), causal_pairs(length, cp, zigzag=False)
        even, uneven = (max(pairs) * cp / sum(pairs) for pairs in work)
        print(f"CP={cp}, {length:,} tokens: a rank receives {t['latents'] / 1e6:.0f} MB of latents a layer, "
              f"keys and values would be {t['keys_values'] / 1e6:,.0f} MB; work of the busiest rank / mean: "
              f"{even:.2f} zigzag, {uneven:.2f} contiguous")
    t = expert_traffic(c, 16_384, 8)
    print(f"EP=8, 16,384 tokens a rank: {t['rows']:,} rows leave it a layer, {t['dispatch'] / 1e9:.2f} GB in "
          f"MXFP8; {t['combine'] / 1e9:.2f} GB return in bf16: {t['sum'] / t['bf16']:.0%} of bf16 both ways")


@torch.no_grad()
def decoding_gap(c: Config = SMALL, n: int = 30) -> float:
    """Largest difference of the hidden states, float64: token by token through the cache, and all at once."""
    model = Transformer(c).double().eval()
    model.reset_parameters(0)
    tokens = torch.arange(2 * n).view(2, n) % c.vocab_size
    cache, states = Cache(c, 2, n, dtype=torch.float64), []
    for t in range(n):
        states.append(model(tokens[:, t:t + 1], model.context(torch.full((2, 1), t), cache=cache)))
    return float((torch.cat(states, 1) - model(tokens)).abs().max())


@torch.no_grad()
def replay_gaps(damaged: float = 0.0, plausibility: float = 0.5, seed: int = 0, c: Config = SMALL
                ) -> dict[str, tuple[float, float]]:
    """p50 and p99 of |log p_trainer − log p_sampler| over 1,016 tokens: no replay, replay, filter (M3, M4).

    The sampler has the trainer's weights rounded to bf16. `damaged` is the share of (token, layer) pairs
    whose recorded experts are replaced by random ones on their way to the trainer.
    """
    trainer, sampler = Transformer(c).eval(), Transformer(c).eval()
    trainer.reset_parameters(seed)
    sampler.load_state_dict({k: v.bfloat16().float() for k, v in trainer.state_dict().items()})
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, c.vocab_size, (8, 128), generator=g)

    def run(model: Transformer, **how: object) -> tuple[Tensor, Tensor]:
        ctx = model.context(torch.arange(128).expand_as(tokens), record=True, **how)
        logp = model.lm_head(model(tokens, ctx)).log_softmax(-1)[:, :-1]
        return logp.gather(2, tokens[:, 1:, None]).flatten(), torch.stack(ctx.routes, 2)  # [B, T, L_moe, K]

    sampled, routes = run(sampler)
    random = torch.rand(*routes.shape[:3], c.n_experts, generator=g).topk(c.n_experts_per_tok).indices
    routes = torch.where(torch.rand(routes.shape[:3], generator=g).unsqueeze(3) < damaged, random, routes)
    ways = {"none": {}, "replay": dict(replay=routes)}
    ways["filter"] = dict(replay=routes, plausibility=plausibility)
    gaps = {name: (run(trainer, **how)[0] - sampled).abs() for name, how in ways.items()}
    return {name: (float(gap.quantile(0.5)), float(gap.quantile(0.99))) for name, gap in gaps.items()}


def show_replay() -> None:
    print("router replay: |Δ log-prob| between a trainer in fp32 and a sampler with weights rounded to bf16")
    for damaged in (0.0, 0.01):
        gaps = replay_gaps(damaged)
        row = "   ".join(f"{name} {p50:.4f} {p99:.4f}" for name, (p50, p99) in gaps.items())
        print(f"    p50 and p99, {damaged:.0%} of the recorded routes damaged:   {row}")


# ------------------------------------------------------------------------------------------------ measurement

SHAPES = {"toy": (2560, 128, 64, 8, 2), "wide": (1024, 512, 256, 64, 8)}                 # N, D, hidden, E, K


def _sliced(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The experts as a loop over slices in plain autograd: one matrix product per expert and weight."""
    order = ids.flatten().sort(stable=True).indices
    rows, sizes = order // ids.shape[1], ids.flatten().bincount(minlength=len(w_down)).tolist()
    parts = []
    for part, w_in, w_out in zip(x[rows].split(sizes), w_gate_up.unbind(), w_down.unbind()):
        gate, up = F.linear(part, w_in).chunk(2, dim=1)
        parts.append(F.linear(F.silu(gate) * up, w_out))
    y = torch.cat(parts) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, rows, y.to(x.dtype))


def _players(leaves: list[Tensor], ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Name -> function that runs the experts on the leaves x, weights, w_gate_up, w_down: ours and theirs."""
    x, weights, w_gate_up, w_down = leaves
    players = {"ours": lambda: kernels.experts(x, ids, weights, w_gate_up, w_down),
               "sliced loop": lambda: _sliced(x, ids, weights, w_gate_up, w_down)}
    if not importlib.util.find_spec("transformers"):
        return players
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
    for how in ("eager", "batched_mm", "grouped_mm"):
        if how == "batched_mm" and ids.numel() * w_gate_up[0].nbytes > 1e9:
            continue                             # it copies the weights of every (token, expert) pair
        module = DeepseekV3Experts(DeepseekV3Config(
            hidden_size=x.shape[1], moe_intermediate_size=w_down.shape[2], n_routed_experts=len(w_down),
            num_experts_per_tok=ids.shape[1], experts_implementation=how))
        module.gate_up_proj, module.down_proj = w_gate_up, w_down
        players[f"transformers {how}"] = lambda m=module: m(x, ids, weights)
    return players


def bench_shape(shape: tuple[int, ...], dtype: torch.dtype, rounds: int = 10) -> dict[str, float]:
    """Best milliseconds of CPU time of forward and backward per player, in turns on the same tensors, after a
    check that all have the same gradients."""
    N, D, hidden, E, K = shape
    g = torch.Generator().manual_seed(0)
    normal = lambda *size, std=1.0: nn.Parameter(torch.empty(size).normal_(0, std, generator=g).to(dtype))
    ids, weights, _ = kernels.route(torch.randn(N, E, generator=g), torch.zeros(E), K)
    leaves = [normal(N, D), nn.Parameter(weights), normal(E, 2 * hidden, D, std=D ** -0.5),
              normal(E, D, hidden, std=hidden ** -0.5)]
    dy, players, best = normal(N, D).detach(), _players(leaves, ids), {}
    both = {name: (lambda f=f: torch.autograd.grad(f(), leaves, dy)) for name, f in players.items()}
    ours, tolerance = both["ours"](), 2e-5 if dtype == torch.float32 else 5e-2
    for name, run in both.items():
        if not all((a - b).norm() <= tolerance * b.norm() for a, b in zip(ours, run())):
            raise RuntimeError(f"{name} has other gradients than ours: this would compare different things")
    for i in range(rounds):
        for name, run in both.items():
            if i and best[name] > 3 * min(best.values()):
                continue                         # out of the race
            began = time.process_time()
            run()
            best[name] = min(best.get(name, math.inf), round(1e3 * (time.process_time() - began), 2))
    return best


def bench() -> dict:
    """The experts, forward and backward, beside every implementation that transformers has."""
    torch.set_num_threads(1)
    rows = []
    for dtype, (name, shape) in itertools.product((torch.float32, torch.bfloat16), SHAPES.items()):
        ms = bench_shape(shape, dtype)
        theirs = [t for player, t in ms.items() if player.startswith("transformers")]
        ratio = round(min(theirs) / ms["ours"], 3) if theirs else None
        rows.append(dict(shape=name, **dict(zip(("N", "D", "hidden", "E", "K"), shape)), dtype=str(dtype),
                         vs_transformers_best=ratio, ms=ms))
        print(f"{name} {shape} {dtype}: " + ", ".join(f"{p} {t} ms" for p, t in ms.items()), flush=True)
    print("ours is torch's grouped_mm where it takes the operands, else slices; batched_mm is left out where "
          "its copies of weights would exceed 1 GB; CPU time of one thread, which other work disturbs least")
    fp32 = [r["vs_transformers_best"] for r in rows if r["dtype"] == "torch.float32"]
    if None in fp32:
        print("transformers is not installed: vs_transformers_best is null")
    return {"vs_transformers_best": None if None in fp32 else min(fp32), "threads": 1,
            "what": "experts, forward + backward; the lowest ratio of the fp32 rows", "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kimi K2.5 in numbers; see the top of the file")
    parser.add_argument("--bench", action="store_true", help="time the experts beside transformers'")
    if parser.parse_args().bench:
        print(json.dumps(bench()))
        return
    show_size(Config())
    show_bytes(Config())
    show_replay()
    print(f"float64, token by token through the cache against all at once: largest gap {decoding_gap():.1e}")


if __name__ == "__main__":
    main()
