"""Multi-token prediction: extra layers that guess further ahead, and the decoding that they pay for.

Composer 2 trains MTP layers from scratch by self-distillation and uses them for speculative decoding (report §3.1, claims
T1–T3). A layer reads the model's hidden state at position i and the embedding of token i + 1, and predicts what the main head
will say one position later. Decoding lets it draft tokens, has the model check all of them in one forward pass, and keeps a
prefix such that the output is distributed exactly as without drafts.

    h'_i = M_k [ norm(emb(t_{i+k})) ; norm(h_i^{k−1}) ]      k = 1 … D,  h^0 the model's hidden state after its final norm
    h_i^k = norm(block_k(h'_i))                              its logits, through the shared head, predict t_{i+k+1}
    loss  = Σ_i KL( main head at row i + k ‖ layer k at row i )          the teacher is detached
    accept draft d with probability min(1, p(d)/q(d)); at the first rejection sample from max(p − q, 0), normalised

Legend: B rows, T tokens, D layers (n_mtp), p the model's distribution, q the draft's.

Choices where the report is silent: embedding first in the concatenation and the hidden state after the final norm, as in the
released DeepSeek-V3 weights and the engines that serve them (the paper writes the hidden state first); each layer has
its own final norm and shares embedding and head; the row stays at position i, only the embedded token is shifted. While
the model is frozen, embedding and head are detached in the MTP path, or the frozen model would change.

    python mtp.py        losses against acceptance: KL, hard labels, the wrong shift; drafts at work

Left out so far: prefix sharing inside a group, top-k and top-p, speculation in batches (rollouts decode without drafts),
the comparison with other engines.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moe


class Layer(nn.Module):
    """One MTP layer; the names are the public checkpoints'."""

    def __init__(self, c: moe.Config):
        super().__init__()
        self.enorm, self.hnorm = moe.RMSNorm(c.dim, c.norm_eps), moe.RMSNorm(c.dim, c.norm_eps)
        self.eh_proj = nn.Linear(2 * c.dim, c.dim, bias=False)
        self.block = moe.Block(c, c.n_layers - 1)
        self.norm = moe.RMSNorm(c.dim, c.norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, ctx: moe.Context) -> Tensor:
        return self.norm(
            self.block(self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)), ctx)
        )


class MTP(nn.Module):
    """`n_mtp` layers on top of a Transformer, which is passed in and never owned."""

    def __init__(self, config: moe.Config, n_mtp: int = 1):
        super().__init__()
        if n_mtp < 1:
            raise ValueError(f"n_mtp = {n_mtp}: multi-token prediction needs at least one layer")
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(n_mtp))
        if not self.layers[0].eh_proj.weight.is_meta:
            self.reset_parameters(0)

    def reset_parameters(self, seed: int) -> None:
        """From scratch, as the report does: fill all weights from one seeded generator."""
        moe.initialise(self, self.config, seed)

    def forward(
        self, model: moe.Transformer, hidden: Tensor, tokens: Tensor, ctx: moe.Context, detach: bool = False
    ) -> list[Tensor]:
        """Hidden states [B, T, D] per depth, from the model's `hidden` [B, T, D] and `tokens` [B, T].

        Row i of depth k has seen tokens up to i + k; the last k rows have no such token and hold rubbish. Routes of these
        layers are not recorded. detach: keep gradients out of the shared embedding.
        """
        weight = model.embed_tokens.weight.detach() if detach else model.embed_tokens.weight
        plain = moe.Context(ctx.cos, ctx.sin, ctx.positions, ctx.mask, real=ctx.real)
        out = []
        for k, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, F.embedding(tokens.roll(-k, dims=1), weight), plain)
            out.append(hidden)
        return out


def distill_loss(
    model: moe.Transformer,
    mtp: MTP,
    hidden: Tensor,
    tokens: Tensor,
    doc: Tensor,
    positions: Tensor,
    *,
    kind: str = "kl",
    detach_trunk: bool = True,
    norm: float | None = None,
    shift: int = 0,
    chunk: int = 4096,
) -> tuple[Tensor, dict[str, float]]:
    """Self-distillation (T1): depth k at row i learns the main head's distribution at row i + k. Returns (loss, metrics).

    kind: "kl" to the main head, "ce" on the data's token, "tv" total variation. detach_trunk: the model gets no gradient.
    norm: what the sum over rows is divided by (default: their number); the depths are averaged. shift ≠ 0 asks for the
    wrong row, for demonstrations. Rows whose token i + k + 1 is of another document do not take part. Two full logit
    tensors never coexist beyond `chunk` rows. Metrics, means over rows and depths: kl, overlap (Σ min(p, q), the expected
    acceptance of a draft), agreement (same most likely token).
    """
    if kind not in ("kl", "ce", "tv"):
        raise ValueError(f"kind = {kind!r}: choose kl, ce or tv")
    head = model.lm_head.weight.detach() if detach_trunk else model.lm_head.weight
    whole = bool((doc == doc[:, :1]).all())
    ctx = model.context(positions, doc=None if whole else doc, real=None if whole else doc >= 0)
    states = mtp(model, hidden.detach() if detach_trunk else hidden, tokens, ctx, detach_trunk)
    total, rows, sums = hidden.new_zeros(()), 0, torch.zeros(3, dtype=torch.float64)
    for k, state in enumerate(states, 1):
        n = tokens.shape[1] - k - 1
        same = (doc[:, :n] == doc[:, k + 1 :]) & (doc[:, :n] >= 0)  # t_{i+k+1} belongs to row i's document
        student, target = state[:, :n][same], tokens[:, k + 1 :][same]
        teacher = hidden.detach()[:, k - shift : k - shift + n][same]
        rows += len(student)
        for s, t, y in zip(student.split(chunk), teacher.split(chunk), target.split(chunk)):
            value, metrics = _distance(F.linear(s, head), F.linear(t, model.lm_head.weight.detach()), y, kind)
            total, sums = total + value, sums + metrics
    mean = (sums / max(rows, 1)).tolist()
    return total / len(states) / (norm or max(rows / len(states), 1)), dict(
        zip(("kl", "overlap", "agreement"), mean)
    )


def _distance(student: Tensor, teacher: Tensor, target: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Sum over rows of the chosen distance, and sums of (KL, overlap, agreement). Logits [n, V], targets [n]."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)  # = 1 − TV(p, q)
    value = {"kl": kl, "tv": 1 - overlap, "ce": -log_q.gather(1, target.unsqueeze(1)).squeeze(1)}[kind].sum()
    agreement = (log_q.argmax(-1) == log_p.argmax(-1)).double()
    return value, torch.stack((kl.detach().double().sum(), overlap.detach().double().sum(), agreement.sum()))


# ---------------------------------------------------------------------------------------------------- random numbers, warp


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (wrapping); shifts made logical by masking."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64, each a pure function of (key, position): a row's draws do not depend on who
    shares its batch, nor on how often it was interrupted."""
    x = _mix(_mix(keys) + positions * -7046029254386353131)
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: rows of probabilities [n, V] (need not sum to one) and uniforms [n] give ids [n]."""
    cdf = probabilities.double().cumsum(-1)
    ids = torch.searchsorted(cdf, (u.unsqueeze(1) * cdf[:, -1:]), right=True).squeeze(1)
    return ids.clamp(max=probabilities.shape[1] - 1)


def _checked(temperature: float) -> float:
    if not temperature >= 0:
        raise ValueError(
            f"temperature = {temperature}: 0 is greedy, positive samples, nothing else is defined"
        )
    return temperature


# --------------------------------------------------------------------------------------------------------- the engine


class Engine:
    """Decodes many windows at once: continuous batching over slots with a latent cache (used by all rollouts).

    Each slot holds one window. `force` appends tokens that the model did not write (they enter in one chunk); `step` advances every
    live slot by one sampled token and returns the slots whose turn has ended. Recorded per token: log-prob under the
    sampling distribution, policy version, the expert ids with which it was computed (M3).
    """

    def __init__(
        self, model: moe.Transformer, n_slots: int, capacity: int, stop: int, temperature: float = 1.0
    ):
        c, device = model.config, next(model.parameters()).device
        self.model, self.stop, self.temperature, self.version = model, stop, _checked(temperature), 0
        self.cache = moe.Cache(c, n_slots, capacity, dtype=model.embed_tokens.weight.dtype, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(n_slots, *shape, dtype=dtype, device=device)

        self.tokens, self.versions = zeros(capacity), zeros(capacity, dtype=torch.int32)
        self.logp, self.sampled = zeros(capacity, dtype=torch.float32), zeros(capacity, dtype=torch.bool)
        self.routes = zeros(capacity, c.n_moe_layers, c.n_experts_per_tok, dtype=torch.int16)
        self.known, self.cached = zeros(), zeros()  # tokens in the window; of these, processed by the model
        self.limit, self.keys, self.live = zeros(), zeros(), zeros(dtype=torch.bool)

    def force(
        self, slot: int, ids: list[int], limit: int, reset: bool = False, key: int | None = None
    ) -> None:
        """Append tokens and make the slot live; its turn ends at the stop id or when the window holds `limit` tokens.

        reset: begin a new window. key: of the slot's random numbers (kept until given anew).
        """
        n = 0 if reset else int(self.known[slot])
        if not ids:
            raise ValueError(f"slot {slot}: nothing to append; a turn begins with at least one forced token")
        if not n + len(ids) < limit <= self.tokens.shape[1]:
            raise ValueError(
                f"slot {slot}: {n} + {len(ids)} tokens and a limit of {limit} do not fit {self.tokens.shape[1]}"
            )
        if not 0 <= min(ids) <= max(ids) < self.model.config.vocab_size:
            raise ValueError(
                f"token ids {min(ids)} … {max(ids)} are outside the vocabulary of {self.model.config.vocab_size}"
            )
        if reset:
            self.cached[slot] = 0
            self.cache.lengths[slot] = 0
        span = slice(n, n + len(ids))
        self.tokens[slot, span] = torch.tensor(ids, device=self.tokens.device)
        self.sampled[slot, span], self.logp[slot, span], self.versions[slot, span] = False, 0.0, self.version
        self.known[slot], self.limit[slot], self.live[slot] = n + len(ids), limit, True
        if key is not None:
            self.keys[slot] = key

    @torch.no_grad()
    def step(self) -> list[int]:
        """One sampled token for every live slot. Slots with a chunk to read form one forward pass, the others another."""
        pending = torch.where(self.live, self.known - self.cached, 0)
        ended = []
        for rows in ((pending > 1).nonzero().flatten(), (pending == 1).nonzero().flatten()):
            if len(rows):
                ended += self._advance(rows, int(pending[rows].max()))
        return ended

    def _advance(self, rows: Tensor, width: int) -> list[int]:
        """Process the unread tokens of `rows` (up to `width` each) and sample the next one."""
        last = self.known[rows] - 1  # [n] position of the newest token
        steps = torch.arange(width, device=rows.device)
        positions = torch.minimum(
            self.cached[rows].unsqueeze(1) + steps, last.unsqueeze(1)
        )  # padding repeats the newest
        every = len(rows) == len(self.known)
        ctx = self.model.context(positions, cache=self.cache, rows=None if every else rows, record=True)
        hidden = self.model(self.tokens[rows.unsqueeze(1), positions], ctx)  # [n, width, D]
        if ctx.routes:
            self.routes[rows.unsqueeze(1), positions] = torch.stack(ctx.routes, 2).to(torch.int16)
        at = last - self.cached[rows]
        logits = self.model.lm_head(hidden[torch.arange(len(rows)), at]).float()  # [n, V]
        chosen, logp = self._choose(logits, self.keys[rows], last + 1)
        self.cached[rows] = self.cache.lengths[rows] = last + 1
        self.tokens[rows, last + 1], self.logp[rows, last + 1] = chosen, logp
        self.sampled[rows, last + 1], self.versions[rows, last + 1] = True, self.version
        self.known[rows] = last + 2
        ended = rows[(chosen == self.stop) | (last + 2 >= self.limit[rows])]
        self.live[ended] = False
        return ended.tolist()

    def _choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        logp = (logits / (self.temperature or 1.0)).log_softmax(-1)
        chosen = draw(logp.exp(), uniforms(keys, positions)) if self.temperature else logits.argmax(-1)
        return chosen, logp.gather(1, chosen.unsqueeze(1)).squeeze(1)

    def load(self, state: dict[str, Tensor], version: int) -> None:
        """New weights between two steps. Caches stay: later tokens attend to keys of older versions (R5)."""
        self.model.load_state_dict(state)
        self.version = version

    def window(self, slot: int) -> tuple[list[int], list[int], list[float], list[int], Tensor]:
        """(ids, mask, logprobs, versions, routes [n, L_moe, K]) of a slot; −1 routes where a token was never an input."""
        n = int(self.known[slot])
        routes = self.routes[slot, :n].clone()
        routes[int(self.cached[slot]) :] = -1
        return (
            self.tokens[slot, :n].tolist(),
            self.sampled[slot, :n].int().tolist(),
            self.logp[slot, :n].tolist(),
            self.versions[slot, :n].tolist(),
            routes,
        )


def generate(
    model: moe.Transformer,
    prompt: list[int],
    max_new: int,
    *,
    temperature: float = 0.0,
    stop: int = -1,
    key: int = 0,
) -> list[int]:
    """Plain decoding of one prompt; the stop id, if sampled, is the last token."""
    if max_new < 1:
        return []
    engine = Engine(model, 1, len(prompt) + max_new, stop, temperature)
    engine.force(0, prompt, len(prompt) + max_new, reset=True, key=key)
    while engine.live.any():
        engine.step()
    return engine.window(0)[0][len(prompt) :]


# ---------------------------------------------------------------------------------------------------- speculative decoding


def verify(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, u_next: float) -> tuple[int, int]:
    """The acceptance rule (Leviathan et al. 2211.17192). p [n + 1, V], q [n, V] probabilities, drafts [n], uniforms [n].

    Returns how many drafts are accepted and the token that follows: from the normalised max(p − q, 0) after a rejection, from
    the last row of p when all were accepted. The output is then distributed as p, whatever q is.
    """
    for i, d in enumerate(drafts.tolist()):
        if u[i] * q[i, d] >= p[i, d]:  # u ≥ p/q: reject
            rest = (p[i] - q[i]).clamp(min=0)
            return i, int(draw(rest[None], torch.tensor([u_next], dtype=torch.float64)))
    return len(drafts), int(draw(p[-1:], torch.tensor([u_next], dtype=torch.float64)))


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities that are sampled from: softmax(logits / temperature), one-hot of the arg-max at temperature 0."""
    if temperature:
        return (logits.double() / temperature).softmax(-1)
    return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()


@torch.no_grad()
def speculative(
    model: moe.Transformer,
    mtp: MTP,
    prompt: list[int],
    max_new: int,
    *,
    temperature: float = 0.0,
    stop: int = -1,
    key: int = 0,
) -> tuple[list[int], dict[str, float]]:
    """Decode one prompt with one draft per round from the first MTP layer; greedy output equals plain decoding.

    A round: the layer drafts t_{n+1} from the model's state at n − 1 and the newest token t_n; one pass of the
    model reads [t_n, draft] and judges the draft; both caches are cut back to what was kept. Layers deeper
    than the first are not used here.
    Stats: acceptance (share of drafts kept), tokens_per_forward (of the model), rounds.
    """
    if not prompt:
        raise ValueError("an empty prompt: give at least one token")
    c, dtype = model.config, model.embed_tokens.weight.dtype
    _checked(temperature)
    capacity = len(prompt) + max_new + 2
    cache, side = moe.Cache(c, 1, capacity, dtype=dtype), moe.Cache(c, 1, capacity, dtype=dtype)
    out, kept, rounds, forwards = [], 0, 0, 0
    hidden = torch.zeros(1, 0, c.dim, dtype=dtype)  # the model's states from position `clean` on
    clean, read, committed = 0, 0, list(prompt)  # MTP rows done; tokens in the model's cache; all tokens

    def forward(ids: list[int], start: int) -> Tensor:
        positions = torch.arange(start, start + len(ids))[None]
        return model(torch.tensor([ids]), model.context(positions, cache=cache))

    def u(position: int, purpose: int) -> float:
        return float(uniforms(torch.tensor([key * 4 + purpose]), torch.tensor([position]))[0])

    while len(out) < max_new and (not out or out[-1] != stop):
        n = len(committed) - 1  # position of the newest token, not yet read by the model
        draft = q = None
        if hidden.shape[1]:  # rows clean … n − 1: states and the token after each
            rows = hidden.shape[1]
            positions = torch.arange(clean, clean + rows)[None]
            ctx = model.context(positions, cache=side)
            layer = mtp.layers[0]
            state = layer(
                hidden, model.embed_tokens(torch.tensor([committed[clean + 1 : clean + rows + 1]])), ctx
            )
            q = distribution(model.lm_head(state[:, -1]).float(), temperature)  # [1, V]
            draft = draw(q, torch.tensor([u(n + 1, 1)], dtype=torch.float64))
            clean += rows
        ids = committed[read:] + ([int(draft)] if draft is not None else [])
        states = forward(ids, read)
        forwards += 1
        judged = states[:, len(committed) - 1 - read :]  # rows n, n + 1
        p = distribution(model.lm_head(judged[0]).float(), temperature)
        if draft is None:
            accepted, following = 0, int(draw(p[:1], torch.tensor([u(n + 1, 0)], dtype=torch.float64)))
        else:
            accepted, following = verify(p, q, draft, torch.tensor([u(n + 1, 2)]), u(n + 1, 0))
            kept, rounds = kept + accepted, rounds + 1
        new = ([int(draft)] if accepted else []) + [following]
        if stop in new:
            new = new[: new.index(stop) + 1]
        new = new[: max_new - len(out)]
        out, committed = out + new, committed + new
        hidden = states[:, : n + 1 + accepted - read]  # states of committed tokens only
        read = n + 1 + accepted
    return out, dict(
        acceptance=kept / max(rounds, 1), tokens_per_forward=len(out) / max(forwards, 1), rounds=rounds
    )


# ----------------------------------------------------------------------------------------------------------------- demo


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small products: a second thread would only wait
    c = moe.Config(
        vocab_size=64,
        dim=32,
        n_layers=2,
        n_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        ffn_dim=64,
        expert_dim=16,
        n_experts=4,
        n_experts_per_tok=2,
        rope_factor=1.0,
        init_std=0.0,
    )
    table = (
        torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).mul(2.5).softmax(-1)
    )  # a language: one Markov chain

    def batch(seed: int, rows: int = 8, length: int = 32) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        x = [torch.randint(0, 64, (rows,), generator=g)]
        for _ in range(length - 1):
            x.append(torch.multinomial(table[x[-1]], 1, generator=g).squeeze(1))
        return torch.stack(x, 1)

    model = moe.Transformer(c)
    model.reset_parameters(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(120):
        x = batch(step)
        F.cross_entropy(model.lm_head(model(x))[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("a model of 64 words, frozen; one MTP layer trained on it for 80 steps\n")
    print(f"{'loss':26} {'KL to head':>10}  {'acceptance':>10}  {'same token':>10}")
    best = None
    for name, kind, shift in (
        ("KL to the main head", "kl", 0),
        ("hard labels", "ce", 0),
        ("total variation", "tv", 0),
        ("KL, wrong row", "kl", 1),
    ):
        layers = MTP(c)
        moe.initialise(layers, c, 1)
        optimizer = torch.optim.AdamW(layers.parameters(), 1e-2)
        for step in range(80):
            x = batch(1000 + step)
            doc, positions = torch.zeros_like(x), torch.arange(32).expand_as(x)
            with torch.no_grad():
                hidden = model(x)
            value, _ = distill_loss(model, layers, hidden, x, doc, positions, kind=kind, shift=shift)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            m = distill_loss(model, layers, hidden, x, doc, positions)[1]
        print(f"{name:26} {m['kl']:10.3f}  {m['overlap']:10.3f}  {m['agreement']:10.3f}")
        best = best or layers
    prompts = [batch(5000 + i, 1, 8)[0].tolist() for i in range(8)]
    for temperature in (0.0, 1.0):
        stats = [
            speculative(model, best, p, 24, temperature=temperature, key=i) for i, p in enumerate(prompts)
        ]
        same = sum(generate(model, p, 24, temperature=0.0) == s[0] for p, s in zip(prompts, stats))
        print(
            f"\ndrafting at temperature {temperature}: {sum(s[1]['acceptance'] for s in stats) / 8:.3f} accepted, "
            f"{sum(s[1]['tokens_per_forward'] for s in stats) / 8:.2f} tokens per forward pass"
            + (f", {same} of 8 outputs equal to plain decoding" if not temperature else ""),
            end="",
        )
    print()


if __name__ == "__main__":
    main()
