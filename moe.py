"""The model: Kimi K2.5's mixture-of-experts transformer, at any size.

Composer 2 starts from Kimi K2.5 (report §3, claims M1–M4), which is DeepSeek-V3's layout with other numbers: multi-head
latent attention (MLA), a first dense layer, then layers whose feed-forward part is a router that sends each token to k of E
small experts, plus one expert that every token shares. Everything that the number of parameters depends on stands in
`Config`; `Config()` is the released Kimi K2.5 (1.0264T parameters, 32B active), and the toy is a row of smaller numbers.

    router   s = sigmoid(x W_r)             scores, fp32
             ids = top-k of s + b           b: correction bias, moved by the load, never by the gradient
             g = s[ids] / Σ s[ids] · scale  gates; the gradient reaches the router through them
    layer    y = Σ_k g_k · E_ids_k(x) + E_shared(x)

Legend: B batch, T tokens, S cached tokens, D width, H heads, E experts, K experts per token, R rank of the key-value latent,
dn / dr / dv per-head width of the position-free key, the rotary key and the value.

Differences from the released model:
1. The latent norms use eps 1e-6 and the others 1e-5, as in transformers' implementation of this architecture.
2. `positional_heads` > 0 starts that many heads of layer 0 as heads that look 1, 2, … tokens back (see `reset_parameters`).
   It is an initialisation, not a change of the architecture: 0, the default, is Kimi's. The toy needs it because copying
   from the context is the first thing that an agent does, and a model trained for two minutes does not discover it by itself.
3. Weights are initialised with std `init_std`, or 1/√fan_in where it is 0 (small widths want the latter).

    python moe.py        where the parameters of the full size are, and the parity of cached and plain attention
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels


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
    precision: str = "native"          # arithmetic of the experts: native, mxfp8 or nvfp4 (emulated where no GPU does it)

    def __post_init__(self) -> None:
        if not 1 <= self.n_experts_per_tok <= self.n_experts:
            raise ValueError(f"n_experts_per_tok = {self.n_experts_per_tok} must be between 1 and n_experts = {self.n_experts}")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise ValueError(f"n_dense_layers = {self.n_dense_layers} must be between 0 and n_layers = {self.n_layers}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even: rotary positions turn pairs")
        if self.precision not in ("native", "mxfp8", "nvfp4"):
            raise ValueError(f"precision = {self.precision!r}: choose native, mxfp8 or nvfp4")
        if self.positional_heads > self.n_heads:
            raise ValueError(f"positional_heads = {self.positional_heads} exceeds n_heads = {self.n_heads}")

    @property
    def max_len(self) -> int:
        """Longest sequence that the rotary positions cover, in tokens."""
        return int(self.rope_factor * self.rope_original_len)

    @property
    def n_moe_layers(self) -> int:
        return self.n_layers - self.n_dense_layers


# ---------------------------------------------------------------------------------------------------- rotary positions


def yarn_inverse_frequencies(c: Config) -> Tensor:
    """Inverse frequencies of the rotary pairs under YaRN (arXiv 2309.00071), float32 [dr / 2].

    Pairs that turn more than beta_fast times within the original length keep θ^(−2i/dr), pairs that turn less than beta_slow
    times are slowed by the factor, the ones between are blended linearly.
    """
    pairs = torch.arange(0, c.qk_rope_head_dim, 2, dtype=torch.float64)
    plain = c.rope_theta ** (-pairs / c.qk_rope_head_dim)
    if c.rope_factor == 1:
        return plain.float()

    def pair_that_turns(times: float) -> float:
        return (c.qk_rope_head_dim * math.log(c.rope_original_len / (times * 2 * math.pi))) / (2 * math.log(c.rope_theta))

    low = max(math.floor(pair_that_turns(c.rope_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(c.rope_beta_slow)), c.qk_rope_head_dim - 1)
    ramp = ((torch.arange(len(pairs), dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (plain * (1 - ramp) + plain / c.rope_factor * ramp).float()


def softmax_scale(c: Config) -> float:
    """1/√(dn + dr), times the square of YaRN's attention temperature 0.1 ln(factor) + 1 (mscale = mscale_all_dim = 1)."""
    temperature = 0.1 * math.log(c.rope_factor) + 1 if c.rope_factor > 1 else 1.0
    return (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * temperature ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (0, 1), (2, 3), … of x [..., dr] by the angles of cos, sin [..., dr / 2]; first halves come first."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


# ------------------------------------------------------------------------------------------------------ cache and state


class Cache:
    """Latent key-value cache (M1): per layer and token the normalised latent (R) and the turned rotary key (dr).

    `kv` [L, B, S, R + dr]; `lengths` [B] counts the valid tokens of each row. Entries beyond a row's length are never read,
    because attention masks by position, and are overwritten when the row grows: shrinking `lengths` is all it takes to
    forget rejected drafts.
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
    """What every layer of one forward pass shares: angles, mask, cache rows, replayed routes and the record of routes."""
    cos: Tensor                                  # [B, T, dr / 2]
    sin: Tensor
    positions: Tensor                            # [B, T]
    mask: Tensor | None                          # [B, 1, T, S] bool, None: plain causal
    cache: Cache | None = None
    rows: Tensor | None = None                   # [B] rows of the cache; None: all of them in order
    span: int = 0                                # cached positions 0 … span − 1 are looked at
    replay: Tensor | None = None                 # [B, T, L_moe, K] expert ids, −1: the router's own choice
    plausibility: float = 0.0                    # M4, see `replayed_ids`
    real: Tensor | None = None                   # [B, T] False where a token is padding: not counted in the balance
    routes: list[Tensor] | None = None           # filled with [B, T, K] per MoE layer when recording


# ------------------------------------------------------------------------------------------------------------- attention


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2 §2.1; the names are the public checkpoints').

    Two forms with the same result. Training projects latents up to keys and values of every head (`_plain`). Decoding folds
    the up-projection into the query and the output, so that only the latents are touched (`_absorbed`):

        q_nopeᵀ (W_uk c) = (W_ukᵀ q_nope)ᵀ c          Σ_s p_s (W_uv c_s) = W_uv (Σ_s p_s c_s)
    """

    def __init__(self, c: Config):
        super().__init__()
        self.c, self.scale = c, softmax_scale(c)
        self.q_a_proj = nn.Linear(c.dim, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.latent_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.dim, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, c.n_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.v_head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, ctx: Context, layer: int) -> Tensor:
        c = self.c
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (c.n_heads, -1))                                             # [B, T, H, dn + dr]
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_rope = rotate(q_rope, ctx.cos.unsqueeze(2), ctx.sin.unsqueeze(2))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)                                             # [B, T, R]
        k_rope = rotate(k_rope, ctx.cos, ctx.sin)                                        # [B, T, dr], one for all heads
        if ctx.cache is None:
            return self.o_proj(self._plain(q_nope, q_rope, latent, k_rope, ctx.mask))
        kv = self._write(torch.cat((latent, k_rope), dim=-1), ctx, layer)
        return self.o_proj(self._absorbed(q_nope, q_rope, kv, ctx.mask))

    def _plain(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        c = self.c
        kv = self.kv_b_proj(latent).unflatten(-1, (c.n_heads, -1))                       # [B, S, H, dn + dv]
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        k = torch.cat((k_nope, k_rope.unsqueeze(2).expand(-1, -1, c.n_heads, -1)), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                                 # [B, H, T, ·]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)
        return out.transpose(1, 2).flatten(2)                                            # [B, T, H · dv]

    @staticmethod
    def _write(kv_new: Tensor, ctx: Context, layer: int) -> Tensor:
        """Store the new entries [B, T, R + dr] at their rows and positions; return what may be looked at [B, span, R + dr]."""
        kv = ctx.cache.kv[layer]
        rows = torch.arange(kv.shape[0], device=kv.device) if ctx.rows is None else ctx.rows
        kv[rows.unsqueeze(1), ctx.positions] = kv_new.to(kv.dtype)
        return kv[:, :ctx.span] if ctx.rows is None else kv[ctx.rows, :ctx.span]

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        c = self.c
        w_uk, w_uv = self.kv_b_proj.weight.view(c.n_heads, -1, c.kv_lora_rank).split(
            [c.qk_nope_head_dim, c.v_head_dim], dim=1)                                   # [H, dn, R], [H, dv, R]
        B, T = q_nope.shape[:2]
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, w_uk), q_rope), dim=-1)    # [B, T, H, R + dr]
        scores = (q.flatten(1, 2) @ kv.transpose(1, 2)).view(B, T, c.n_heads, -1)        # [B, T, H, S]
        scores = (scores * self.scale).masked_fill_(~mask.transpose(1, 2), float("-inf"))
        mixed = scores.softmax(dim=-1).flatten(1, 2) @ kv[..., :c.kv_lora_rank]          # [B, T · H, R]
        return torch.einsum("bthr,hvr->bthv", mixed.view(B, T, c.n_heads, -1), w_uv).flatten(2)


# ------------------------------------------------------------------------------------------------------- feed-forward


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
    """Scores, correction bias and the load that moves it."""

    def __init__(self, c: Config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.n_experts, c.dim))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_experts))
        self.register_buffer("load", torch.zeros(c.n_experts), persistent=False)


def replayed_ids(scores: Tensor, own: Tensor, replay: Tensor, plausibility: float) -> Tensor:
    """Router replay (M3) with the plausibility filter (M4, report §6.2). All ids [N, K], scores [N, E]; returns ids [N, K].

    threshold = plausibility · (lowest score among the router's own top-k): the report says only that the threshold derives
    from the router's own top-k; this formula is ours. A replayed expert below it gives its place to the router's best
    candidate that is not there yet. plausibility = 0 is plain replay, ∞ is no replay. Rows of −1 keep the router's choice.
    """
    ids = torch.where(replay[:, :1] < 0, own, replay)
    if plausibility <= 0:
        return ids
    own_scores, ids_scores = scores.gather(1, own), scores.gather(1, ids)
    keep = ids_scores >= plausibility * own_scores.min(dim=1, keepdim=True).values
    kept = torch.where(keep, ids, -1)
    taken = (own.unsqueeze(2) == kept.unsqueeze(1)).any(2)                               # [N, K] own candidate already there
    free_rank = (~keep).cumsum(1) - 1                                                    # 0 for the first free slot, 1, …
    candidates = own.gather(1, taken.int().argsort(dim=1, stable=True))                  # untaken first, best first
    return torch.where(keep, ids, candidates.gather(1, free_rank.clamp(min=0)))


class MoE(nn.Module):
    """Router, E routed experts as two stacked weights, and the shared expert (M1, M2)."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.gate = Router(c)
        self.w_gate_up = nn.Parameter(torch.empty(c.n_experts, 2 * c.expert_dim, c.dim))
        self.w_down = nn.Parameter(torch.empty(c.n_experts, c.dim, c.expert_dim))
        self.shared_experts = MLP(c.dim, c.expert_dim * c.n_shared_experts) if c.n_shared_experts else None

    def forward(self, x: Tensor, ctx: Context, moe_layer: int) -> Tensor:
        c, shape = self.c, x.shape
        flat = x.reshape(-1, shape[-1])                                                  # [N, D]
        logits = F.linear(flat.float(), self.gate.weight.float())
        ids, weights, scores = kernels.route(logits, self.gate.e_score_correction_bias, c.n_experts_per_tok, c.route_scale)
        if ctx.replay is not None:
            replay = ctx.replay[:, :, moe_layer].reshape(-1, c.n_experts_per_tok).long()
            ids = replayed_ids(scores.detach(), ids, replay, ctx.plausibility)
            chosen = scores.gather(1, ids)                                               # live gates: gradients flow
            weights = chosen / (chosen.sum(1, keepdim=True) + 1e-20) * c.route_scale
        if ctx.routes is not None:
            ctx.routes.append(ids.view(*shape[:2], -1))
        if self.training and torch.is_grad_enabled():
            self._count(ids, ctx.real)
        y = kernels.experts(flat, ids, weights, self.w_gate_up, self.w_down, c.precision)
        y = y.view(shape)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    @torch.no_grad()
    def _count(self, ids: Tensor, real: Tensor | None) -> None:
        hits = torch.bincount((ids if real is None else ids[real.flatten()]).flatten(), minlength=self.c.n_experts)
        self.gate.load += hits

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Auxiliary-loss-free balancing (DeepSeek-V3 §2.1.2), once per optimizer step: raise the bias of experts that got
        fewer tokens than the mean, lower the others, keep the mean at zero, and start counting anew."""
        load = self.gate.load
        delta = rate * torch.sign(load.mean() - load)
        self.gate.e_score_correction_bias += delta - delta.mean()
        load.zero_()


# ------------------------------------------------------------------------------------------------------------ the model


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
    """Tokens [B, T] to hidden states [B, T, D] after the final norm; `lm_head` turns those into logits [B, T, V]."""

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(Block(c, i) for i in range(c.n_layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)
        self.register_buffer("inverse_frequencies", yarn_inverse_frequencies(c), persistent=False)

    def context(self, positions: Tensor, doc: Tensor | None = None, cache: Cache | None = None, rows: Tensor | None = None,
                replay: Tensor | None = None, plausibility: float = 0.0, real: Tensor | None = None,
                record: bool = False) -> Context:
        """Angles and mask for tokens at `positions` [B, T]: causal, within one document `doc` [B, T] where given."""
        angles = positions.unsqueeze(-1) * self.inverse_frequencies                      # [B, T, dr / 2], float32
        dtype = self.embed_tokens.weight.dtype
        mask, span = None, 0
        if cache is not None:
            span = int(positions.max()) + 1
            if span > cache.capacity:
                raise ValueError(f"position {span - 1} does not fit a cache of {cache.capacity} tokens a row")
            keys = torch.arange(span, device=positions.device)
            mask = (keys <= positions.unsqueeze(-1)).unsqueeze(1)                        # [B, 1, T, S]
        elif doc is not None:
            causal = torch.ones(doc.shape[1], doc.shape[1], dtype=torch.bool, device=doc.device).tril()
            mask = ((doc.unsqueeze(2) == doc.unsqueeze(1)) & causal).unsqueeze(1)        # [B, 1, T, T]
        return Context(angles.cos().to(dtype), angles.sin().to(dtype), positions, mask, cache, rows, span, replay,
                       plausibility, real, [] if record else None)

    def forward(self, tokens: Tensor, ctx: Context | None = None) -> Tensor:
        if ctx is None:
            ctx = self.context(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        if tokens.shape[1] > self.config.max_len:
            raise ValueError(f"{tokens.shape[1]} tokens exceed the rotary range of {self.config.max_len} "
                             f"(rope_factor · rope_original_len)")
        x = self.embed_tokens(tokens)                                                    # [B, T, D]
        for layer in self.layers:
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

    A head that copies needs to know what stood before each token; with random weights that knowledge takes thousands of
    steps to appear. The construction: coordinate 0 of every embedding is one constant; the rotary key reads only it, the
    same vector u at every position; head h's rotary query reads it too, as u turned by −(h + 1) positions. Then

        q_i · k_j ∝ Σ_pairs cos(ω (i − j − (h + 1)))

    is largest at j = i − (h + 1). Only fast pairs take part (ω > 0.05): a slow one cannot tell neighbours apart and would
    only weigh in the norm of token j. Everything stays trainable.
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
        turned = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten()               # u turned back, interleaved pairs
        heads[h] = 0
        heads[h, dn:, 0] = turned * gain / math.sqrt(c.q_lora_rank) / attn.scale / math.sqrt(dr)


# ------------------------------------------------------------------------------------------------------------ counting


def count(c: Config) -> dict[str, int]:
    """Parameters of a configuration by part, counted on the meta device; "active" per token, head and embedding included."""
    with torch.device("meta"):
        model = Transformer(c)
    parts = dict(experts=0, shared=0, router=0, attention=0, dense=0, embedding=0, head=0, norms=0)
    for name, p in model.named_parameters():
        part = ("experts" if "w_gate_up" in name or "w_down" in name else "shared" if "shared" in name else
                "router" if "mlp.gate.weight" in name else "norms" if "norm" in name else "attention" if "self_attn" in name else
                "embedding" if "embed" in name else "head" if "lm_head" in name else "dense")
        parts[part] += p.numel()
    total = sum(parts.values())
    return {**parts, "total": total, "active": total - parts["experts"] * (c.n_experts - c.n_experts_per_tok) // c.n_experts}


def flops_per_token(c: Config, length: int) -> tuple[float, float]:
    """(matrix products, attention) of a training step, forward and backward, per token at a sequence length, causal.

    6 FLOPs per active weight (embedding look-up left out); 3 · 2 · H (dn + dr + dv) · length / 2 per layer for attention.
    """
    n = count(c)
    heads = c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    return 6.0 * (n["active"] - n["embedding"]), 3.0 * heads * length * c.n_layers


def main() -> None:
    c = Config()
    n = count(c)
    print("Kimi K2.5, where the parameters are")
    for part in ("experts", "shared", "router", "attention", "dense", "embedding", "head", "norms", "total", "active"):
        print(f"    {part:10} {n[part]:>22,}  {100 * n[part] / n['total']:7.3f} %")
    for length in (32_768, 262_144):
        linear, attention = flops_per_token(c, length)
        both = linear + attention
        print(f"training FLOPs per token at {length:7,}: {both / 1e9:6.0f} G, attention {attention / both:.0%}")
    latent = 2 * (c.kv_lora_rank + c.qk_rope_head_dim)
    plain = 2 * c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    print(f"cache per token and layer in bf16: {latent:,} bytes of latents, {plain:,} of keys and values ({plain / latent:.1f}x)")

    small = Config(vocab_size=97, dim=64, n_layers=3, n_heads=4, q_lora_rank=32, kv_lora_rank=32,
                   qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, ffn_dim=96, expert_dim=32, n_experts=8,
                   n_experts_per_tok=2, rope_original_len=32, rope_factor=4.0)
    model = Transformer(small).double().eval()
    model.reset_parameters(0)
    tokens = torch.arange(60).view(2, 30) % 97
    cache, states = Cache(small, 2, 32, dtype=torch.float64), []
    with torch.no_grad():
        for t in range(30):
            positions = torch.full((2, 1), t)
            states.append(model(tokens[:, t:t + 1], model.context(positions, cache=cache)))
        gap = (torch.cat(states, 1) - model(tokens)).abs().max()
    print(f"a small model in float64, token by token through the cache against all at once: largest difference {gap:.1e}")


if __name__ == "__main__":
    main()
