"""Multi-token prediction: extra layers that guess further ahead, and the decoding that they pay for.

Composer 2 trains MTP layers from scratch by self-distillation and uses them for speculative decoding (report
§3.1, claims T1–T3). A layer reads the model's hidden state at position i and the embedding of token i + 1, and
predicts what the main head will say one position later. Decoding lets it draft tokens, has the model judge all
of them in one forward pass, and keeps a prefix such that the output is distributed exactly as without drafts.

    h'_i  = M_k [ norm(emb(t_{i+k})) ; norm(h_i^{k−1}) ]   k = 1 … D; h^0: the model's state after its last norm
    h_i^k = norm(block_k(h'_i))                           through the shared head it predicts t_{i+k+1}
    loss  = Σ_i KL( main head at row i + k ‖ layer k at row i )       the teacher is detached
    accept draft d with probability min(1, p(d)/q(d)); at the first rejection sample from max(p − q, 0)

Legend: B slots, T tokens, S cached tokens, D layers (n_mtp) or, in shapes, width; V vocabulary, L layers of the
model, K experts per token, p the model's distribution, q the draft's. Position n: the newest token, unread yet.

Choices where the report is silent:
1. Embedding first in the concatenation, and hidden states after the norms, as in the released DeepSeek-V3
   weights and the engines that serve them (arXiv 2412.19437 §2.2 writes the hidden state first), everywhere.
2. Each layer has its own final norm; embedding and head are the model's. A row stays at position i, only the
   embedded token is shifted. Where the model is frozen, embedding and head are detached, or they would change.
3. Rollouts decode without drafts, in `Engine`; drafts serve a single window, `speculative`. A batch of 64
   keeps the machine busy as it is, and a draft that is thrown away costs the others their turn.

    python mtp.py           losses against acceptance, the two stages of training, drafts at work
    python mtp.py --bench   tokens/s beside transformers' generate (where installed) and a plain loop; last
                            line JSON

Left out: drafts in batches, tree drafts, more drafts than layers (feeding a layer its own output).
"""
from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
import sys
import time
import timeit
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe


class Layer(nn.Module):
    """MTP layer number k ≥ 1. Its block's index follows the model's, as in public checkpoints: one cache can
    hold model and MTP layers."""

    def __init__(self, c: moe.Config, k: int):
        super().__init__()
        self.enorm, self.hnorm = moe.RMSNorm(c.dim, c.norm_eps), moe.RMSNorm(c.dim, c.norm_eps)
        self.eh_proj = nn.Linear(2 * c.dim, c.dim, bias=False)
        self.block = moe.Block(c, c.n_layers + k - 1)
        self.norm = moe.RMSNorm(c.dim, c.norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: moe.Context) -> Tensor:
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)  # [B, T, 2D]
        return self.norm(self.block(self.eh_proj(both), ctx))


class MTP(nn.Module):
    """`n_mtp` layers on top of a Transformer, which is passed in and never owned."""

    def __init__(self, config: moe.Config, n_mtp: int = 1):
        super().__init__()
        if n_mtp < 1:
            raise ValueError(f"n_mtp = {n_mtp}: multi-token prediction needs at least one layer")
        self.config = config
        self.layers = nn.ModuleList(Layer(config, k) for k in range(1, n_mtp + 1))
        if not self.layers[0].eh_proj.weight.is_meta:
            self.reset_parameters(0)

    def reset_parameters(self, seed: int) -> None:
        """From scratch, as the report does: fill all weights from one seeded generator."""
        moe.initialise(self, self.config, seed)

    def forward(self, model: moe.Transformer, hidden: Tensor, tokens: Tensor, ctx: moe.Context,
                detach: bool = False) -> list[Tensor]:
        """States [B, T, D] per depth, from the model's `hidden` [B, T, D] (after its norm) and `tokens` [B, T].

        Row i of depth k has seen tokens up to i + k; the last k rows have no such token and hold rubbish, which
        no other row sees, because attention looks back only. Routes of these layers are not recorded.
        detach: keep gradients out of the shared embedding.
        """
        weight = model.embed_tokens.weight.detach() if detach else model.embed_tokens.weight
        plain = moe.Context(ctx.cos, ctx.sin, ctx.positions, ctx.mask, real=ctx.real, cp=ctx.cp)
        out = []
        for k, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, F.embedding(moe.ahead(tokens, k, model.parallel), weight), plain)
            out.append(hidden)
        return out


def to_public(model: moe.Transformer, mtp: MTP) -> dict[str, Tensor]:
    """The layers under DeepSeek-V3's names: `model.layers.L`, L + 1, … with their copies of embedding and head,
    experts one by one. Tensors are views."""
    out = {}
    for name, tensor in mtp.state_dict().items():
        _, k, rest = name.split(".", 2)
        prefix = f"model.layers.{mtp.config.n_layers + int(k)}."
        rest = rest.removeprefix("block.")
        if rest in ("mlp.w_gate_up", "mlp.w_down"):
            out |= moe.expert_views(prefix + rest, tensor, range(len(tensor)))
        else:
            out[prefix + ("shared_head." + rest if rest == "norm.weight" else rest)] = tensor
        out[prefix + "embed_tokens.weight"] = model.embed_tokens.weight.detach()
        out[prefix + "shared_head.head.weight"] = model.lm_head.weight.detach()
    return out


@torch.no_grad()
def from_public(model: moe.Transformer, mtp: MTP, state: dict[str, Tensor]) -> None:
    """Copy tensors with public names into the layers. Embedding and head must be the model's: they are shared."""
    ours = to_public(model, mtp)
    if missing := sorted(ours.keys() - state.keys()):
        raise ValueError(f"{len(missing)} tensors are not there, the first is {missing[0]}: is n_mtp right?")
    for name, tensor in ours.items():
        if not name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            tensor.copy_(state[name])
        elif not torch.equal(tensor, state[name].to(tensor)):
            raise ValueError(f"{name} differs from the model's: these layers were trained on another model")


# ------------------------------------------------------------------------------------------ self-distillation


def distill_loss(model: moe.Transformer, mtp: MTP, hidden: Tensor, tokens: Tensor, doc: Tensor,
                 positions: Tensor, *, kind: str = "kl", detach_trunk: bool = True, norm: float | None = None,
                 shift: int = 0, chunk: int = 4096) -> tuple[Tensor, dict[str, float]]:
    """Self-distillation (T1): depth k at row i learns what the main head says at row i + k; (loss, metrics).

    hidden [B, T, D]: the model's, after its final norm; tokens, doc (−1: padding), positions [B, T].
    kind: "kl" to the main head, "ce" on the data's token, "tv" total variation. detach_trunk: the model gets
    no gradient. norm: what the sum over rows is divided by (default: their number); the depths are averaged.
    shift ≠ 0 asks for the wrong row, for demonstrations. Rows whose token i + k + 1 is of another document do
    not take part. Logits exist for `chunk` rows at a time, in the backward pass too. Metrics, means over rows
    and depths: kl, overlap (Σ min(p, q), expected acceptance of a draft), agreement (same most likely token).
    """
    if kind not in ("kl", "ce", "tv"):
        raise ValueError(f"kind = {kind!r}: choose kl, ce or tv")
    head = model.lm_head.weight.detach() if detach_trunk else model.lm_head.weight
    whole = bool(((doc == doc[:, :1]) & (doc >= 0)).all()) and not model.split_rows
    ctx = model.context(positions, doc=None if whole else doc, real=None if whole else doc >= 0)
    states = mtp(model, hidden.detach() if detach_trunk else hidden, tokens, ctx, detach_trunk)
    total, rows, sums = hidden.new_zeros(()), 0, torch.zeros(3, dtype=torch.float64, device=hidden.device)
    for k, state in enumerate(states, 1):
        later = partial(moe.ahead, parallel=model.parallel)
        # t_{i+k+1} is of row i's document, and is not the row's beginning, to which its end is rolled
        same = (later(doc, k + 1) == doc) & (doc >= 0) & (later(positions, k + 1) == positions + k + 1)
        student, target = state[same], later(tokens, k + 1)[same]  # [rows, D], [rows]
        teacher = later(hidden.detach(), k - shift)[same]
        rows += len(student)
        for s, t, y in zip(student.split(chunk), teacher.split(chunk), target.split(chunk)):
            # Several chunks would all keep their logits for the backward pass: recompute them there instead.
            args = (s, t, head, y, kind)
            one = len(student) <= chunk
            value, metrics = _distance(*args) if one else checkpoint(_distance, *args, use_reentrant=False)
            total, sums = total + value, sums + metrics
    mean = (sums / max(rows, 1)).tolist()
    loss = total / len(states) / (norm or max(rows / len(states), 1))
    return loss, dict(zip(("kl", "overlap", "agreement"), mean))


def _distance(student: Tensor, teacher: Tensor, head: Tensor, target: Tensor,
              kind: str) -> tuple[Tensor, Tensor]:
    """Sums over rows: the chosen distance, and (KL, overlap, agreement). States [n, D], head [V, D]."""
    log_q = F.linear(student, head).log_softmax(-1)  # [n, V]
    log_p = F.linear(teacher, head.detach()).log_softmax(-1)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)  # = 1 − TV(p, q)
    value = {"kl": kl, "tv": 1 - overlap, "ce": -log_q.gather(1, target.unsqueeze(1)).squeeze(1)}[kind].sum()
    agreement = (log_q.argmax(-1) == log_p.argmax(-1)).double()
    return value, torch.stack((kl.detach().double().sum(), overlap.detach().double().sum(), agreement.sum()))


# ------------------------------------------------------------------------ random numbers and what they choose


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (wrapping); shifts made logical by masking."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64, each a pure function of (key, position): a row's draws do not
    depend on who shares its batch, nor on how often it was interrupted."""
    x = _mix(_mix(keys) + positions * -7046029254386353131)
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0 ** -53


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: ids [n] from probabilities [n, V] (need not sum to one) and uniforms [n]."""
    cdf = probabilities.double().cumsum(-1)
    # right=True: an id of probability zero is never hit, not even by u = 0
    ids = torch.searchsorted(cdf, (u.unsqueeze(1) * cdf[:, -1:]), right=True).squeeze(1)
    return ids.clamp(max=probabilities.shape[1] - 1)


@dataclass(frozen=True)
class Sampling:
    """From logits to the distribution that is sampled: temperature, then the best top_k, then the smallest set
    of the best whose mass reaches top_p. Temperature 0 is greedy; top_k 0 and top_p 1 keep everything."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: 0 is greedy, a positive number samples")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: keep that many ids, or all of them with 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} must be in (0, 1]: the mass to keep, 1 keeps all")

    def logp(self, logits: Tensor) -> Tensor:
        """Log-probabilities [n, V], −inf for what is never sampled; float32, or float64 for float64 logits."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            best = F.one_hot(logits.argmax(-1), logits.shape[-1]).bool()  # ties: the lowest id
            return torch.zeros_like(logits).masked_fill_(~best, float("-inf"))
        logp = (logits / self.temperature).log_softmax(-1)
        return self._truncated(logp) if self.top_k or self.top_p < 1 else logp

    def _truncated(self, logp: Tensor) -> Tensor:
        logp, order = logp.sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            logp[..., self.top_k:] = float("-inf")
        p = logp.softmax(-1)
        before = p.cumsum(-1) - p  # mass of the better ones; 0 for the best
        logp = logp.masked_fill(before >= self.top_p, float("-inf")).log_softmax(-1)
        return torch.empty_like(logp).scatter_(-1, order, logp)  # back to the order of ids


def _checked(ids: Sequence[int], vocab: int) -> Sequence[int]:
    if not ids:
        raise ValueError("an empty prompt: give at least one token")
    if not 0 <= min(ids) <= max(ids) < vocab:
        raise ValueError(f"token ids {min(ids)} … {max(ids)} are outside the vocabulary of {vocab}")
    return ids


def _make_cache(model: moe.Transformer, rows: int, capacity: int, extra_layers: int = 0) -> moe.Cache:
    c, weight = model.config, model.embed_tokens.weight
    if capacity > c.max_len:
        raise ValueError(f"{capacity} tokens exceed the context of {c.max_len} tokens "
                         "(rope_factor · rope_original_len)")
    return moe.Cache(c, rows, capacity, c.n_layers + extra_layers, weight.dtype, weight.device)


def _spans(first: Tensor, last: Tensor) -> Tensor:
    """Positions [n, T] from `first` to `last` [n], in the shorter rows the last again and again: harmless padding."""
    steps = torch.arange(int((last - first).max()) + 1, device=first.device)
    return torch.minimum(first.unsqueeze(1) + steps, last.unsqueeze(1))


# ------------------------------------------------------------------------------------------------- the engine


class Engine:
    """Decodes many windows at once: continuous batching over slots with a latent cache. All rollouts use it.

    Each slot holds one window. `force` appends tokens that the model did not write; they are read in chunks.
    `step` gives every slot that has read all of its window one sampled token and returns the slots whose turn
    has ended. Recorded per token: log-prob under the sampling distribution, policy version, the expert ids
    with which it was computed (M3).

    A slot's state, all [B]: `known` tokens in the window, `cached` of these read by the model (a sampled token
    is read one step later), `fresh` leading tokens read by the present weights, `live`: a turn is going on.
    """

    PASS_COST = 128  # what a pass costs beside its tokens, in tokens; measured on a CPU

    def __init__(self, model: moe.Transformer, n_slots: int, capacity: int, stop: int | Collection[int],
                 temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, chunk: int = 512):
        """capacity: longest window, in tokens. stop: id or ids that end a turn. chunk: tokens read of a
        window per pass. The other three: see `Sampling`."""
        c, device = model.config, model.embed_tokens.weight.device
        self.model, self.version, self.chunk = model, 0, chunk
        self.sampling = Sampling(temperature, top_k, top_p)
        self.stops = torch.tensor([stop] if isinstance(stop, int) else sorted(stop), device=device)
        self.cache = _make_cache(model, n_slots, capacity)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(n_slots, *shape, dtype=dtype, device=device)

        self.tokens, self.versions = zeros(capacity), zeros(capacity, dtype=torch.int32)
        self.logp, self.sampled = zeros(capacity, dtype=torch.float32), zeros(capacity, dtype=torch.bool)
        self.routes = zeros(capacity, c.n_moe_layers, c.n_experts_per_tok, dtype=torch.int16)
        self.known, self.cached, self.fresh = zeros(), self.cache.lengths, zeros()
        self.limit, self.keys, self.live = zeros(), zeros(), zeros(dtype=torch.bool)

    def force(self, slot: int, ids: list[int], limit: int, reset: bool = False,
              key: int | None = None) -> None:
        """Append tokens and make the slot live; its turn ends at a stop id or with `limit` tokens in the window.

        reset: begin a new window. key: of the slot's random numbers (kept until given anew).
        """
        n = 0 if reset else int(self.known[slot])
        if not ids:
            raise ValueError(f"slot {slot}: nothing to append; a turn begins with at least one forced token")
        _checked(ids, self.model.config.vocab_size)
        if not n + len(ids) < limit <= self.cache.capacity:
            raise ValueError(f"slot {slot}: {n} + {len(ids)} tokens and a limit of {limit} do not fit "
                             f"{self.cache.capacity}")
        if reset:
            self.cached[slot] = self.fresh[slot] = 0
        span = slice(n, n + len(ids))
        self.tokens[slot, span] = torch.tensor(ids, device=self.tokens.device)
        self.sampled[slot, span], self.logp[slot, span], self.versions[slot, span] = False, 0.0, self.version
        self.known[slot], self.limit[slot], self.live[slot] = n + len(ids), limit, True
        if key is not None:
            self.keys[slot] = key

    @torch.inference_mode()
    def step(self) -> list[int]:
        """One sampled token for every live slot without a chunk to read; the others form a pass of their own.

        That pass waits until it is worth a batch (more than an eighth of the rest) or nothing else is left to do:
        a pass over two rows costs almost as much as one over eight. Returns the slots whose turn ended.
        """
        pending = torch.where(self.live, self.known - self.cached, 0)
        ended, waiting, ready = [], pending > 1, pending == 1
        if 8 * int(waiting.sum()) > int(ready.sum()):
            readers = self._share(waiting.nonzero().flatten().tolist())
            ready = self.live & (self.known - self.cached == 1)  # some got a whole prefix
            for rows in self._passes(readers):
                ended += self._read_chunk(torch.tensor(rows, device=ready.device))
        rows = ready.nonzero().flatten()
        return ended + (self._decode(rows, ready) if len(rows) else [])

    def _passes(self, readers: list[int]) -> list[list[int]]:
        """Slots of similar chunks together: in one pass all are padded to the longest, and more padding than
        `PASS_COST` tokens costs more than a pass of its own."""
        unread = (self.known - self.cached).clamp(max=self.chunk).tolist()
        passes, longest, padding = [], 0, 0
        for slot in sorted(readers, key=lambda slot: -unread[slot]):
            padding += longest - unread[slot]
            if not passes or padding > self.PASS_COST:
                passes, longest, padding = [*passes, []], unread[slot], 0
            passes[-1].append(slot)
        return [sorted(slots) for slots in passes]

    def _read_chunk(self, rows: Tensor) -> list[int]:
        """Read up to `chunk` unread tokens of each row; rows that have then read everything sample a token."""
        start, last = self.cached[rows], self.known[rows] - 1
        end = torch.minimum(last, start + self.chunk - 1)  # [n] last position of this pass
        hidden = self._read(None if len(rows) == len(self.known) else rows, _spans(start, end))
        self._mark_read(rows, start, end + 1)
        complete = end == last
        return self._sample(rows[complete], hidden[complete])

    def _decode(self, rows: Tensor, ready: Tensor) -> list[int]:
        """Read the newest token of `rows` and sample the next.

        Picking rows out of the cache means copying them, which costs more than attending to them: where half of
        the slots take part, all of them run. An idle slot then reads its first unread token, without
        consequence: what that leaves in the cache lies beyond `cached` and is written again in earnest.
        """
        at = torch.where(ready, self.known - 1, self.cached)  # [B] positions
        if 2 * len(rows) > len(ready):
            hidden = self._read(None, at.unsqueeze(1))[rows]
        else:
            hidden = self._read(rows, at[rows].unsqueeze(1))
        self._mark_read(rows, at[rows], at[rows] + 1)
        return self._sample(rows, hidden)

    def _read(self, rows: Tensor | None, positions: Tensor) -> Tensor:
        """The model on tokens at `positions` [n, T] of `rows` (None: all slots); states of the last, [n, D]."""
        at = torch.arange(len(self.known), device=positions.device) if rows is None else rows
        ctx = self.model.context(positions, cache=self.cache, rows=rows, record=True)
        hidden = self.model(self.tokens[at.unsqueeze(1), positions], ctx)  # [n, T, D]
        if ctx.routes:
            self.routes[at.unsqueeze(1), positions] = torch.stack(ctx.routes, 2).to(torch.int16)
        return hidden[:, -1]

    def _mark_read(self, rows: Tensor, start: Tensor, end: Tensor) -> None:
        # The fresh prefix grows as long as nothing older lies in between.
        self.fresh[rows] = torch.where(self.fresh[rows] == start, end, self.fresh[rows])
        self.cached[rows] = end

    def _sample(self, rows: Tensor, hidden: Tensor) -> list[int]:
        """Append a token to each of `rows`, given states [n, D] of their newest one; returns those that ended."""
        at = self.known[rows]  # [n] position of the new token
        logp = self.sampling.logp(self.model.lm_head(hidden))  # [n, V]
        chosen = draw(logp.exp(), uniforms(self.keys[rows], at))
        self.tokens[rows, at] = chosen
        self.logp[rows, at] = logp.gather(1, chosen.unsqueeze(1)).squeeze(1).float()
        self.sampled[rows, at], self.versions[rows, at] = True, self.version
        self.known[rows] = at + 1
        ended = rows[torch.isin(chosen, self.stops) | (at + 1 >= self.limit[rows])]
        self.live[ended] = False
        return ended.tolist()

    def _share(self, waiting: list[int]) -> list[int]:
        """Prefix sharing: which of the slots with a chunk to read must read it themselves, now.

        Of new windows with the same tokens, as a group's rollouts have, one reads; the rest wait and copy.
        """
        readers: dict[object, int] = {}
        for slot in waiting:
            new = int(self.cached[slot]) == 0
            key = tuple(self.tokens[slot, :self.known[slot]].tolist()) if new else slot
            if key in readers:
                continue
            if new:
                self._adopt(slot)
            if self.known[slot] - self.cached[slot] > 1:
                readers[key] = slot
        return list(readers.values())

    def _adopt(self, slot: int) -> None:
        """Copy the longest prefix of the same tokens that another slot has read with the present weights."""
        n = int(self.known[slot]) - 1  # the newest token must be read: its logits
        # [B] length of the common prefix, of which only what is fresh counts
        same = (self.tokens[:, :n] == self.tokens[slot, :n]).long().cumprod(1).sum(1)
        common, source = torch.minimum(same, self.fresh).max(0)
        if common:
            self.cache.kv[:, slot, :common] = self.cache.kv[:, source, :common]
            self.routes[slot, :common] = self.routes[source, :common]
            self.cached[slot] = self.fresh[slot] = common

    def load(self, state: dict[str, Tensor], version: int) -> None:
        """New weights between two steps. Caches stay, so later tokens attend to keys of older versions (R5), but
        only in the windows that made them: nothing that older weights have read is shared."""
        self.model.load_state_dict(state)
        self.version = version
        self.fresh.zero_()

    def window(self, slot: int) -> tuple[list[int], list[int], list[float], list[int], Tensor]:
        """(ids, mask, logprobs, versions, routes [n, L_moe, K]) of a slot; routes −1: the token was never read."""
        n = int(self.known[slot])
        routes = self.routes[slot, :n].clone()
        routes[int(self.cached[slot]):] = -1
        kept = (self.tokens, self.sampled.int(), self.logp, self.versions)
        return *(x[slot, :n].tolist() for x in kept), routes


@torch.inference_mode()
def generate(model: moe.Transformer, prompts: Sequence[list[int]], max_new: int | Sequence[int], *,
             temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, stop: int = -1,
             keys: Sequence[int] | None = None) -> list[list[int]]:
    """Plain decoding of a fixed batch, the reference for engine and drafts: all rows run until the last is done.

    max_new: longest continuation, of all rows or row by row; the stop id, if sampled, is the last token.
    keys: of the rows' random numbers (default 0, 1, …). Returns the continuations.
    """
    sampling, device = Sampling(temperature, top_k, top_p), model.embed_tokens.weight.device
    lengths = torch.tensor([len(_checked(p, model.config.vocab_size)) for p in prompts], device=device)
    room = torch.as_tensor(max_new, device=device).expand(len(prompts))
    keys = torch.tensor(list(keys) if keys is not None else range(len(prompts)), device=device)
    cache = _make_cache(model, len(prompts), int((lengths + room).max()))
    positions = _spans(torch.zeros_like(lengths), lengths - 1)  # [B, T]
    tokens = torch.tensor([p + p[-1:] * (positions.shape[1] - len(p)) for p in prompts], device=device)
    out, at, done = [[] for _ in prompts], lengths, room < 1
    while not done.all():
        hidden = model(tokens, model.context(positions, cache=cache))[:, -1]
        chosen = draw(sampling.logp(model.lm_head(hidden)).exp(), uniforms(keys, at))  # [B]
        for row, (token, finished) in enumerate(zip(chosen.tolist(), done.tolist())):
            if not finished:
                out[row].append(token)
        at = torch.where(done, at, at + 1)
        done = done | (chosen == stop) | (at - lengths >= room)
        tokens, positions = chosen.unsqueeze(1), (at - 1).unsqueeze(1)  # a finished row repeats itself
    return out


# --------------------------------------------------------------------------------------- speculative decoding


def verify(p: Tensor, q: Tensor, drafts: Tensor, judged: Tensor, u: Tensor, u_next: Tensor) -> tuple[Tensor, Tensor]:
    """The acceptance rule (arXiv 2211.17192), row by row. Probabilities p [B, K + 1, V], q [B, K, V]; drafts [B, K], of
    which the first `judged` [B] count; uniforms [B, K] to accept with and [B, K + 1] to choose what follows.

    Returns how many drafts are accepted, [B], and the token that follows, [B]: from the normalised max(p − q, 0) after
    a rejection, from p where all were accepted. The output is then distributed as p, whatever q is, as long as the
    drafts were drawn from q: the q of a draft that was taken greedily is one-hot.
    """
    rows, d = torch.arange(len(p), device=p.device), drafts.unsqueeze(-1)
    counts = torch.arange(p.shape[1], device=p.device) < judged.unsqueeze(1)  # [B, K + 1]; never the last
    kept = (u * q.gather(2, d).squeeze(2) < p[:, :-1].gather(2, d).squeeze(2)) & counts[:, :-1]  # u < p/q
    accepted = kept.long().cumprod(1).sum(1)
    p = p[rows, accepted]
    q = (F.pad(q, (0, 0, 0, 1)) * counts.unsqueeze(2))[rows, accepted]  # 0 where there was no draft
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)  # p = q but for rounding
    return accepted, draw(rest, u_next[rows, accepted])


class Speculation:
    """Windows, decoded with drafts, each at its own pace. Between rounds the model has read all `known` tokens
    t_0 … t_n of a row but t_n.

    `tokens` [B, S]; `states` [B, S, D] are the model's hidden states of the tokens that it has read. One cache holds
    the model's L layers and the MTP layers behind them. Layer k's row i uses token i + k, so its last k − 1 rows of a
    round rest on drafts: every round runs the last rows anew, far enough back for the deepest layer.
    """

    @torch.inference_mode()
    def __init__(self, model: moe.Transformer, mtp: MTP, prompts: Sequence[list[int]], capacity: int, n_draft: int,
                 sampling: Sampling, keys: Sequence[int]):
        """Reads the prompts and samples one token after each. capacity: longest window; keys: of the rows' draws."""
        if not 0 <= n_draft <= len(mtp.layers):
            raise ValueError(f"n_draft = {n_draft} must be between 0 and the {len(mtp.layers)} MTP layers")
        weight, n = model.embed_tokens.weight, len(prompts)
        self.model, self.layers, self.sampling = model, mtp.layers[:n_draft], sampling
        self.keys = torch.tensor(list(keys), device=weight.device)
        self.cache = _make_cache(model, n, capacity, n_draft)
        self.states = weight.new_zeros(n, capacity, model.config.dim)
        self.tokens = torch.zeros(n, capacity + n_draft, dtype=torch.long, device=weight.device)
        for row, ids in enumerate(prompts):
            self.tokens[row, :len(ids)] = torch.tensor(_checked(ids, model.config.vocab_size))
        self.known = torch.tensor([len(ids) for ids in prompts], device=weight.device)
        self.drafted = torch.zeros_like(self.known)  # rows that the MTP layers have run
        rows = torch.arange(n, device=weight.device)
        hidden = self._read(rows, self.drafted, self.known - 1)[:, -1]
        self.tokens[rows, self.known] = draw(self._distribution(hidden), self._uniforms(rows, 1)[0, :, 0])
        self.known = self.known + 1

    def _uniforms(self, rows: Tensor, n: int) -> Tensor:
        """[3, b, n], for the next n positions: to choose a token that is no draft, to draft, to accept. A number
        decides about its own position alone: drafting a position twice, after a rejection before it, is harmless."""
        at = self.known[rows].unsqueeze(1) + torch.arange(n, device=rows.device)
        return uniforms(4 * self.keys[rows].unsqueeze(1) + torch.arange(3, device=rows.device).view(3, 1, 1), at)

    def _distribution(self, hidden: Tensor) -> Tensor:
        return self.sampling.logp(self.model.lm_head(hidden)).double().exp()

    def _context(self, rows: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, moe.Context]:
        """Positions [b, T] from `first` to `last` [b], and their context."""
        positions, every = _spans(first, last), len(rows) == len(self.known)
        return positions, self.model.context(positions, cache=self.cache, rows=None if every else rows)

    def _read(self, rows: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """The model on tokens at positions first … last [b]; keeps and returns their states [b, T, D]."""
        positions, ctx = self._context(rows, first, last)
        at = rows.unsqueeze(1), positions
        self.states[at] = hidden = self.model(self.tokens[at], ctx)
        return hidden

    def draft(self, rows: Tensor) -> Tensor:
        """Puts t_{n+1} … behind the known tokens, drawn layer by layer from the distributions q that it returns,
        [b, n_draft, V]."""
        n = self.known[rows] - 1
        first = (self.drafted[rows] - (len(self.layers) - 1)).clamp(min=0)
        positions, ctx = self._context(rows, first, n - 1)
        at, u, q = rows.unsqueeze(1), self._uniforms(rows, len(self.layers))[1], []
        hidden = self.states[at, positions]
        for k, layer in enumerate(self.layers, 1):
            # row i sees token i + k
            hidden = layer(hidden, self.model.embed_tokens(self.tokens[at, positions + k]), ctx)  # [b, T, D]
            q.append(self._distribution(hidden[:, -1]))
            self.tokens[rows, n + k] = draw(q[-1], u[:, k - 1])  # row n − 1 of layer k: t_{n+k}
        self.drafted[rows] = n
        return torch.stack(q, 1)

    @torch.inference_mode()
    def round(self, rows: Tensor, limit: Tensor) -> tuple[list[list[int]], Tensor, Tensor]:
        """Draft, read [t_n, drafts] in one pass, keep what the rule allows, at most `limit` ≥ 1 [b] tokens a row.

        Returns (new tokens, accepted drafts [b], judged drafts [b]).
        """
        n, judged = self.known[rows] - 1, (limit - 1).clamp(max=len(self.layers))  # the last token needs no draft
        k = int(judged.max())
        q = self.draft(rows)[:, :k] if k else self.states.new_empty(len(rows), 0, self.model.config.vocab_size)
        ahead = n.unsqueeze(1) + 1 + torch.arange(k + 1, device=rows.device)
        p = self._distribution(self._read(rows, n, n + judged))  # [b, k + 1, V] for n + 1, n + 2, …
        choose, _, accept = self._uniforms(rows, k + 1)
        drafts = self.tokens[rows.unsqueeze(1), ahead[:, :k]]
        accepted, following = verify(p, q, drafts, judged, accept[:, :k], choose)
        # What rejected drafts left in cache and states lies beyond these tokens and will be written over.
        self.tokens[rows, n + 1 + accepted] = following
        self.known[rows] = n + 2 + accepted
        new = self.tokens[rows.unsqueeze(1), ahead].tolist()
        return [ids[:a + 1] for ids, a in zip(new, accepted.tolist())], accepted, judged


def speculative(model: moe.Transformer, mtp: MTP, prompts: Sequence[list[int]], max_new: int | Sequence[int],
                n_draft: int | None = None, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
                stop: int = -1, keys: Sequence[int] | None = None) -> tuple[list[list[int]], dict[str, float]]:
    """Decode prompts with n_draft drafts a round, one from each of the first MTP layers (default: of all).

    Greedy output equals plain decoding; sampled output has its distribution (T3). A row keeps as many drafts as the
    rule allows it, whatever the others keep, and leaves the batch when it is done. max_new, stop, keys: as in
    `generate`. Stats: acceptance (share of drafts kept), tokens_per_forward (of the model and a row, the prompt's
    pass included), rounds (of all rows).
    """
    room = [max_new] * len(prompts) if isinstance(max_new, int) else list(max_new)
    if min(room, default=1) < 1:
        raise ValueError(f"max_new = {min(room)}: ask for at least one token")
    n_draft = len(mtp.layers) if n_draft is None else n_draft
    longest = max((len(p) + n for p, n in zip(prompts, room, strict=True)), default=0)
    s = Speculation(model, mtp, prompts, longest, n_draft, Sampling(temperature, top_k, top_p),
                    range(len(prompts)) if keys is None else keys)
    out, drafted, kept, rounds = [[int(t[n - 1])] for t, n in zip(s.tokens, s.known)], 0, 0, 0
    while rows := [row for row, ids in enumerate(out) if len(ids) < room[row] and ids[-1] != stop]:
        left = torch.tensor([room[row] - len(out[row]) for row in rows], device=s.known.device)
        news, accepted, judged = s.round(torch.tensor(rows, device=left.device), left)
        for row, new in zip(rows, news):
            out[row] += new[:new.index(stop) + 1] if stop in new else new  # what follows a stop is not said
        drafted, kept, rounds = drafted + int(judged.sum()), kept + int(accepted.sum()), rounds + len(rows)
    forwards = rounds + len(prompts)
    return out, dict(acceptance=kept / max(drafted, 1), tokens_per_forward=sum(map(len, out)) / max(forwards, 1),
                     rounds=rounds)


# ------------------------------------------------------------------------------------------------ the lessons

SMALL = moe.Config(vocab_size=128, dim=48, n_layers=2, n_heads=2, q_lora_rank=24, kv_lora_rank=24,
                   qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, ffn_dim=96, expert_dim=24,
                   n_experts=4, n_experts_per_tok=2, route_scale=1.0, rope_factor=1.0, init_std=0.0)
TOY = moe.Config(vocab_size=272, dim=128, n_layers=4, n_heads=4, q_lora_rank=64, kv_lora_rank=64,
                 qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, ffn_dim=256, expert_dim=64,
                 n_experts=8, n_experts_per_tok=2, route_scale=1.0, rope_theta=10_000.0, rope_factor=1.0,
                 rope_original_len=1024, init_std=0.0)


class Source:
    """ASCII characters of the installed standard library; the last tenth is held out (negative seeds)."""

    def __init__(self, length: int, rows: int = 16, limit: int = 2_000_000):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(f.read_bytes() for f in files)[:limit]
        self.ids, self.rows, self.length = torch.tensor([b if b < 128 else 63 for b in text]), rows, length

    def batch(self, seed: int) -> Tensor:
        """Tokens [rows, length], a pure function of the seed."""
        g, cut = torch.Generator().manual_seed(abs(seed)), len(self.ids) * 9 // 10
        low, high = (cut, len(self.ids) - self.length) if seed < 0 else (0, cut - self.length)
        return self.ids[torch.randint(low, high, (self.rows, 1), generator=g) + torch.arange(self.length)]


def _losses(model: moe.Transformer, layers: MTP, x: Tensor,
            **options) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Main loss, MTP loss and its metrics on tokens x [B, T]; no gradient for the model where it is frozen."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not options.get("detach_trunk", True)):
        hidden = model(x)
        main = F.cross_entropy(model.lm_head(hidden)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    doc, positions = torch.zeros_like(x), torch.arange(x.shape[1]).expand_as(x)
    return main, *distill_loss(model, layers, hidden, x, doc, positions, **options)


def _train(source: Source, model: moe.Transformer, layers: MTP | None, steps: int, seed: int, stage: str,
           **options) -> None:
    """stage: "main" trains the model, "mtp" the layers on the frozen model, "joint" both, on main + 0.1 · MTP."""
    trained = {"main": (model,), "mtp": (layers,), "joint": (model, layers)}[stage]
    optimizer = torch.optim.AdamW([p for m in trained for p in m.parameters()], weight_decay=0.0, fused=True)
    for step in range(steps):
        warm_up, decay = min(1.0, (step + 1) / 10), 1 - 0.9 * step / steps
        optimizer.param_groups[0]["lr"] = warm_up * (1e-2 * decay if stage == "mtp" else 5e-3)
        x = source.batch(seed + step)
        if stage == "main":
            loss = F.cross_entropy(model.lm_head(model(x))[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        else:
            main, distance, _ = _losses(model, layers, x, detach_trunk=stage == "mtp", **options)
            loss = distance if stage == "mtp" else main + 0.1 * distance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def _row(name: str, source: Source, model: moe.Transformer, layers: MTP, batches: int = 6) -> None:
    """Print means over held-out batches."""
    results = [_losses(model, layers, source.batch(-1 - i)) for i in range(batches)]
    numbers = [sum(main.item() for main, *_ in results)]
    numbers += [sum(metrics[k] for *_, metrics in results) for k in ("kl", "overlap", "agreement")]
    print(f"{name:44}" + "".join(f"{n / batches:12.3f}" for n in numbers))


def main() -> None:
    torch.set_num_threads(1)  # small products: a second would only wait
    source, model, steps = Source(64, rows=12), moe.Transformer(SMALL), 40
    model.reset_parameters(0)
    _train(source, model, None, 3 * steps, 0, "main")
    titles = ("main loss", "KL to head", "acceptance", "same token")
    print(f"{'held-out source code, by character':44}" + "".join(f"{t:>12}" for t in titles))
    print(f"an MTP layer from scratch, {steps} steps on the frozen mid-run model")
    trained: list[MTP] = []
    for name, options in (("KL to the main head", {}), ("hard labels", dict(kind="ce")),
                          ("total variation", dict(kind="tv")), ("KL, teacher one row off", dict(shift=1))):
        trained.append(MTP(SMALL))
        _train(source, model, trained[-1], steps, 10_000, "mtp", **options)
        _row("  " + name, source, model, trained[-1])
    layers = trained[0]
    print("the first of these, when the model goes on")
    _train(source, model, None, 2 * steps, 20_000, "main")
    _row(f"  {2 * steps} steps of the model alone: drift", source, model, layers)
    alone = copy.deepcopy(model)
    _train(source, alone, None, steps, 30_000, "main")
    _row(f"  {steps} more of the model alone", source, alone, layers)
    _train(source, model, layers, steps, 30_000, "joint")
    _row(f"  {steps} more of both, jointly, instead", source, model, layers)
    print("drafts from that layer, 6 prompts of 16 characters, 32 more")
    prompts = [row[:16].tolist() for row in source.batch(-100)[:6]]
    model.eval()
    plain = generate(model, prompts, 32)
    for temperature in (0.0, 1.0):
        out, mean = speculative(model, layers, prompts, 32, temperature=temperature)
        equal = sum(map(list.__eq__, plain, out))
        same = "" if temperature else f", {equal} of 6 equal plain decoding"
        print(f"  temperature {temperature}: {mean['acceptance']:.3f} accepted, "
              f"{mean['tokens_per_forward']:.2f} tokens per forward pass{same}")


# ------------------------------------------------------------------------------------------------------ speed


class _CountOps(TorchDispatchMode):
    """Counts what reaches the dispatcher: on an accelerator, about the kernel launches."""
    n = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.n += 1
        return f(*args, **(kwargs or {}))


def _best(players: dict[str, Callable[[], int]], rounds: int = 3) -> dict[str, float]:
    """Tokens per second of each player, the best over rounds and over one thread or all; all take turns."""
    best, before = dict.fromkeys(players, 0.0), torch.get_num_threads()
    for _, threads in itertools.product(range(rounds), sorted({1, before})):
        torch.set_num_threads(threads)
        for name, play in players.items():
            began = time.perf_counter()
            tokens = play()
            best[name] = max(best[name], tokens / (time.perf_counter() - began))
    torch.set_num_threads(before)
    return best


def _transformers(model: moe.Transformer, experts: str) -> nn.Module:
    """transformers' DeepseekV3 with the same weights; refuses to go on if its logits are not ours."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    c = model.config
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers,
        moe_intermediate_size=c.expert_dim, num_attention_heads=c.n_heads, num_key_value_heads=c.n_heads,
        n_shared_experts=c.n_shared_experts, n_routed_experts=c.n_experts,
        num_experts_per_tok=c.n_experts_per_tok, n_group=1, topk_group=1,
        first_k_dense_replace=c.n_dense_layers, q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank, qk_rope_head_dim=c.qk_rope_head_dim, qk_nope_head_dim=c.qk_nope_head_dim,
        v_head_dim=c.v_head_dim, max_position_embeddings=c.max_len, rms_norm_eps=c.norm_eps,
        routed_scaling_factor=c.route_scale, num_mtp_layers=0, bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta), attn_implementation="sdpa",
        experts_implementation=experts)).eval()
    names = {"w_gate_up": "experts.gate_up_proj", "w_down": "experts.down_proj"}
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        state[name if name.startswith("lm_head") else "model." + name] = tensor
    theirs.load_state_dict(state)
    x = torch.arange(24).view(2, 12)
    with torch.no_grad():
        gap = (theirs(x).logits - model.lm_head(model(x))).abs().max()
    if not gap < 1e-3:
        raise RuntimeError(f"transformers' logits differ by {gap}: this would compare different models")
    return theirs


def _bench_batch(model: moe.Transformer, prompts: list[list[int]], new: int) -> dict[str, float]:
    """A batch of equal lengths, sampled: the engine, plain decoding, and transformers where installed."""
    n = len(prompts[0])

    def ours() -> int:
        engine = Engine(model, len(prompts), n + new, stop=-1)
        for slot, p in enumerate(prompts):
            engine.force(slot, p, n + new, reset=True, key=slot)
        while engine.live.any():
            engine.step()
        return len(prompts) * new

    players = {"engine": ours, "plain": lambda: sum(map(len, generate(model, prompts, new, temperature=1.0)))}
    if importlib.util.find_spec("transformers"):
        x = torch.tensor(prompts)
        options = dict(attention_mask=torch.ones_like(x), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                       max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
        for experts in ("grouped_mm", "eager"):
            theirs = _transformers(model, experts)
            players[f"transformers, {experts}"] = lambda m=theirs: m.generate(x, **options)[:, n:].numel()
    else:
        print("transformers is not installed: no comparison with its generate (vs_hf_generate is null)")
    return _best(players)


def _bench_mixed(model: moe.Transformer, prompts: list[list[int]], lengths: list[int]) -> dict[str, float]:
    """Requests of mixed lengths on 64 slots, reused as they become free, or batch by batch of 64."""
    n = len(prompts[0])

    def reuse() -> int:
        engine, queue = Engine(model, 64, n + max(lengths), stop=-1), iter(enumerate(zip(prompts, lengths)))
        free = list(range(64))
        while free or engine.live.any():
            for slot, (i, (p, length)) in zip(list(free), queue):
                engine.force(slot, p, n + length, reset=True, key=i)
                free.remove(slot)
            if not engine.live.any():
                break
            free += engine.step()
        return sum(lengths)

    def batches() -> int:
        for i in range(0, len(prompts), 64):
            generate(model, prompts[i:i + 64], lengths[i:i + 64], temperature=1.0)
        return sum(lengths)

    return _best({"slots reused": reuse, "batch by batch": batches}, rounds=2)


def _bench_drafts(model: moe.Transformer, layers: MTP, batches: list[list[list[int]]], new: int,
                  temperature: float) -> tuple[dict[str, float], float]:
    """Tokens per second with and without drafts, and the share of drafts that were kept."""
    kept, tokens = [], new * sum(map(len, batches))

    def drafts() -> int:
        for batch in batches:
            kept.append(speculative(model, layers, batch, new, temperature=temperature)[1]["acceptance"])
        return tokens

    def plain() -> int:
        for batch in batches:
            generate(model, batch, new, temperature=temperature)
        return tokens

    return _best({"drafts": drafts, "plain": plain}), sum(kept) / len(kept)


def _bench_step(model: moe.Transformer, rows: int, length: int) -> None:
    """A decode step beside its floors: reading weights and cache once at the bandwidth that a plain sum gets, and
    the multiplications at the speed of a large matrix product."""
    engine = Engine(model, rows, length + 40, stop=-1)
    for slot in range(rows):
        engine.force(slot, [(slot + i) % 100 for i in range(length)], length + 39, reset=True, key=slot)
    engine.step()
    engine.step()
    step = min(timeit.repeat(engine.step, number=1, repeat=20))
    big = torch.ones(1 << 26)
    bandwidth = big.nbytes / min(timeit.repeat(big.sum, number=1, repeat=5))
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    cache = engine.cache.kv[:, :, :length].nbytes
    square = torch.ones(1024, 1024)
    peak = 2 * 1024 ** 3 / min(timeit.repeat(lambda: square @ square, number=1, repeat=10))
    # forward pass alone: a third of a training step's; attention over latents, one query and `length` keys
    c, (linear, _) = model.config, moe.flops_per_token(model.config, length)
    attention = 2 * c.n_layers * c.n_heads * length * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    flops = rows * (linear / 3 + attention)
    with _CountOps() as ops:
        engine.step()
    print(f"a step of {rows} rows at {length} tokens: {1e3 * step:.2f} ms, {ops.n} operations\n"
          f"  reading {weights / 1e6:.1f} MB of weights and {cache / 1e6:.1f} MB of cache at "
          f"{bandwidth / 1e9:.1f} GB/s: {1e3 * (weights + cache) / bandwidth:.2f} ms\n"
          f"  {flops / 1e6:.0f} MFLOP at {peak / 1e9:.0f} GFLOP/s: {1e3 * flops / peak:.2f} ms")


def bench() -> dict[str, float | None]:
    """Train a model of the toy's size on source code, then measure; returns the numbers of the last line."""
    source, model, layers = Source(128, rows=8), moe.Transformer(TOY), MTP(TOY)
    model.reset_parameters(0)
    began = time.perf_counter()
    _train(source, model, None, 300, 0, "main")
    _train(source, model, layers, 150, 10_000, "mtp")
    model.eval()
    print(f"a model of {sum(p.numel() for p in model.parameters()):,} parameters, trained for "
          f"{time.perf_counter() - began:.0f} s; {torch.get_num_threads()} threads")
    prompts = [row[:32].tolist() for i in range(24) for row in source.batch(-1 - i)]
    u = torch.rand(len(prompts), generator=torch.Generator().manual_seed(0))
    batch = _bench_batch(model, prompts[:64], 192)
    mixed = _bench_mixed(model, prompts, (8 + 184 * u ** 3).long().tolist())
    single = [[p] for p in prompts[:8]]
    greedy, acceptance = _bench_drafts(model, layers, single, 64, 0.0)
    sampled, acceptance_sampled = _bench_drafts(model, layers, single, 64, 1.0)
    eight, acceptance_eight = _bench_drafts(model, layers, [prompts[:8], prompts[8:16]], 64, 0.0)
    for title, speeds in (("64 rows of 32 + 192 tokens, sampled", batch),
                          (f"{len(prompts)} requests, 8 to 192 tokens, sampled", mixed),
                          (f"one row of 64 tokens, greedy ({acceptance:.3f} accepted)", greedy),
                          (f"one row of 64 tokens, sampled ({acceptance_sampled:.3f} accepted)", sampled),
                          (f"eight rows of 64 tokens, greedy ({acceptance_eight:.3f} accepted)", eight)):
        print(f"{title}: " + ", ".join(f"{name} {speed:,.0f} tokens/s" for name, speed in speeds.items()))
    _bench_step(model, 64, 128)
    hf = max((v for k, v in batch.items() if k.startswith("transformers")), default=None)
    return {"tokens_per_s": round(batch["engine"]), "vs_hf_generate": hf and round(batch["engine"] / hf, 2),
            "vs_plain_loop": round(mixed["slots reused"] / mixed["batch by batch"], 2),
            "speculative_speedup": round(greedy["drafts"] / greedy["plain"], 2),
            "acceptance": round(acceptance, 3),
            "speculative_speedup_sampled": round(sampled["drafts"] / sampled["plain"], 2),
            "acceptance_sampled": round(acceptance_sampled, 3),
            "speculative_speedup_8_rows": round(eight["drafts"] / eight["plain"], 2)}


if __name__ == "__main__":
    if "--bench" in sys.argv[1:]:
        print(json.dumps(bench()))
    else:
        main()
