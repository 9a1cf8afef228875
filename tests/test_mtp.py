"""mtp.py: which row learns what, what stays frozen, drafts that change nothing, an engine that keeps its rows apart."""
import copy
import dataclasses
from collections import Counter

import pytest
import torch

import moe
import mtp

C = moe.Config(vocab_size=12, dim=16, n_layers=2, n_heads=2, q_lora_rank=8, kv_lora_rank=8,
               qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, ffn_dim=16, expert_dim=8, n_experts=4,
               n_experts_per_tok=2, rope_factor=1.0, rope_original_len=256, init_std=0.0)


def build(n_mtp: int = 1, dtype: torch.dtype = torch.float64, peak: float = 3.0) -> tuple[moe.Transformer, mtp.MTP]:
    model, layers = moe.Transformer(C), mtp.MTP(C, n_mtp)
    model.reset_parameters(0)
    layers.reset_parameters(1)
    with torch.no_grad():
        model.lm_head.weight.mul_(peak)
    return model.to(dtype).eval(), layers.to(dtype).eval()


def data(rows: int = 3, length: int = 14) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 12, (rows, length), generator=torch.Generator().manual_seed(0))
    return x, torch.zeros_like(x), torch.arange(length).expand_as(x)


def prompt(seed: int) -> list[int]:
    return torch.randint(0, 12, (1 + seed % 5,), generator=torch.Generator().manual_seed(seed)).tolist()


# ---------------------------------------------------------------------------------------------------- module and losses


class Oracle(mtp.MTP):
    """Layers that know the model's states k rows ahead: the perfect student."""

    def forward(self, model, hidden, tokens, ctx, detach=False):
        return [model(tokens).roll(-k, dims=1) for k in range(1, len(self.layers) + 1)]


@pytest.mark.parametrize("depth", (1, 2, 3))
def test_the_perfect_student_has_no_distance_and_only_at_the_right_row(depth: int) -> None:
    model, (x, doc, positions) = build()[0], data()
    hidden = model(x)
    value, metrics = mtp.distill_loss(model, Oracle(C, depth), hidden, x, doc, positions)
    assert value.abs() < 1e-9 and metrics["overlap"] == pytest.approx(1.0) and metrics["agreement"] == 1.0
    assert mtp.distill_loss(model, Oracle(C, depth), hidden, x, doc, positions, shift=1)[0] > 0.05


def test_a_row_sees_its_tokens_and_no_later_ones() -> None:
    """Depth k at row i depends on token i + k and not on token i + k + 1."""
    model, layers = build(3)
    x, _, positions = data(1, 12)
    hidden, ctx = model(x), model.context(positions)
    before = layers(model, hidden, x, ctx)
    y = x.clone()
    y[0, 8] = (y[0, 8] + 1) % 12
    for k, (a, b) in enumerate(zip(before, layers(model, hidden, y, ctx)), 1):
        changed = (a - b).abs().amax(-1)[0] > 1e-12
        assert not changed[:8 - k].any() and changed[8 - k]


def test_frozen_model_gets_no_gradient_and_joint_training_does() -> None:
    model, layers = build()
    x, doc, positions = data()
    mtp.distill_loss(model, layers, model(x), x, doc, positions, detach_trunk=True)[0].backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in layers.parameters())
    mtp.distill_loss(model, layers, model(x), x, doc, positions, detach_trunk=False)[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in (model.embed_tokens.weight, model.lm_head.weight, model.norm.weight))


def test_documents_end_the_look_ahead() -> None:
    """Packed rows give the loss of their documents taken one by one; padding (−1) gives nothing."""
    model, layers = build(2)
    a, b = data(1, 9)[0], data(1, 7)[0]
    x = torch.cat((a, b, b[:, :3]), 1)
    doc = torch.tensor([[0] * 9 + [1] * 7 + [-1] * 3])
    positions = torch.cat((torch.arange(9), torch.arange(7), torch.arange(3)))[None]

    def loss(tokens, doc, positions):
        hidden = model(tokens, model.context(positions, doc=doc))
        return mtp.distill_loss(model, layers, hidden, tokens, doc, positions, norm=1.0)[0].item()

    apart = sum(loss(t, torch.zeros_like(t), torch.arange(t.shape[1])[None]) for t in (a, b))
    assert loss(x, doc, positions) == pytest.approx(apart, rel=1e-9)
    assert loss(x[:, :2], doc[:, :2], positions[:, :2]) == 0.0  # too short for any target


@pytest.mark.parametrize("kind", ("kl", "ce", "tv"))
def test_chunks_change_neither_loss_nor_gradient(kind: str) -> None:
    model, layers = build(2)
    x, doc, positions = data()
    results = []
    for chunk in (1, 5, 4096):
        layers.zero_grad()
        value, metrics = mtp.distill_loss(model, layers, model(x), x, doc, positions, kind=kind, chunk=chunk)
        value.backward()
        results.append([value.item(), *metrics.values(), *(p.grad.norm().item() for p in layers.parameters())])
    assert results[0] == pytest.approx(results[2]) and results[1] == pytest.approx(results[2])


def test_chunks_keep_no_logits_for_the_backward_pass() -> None:
    model, layers = build()
    x, doc, positions = data(3, 14)
    hidden, kept = model(x).detach(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        mtp.distill_loss(model, layers, hidden, x, doc, positions, chunk=5)
    assert not [s for s in kept if s in ((5, 12), (36, 12))]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        mtp.distill_loss(model, layers, hidden, x, doc, positions)
    assert (36, 12) in kept  # the hook would have seen them


def test_public_names_come_back_and_strangers_are_refused() -> None:
    model, layers = build(2)
    state = {k: v.clone() for k, v in mtp.to_public(model, layers).items()}
    for name in ("model.layers.2.enorm.weight", "model.layers.3.eh_proj.weight", "model.layers.2.shared_head.norm.weight",
                 "model.layers.2.shared_head.head.weight", "model.layers.2.embed_tokens.weight",
                 "model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "model.layers.3.mlp.experts.3.down_proj.weight",
                 "model.layers.2.mlp.gate.e_score_correction_bias", "model.layers.2.mlp.shared_experts.up_proj.weight"):
        assert name in state
    assert torch.equal(state["model.layers.2.mlp.experts.1.up_proj.weight"], layers.layers[0].block.mlp.w_gate_up[1, 8:])
    other = mtp.MTP(C, 2).double()
    mtp.from_public(model, other, state)
    assert all(torch.equal(a, b) for a, b in zip(layers.state_dict().values(), other.state_dict().values()))
    with pytest.raises(ValueError, match="trained on another model"):
        mtp.from_public(build(peak=1.0)[0], other, state)
    del state["model.layers.3.hnorm.weight"]
    with pytest.raises(ValueError, match="layers.3.hnorm"):
        mtp.from_public(model, other, state)


# --------------------------------------------------------------------------------------------------------------- sampling


def test_the_warped_distribution() -> None:
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    for settings, want in (
        (dict(), (0.15, 0.5, 0.05, 0.3)),
        (dict(temperature=0.0), (0, 1, 0, 0)),
        (dict(temperature=0.5), (0.0225 / 0.365, 0.25 / 0.365, 0.0025 / 0.365, 0.09 / 0.365)),
        (dict(top_k=2), (0, 0.625, 0, 0.375)),
        (dict(top_k=9), (0.15, 0.5, 0.05, 0.3)),
        (dict(top_p=0.5), (0, 1, 0, 0)),  # the best alone reaches the mass
        (dict(top_p=0.51), (0, 0.625, 0, 0.375)),
        (dict(top_p=1e-6), (0, 1, 0, 0)),  # never empty
        (dict(top_k=3, top_p=0.9), (3 / 19, 10 / 19, 0, 6 / 19)),  # mass counted among the three: 0.84 < 0.9
        (dict(top_k=3, top_p=0.8), (0, 0.625, 0, 0.375)),
    ):
        assert mtp.Sampling(**settings).logp(logits).exp()[0].tolist() == pytest.approx(want, abs=1e-6), settings
    ties = mtp.Sampling(top_k=2).logp(torch.zeros(1, 4)).exp()[0].tolist()
    assert ties == pytest.approx((0.5, 0.5, 0, 0))  # exactly two, the lowest ids


def test_log_probs_belong_to_the_truncated_distribution() -> None:
    """Known values: logits (2, 1, 0), token 0."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for settings, want in ((dict(), -0.407606), (dict(temperature=0.6), -0.202573), (dict(top_k=2), -0.313262)):
        assert mtp.Sampling(**settings).logp(logits)[0, 0].item() == pytest.approx(want, abs=1e-6)


def test_drawing_inverts_the_distribution_and_never_hits_zero() -> None:
    p = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(8, 5)
    u = torch.tensor([0.0, 0.1, 0.2499, 0.25, 0.5, 0.75, 0.999, 1 - 2.0 ** -53], dtype=torch.float64)
    assert mtp.draw(p, u).tolist() == [1, 1, 1, 3, 3, 3, 3, 3] == mtp.draw(5 * p, u).tolist()


def test_uniforms_are_uniform_and_independent_of_order() -> None:
    u = mtp.uniforms(torch.arange(200)[:, None], torch.arange(200)[None])
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.003
    flat = u - 0.5
    assert abs((flat[:, 1:] * flat[:, :-1]).mean()) < 0.002 and abs((flat[1:] * flat[:-1]).mean()) < 0.002
    assert mtp.uniforms(torch.tensor([7]), torch.tensor([9])) == u[7, 9]


# ------------------------------------------------------------------------------------------------------ the acceptance rule

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)


def grid(n: int) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def resample_from_p(p, q, drafts, judged, u, u_next):
    """Wrong rule 1: after a rejection sample from p, not from the rest."""
    accepted, following = REAL(p, q, drafts, judged, u, u_next)
    at = torch.arange(len(p)), accepted
    return accepted, torch.where(accepted == judged, following, mtp.draw(p[at], u_next[at]))


def keep_everything(p, q, drafts, judged, u, u_next):
    """Wrong rule 2: drafts are never judged."""
    at = torch.arange(len(p)), judged
    return judged, mtp.draw(p[at], u_next[at])


REAL = mtp.verify


def emitted(rule, draws_from: torch.Tensor = Q, claimed: torch.Tensor = Q) -> torch.Tensor:
    """Exact distribution of the first token out: drafts from one distribution, judged as if from `claimed`."""
    d, u, v = torch.cartesian_prod(torch.arange(3).double(), grid(10), grid(70)).unbind(1)
    d = d.long()
    p, q, one = P.expand(2100, 2, 3), claimed.expand(2100, 1, 3), torch.ones(2100, dtype=torch.long)
    # every threshold lies between two points
    accepted, following = rule(p, q, d[:, None], one, u[:, None], torch.stack((v, v), 1))
    return torch.zeros(3).double().scatter_add(0, torch.where(accepted == 1, d, following), draws_from[d] / 700)


def test_rows_are_judged_by_themselves_and_no_further_than_asked() -> None:
    g, n = torch.Generator().manual_seed(0), 200
    p, q = (torch.rand(n, k, 5, generator=g, dtype=torch.float64).softmax(-1) for k in (4, 3))
    p[::7, :3] = q[::7]  # equal but for nothing: all drafts are kept
    drafts, judged = torch.randint(0, 5, (n, 3), generator=g), torch.randint(0, 4, (n,), generator=g)
    u, v = (torch.rand(n, k, generator=g, dtype=torch.float64) for k in (3, 4))
    together = mtp.verify(p, q, drafts, judged, u, v)
    for r, (accepted, following) in enumerate(zip(*together)):
        i, k = 0, int(judged[r])  # one by one, as the paper writes it
        while i < k and u[r, i] < p[r, i, drafts[r, i]] / q[r, i, drafts[r, i]]:
            i += 1
        rest = p[r, i] if i == k else (p[r, i] - q[r, i]).clamp(min=0)
        assert (accepted, following) == (i, mtp.draw(rest[None], v[r, i:i + 1]))
    assert (together[0] < judged).sum() > 20 and (together[0] == judged)[::7].all()


def test_the_output_is_distributed_as_the_model_and_wrong_rules_are_not() -> None:
    """Exact, by enumeration; greedy drafts (always id 1) are right with a one-hot q and wrong with the softmax (rule 3)."""
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    far = lambda x: 0.5 * (x - P).abs().sum().item()
    assert far(emitted(REAL)) < 1e-12 and far(emitted(REAL, one_hot, one_hot)) < 1e-12
    assert far(emitted(resample_from_p)) == pytest.approx(0.15)
    assert far(emitted(keep_everything)) == pytest.approx(0.3)
    assert far(emitted(REAL, draws_from=one_hot)) == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------------------- speculative decoding


@pytest.mark.parametrize("depth", (1, 3))
def test_greedy_speculation_is_plain_decoding(depth: int) -> None:
    model, layers = build(depth)
    prompts = [prompt(seed) for seed in range(24 // depth)]
    plain = mtp.generate(model, prompts, 20)
    for seed, (ids, want) in enumerate(zip(prompts, plain)):
        (out,), stats = mtp.speculative(model, layers, [ids], 20)
        assert out == want and stats["tokens_per_forward"] >= 1.0
        stop = want[seed % 7]  # somewhere, in the middle of a draft too
        assert mtp.speculative(model, layers, [ids], 20, stop=stop)[0] == mtp.generate(model, [ids], 20, stop=stop)
        length = 1 + seed % 6
        assert mtp.speculative(model, layers, [ids], length, n_draft=seed % (depth + 1))[0] == [want[:length]]


@pytest.mark.parametrize("depth", (0, 1, 3))
@pytest.mark.parametrize("settings", (dict(), dict(temperature=0.9, top_p=0.9)), ids=("greedy", "sampled"))
def test_rows_of_a_batch_keep_their_own_pace(depth: int, settings: dict) -> None:
    """Ragged prompts, room and stops: each row says what it says alone, whoever accepts more or ends sooner."""
    model, layers = build(max(depth, 1))
    prompts, room = [prompt(seed) for seed in range(13)], [1 + 5 * seed % 17 for seed in range(13)]
    options = dict(n_draft=depth, stop=3, **settings)
    together, stats = mtp.speculative(model, layers, prompts, room, **options)
    alone = [mtp.speculative(model, layers, [p], n, keys=[key], **options)
             for key, (p, n) in enumerate(zip(prompts, room))]
    assert together == [out for (out,), _ in alone] and stats["rounds"] == sum(one["rounds"] for _, one in alone)
    assert len({len(out) for out in together}) > 4 and any(len(out) < n for out, n in zip(together, room))
    if not settings:
        assert together == mtp.generate(model, prompts, room, stop=3)


def test_perfect_drafts_give_a_token_per_layer_and_one() -> None:
    """A model with one answer for everything and layers that share it: every draft is kept, stops cut what follows."""
    model, layers = build(3)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    (out,), stats = mtp.speculative(model, layers, [[1, 2]], 41)
    assert out == [0] * 41 and stats["acceptance"] == 1.0 and stats["rounds"] == 10
    assert mtp.speculative(model, layers, [[1, 2]], 41, stop=0)[0] == [[0]]
    assert mtp.speculative(model, layers, [[1, 2]], 3)[0] == [[0, 0, 0]]


def test_caches_and_states_equal_a_fresh_prefill_in_every_round() -> None:
    """Of every row, of the model and all MTP layers, entries that rested on refused drafts included."""
    model, layers = build(3)
    with torch.inference_mode():
        s = mtp.Speculation(model, layers, [[3, 1, 4], [1, 5, 9, 2, 6], [5]], 50, 3, mtp.Sampling(), (2, 3, 4))
        refused = 0
        for at in range(12):
            rows = torch.tensor([0, 2]) if at % 3 == 1 else torch.arange(3)
            s.draft(rows)
            for row in rows.tolist():
                n = int(s.known[row]) - 1
                cache, ids = moe.Cache(C, 1, 50, C.n_layers + 3, torch.float64), s.tokens[row:row + 1]
                ctx = model.context(torch.arange(n)[None], cache=cache)
                hidden = model(ids[:, :n], ctx)
                assert torch.allclose(s.states[row, :n], hidden[0], atol=1e-12)
                for k, layer in enumerate(layers.layers, 1):
                    hidden = layer(hidden, model.embed_tokens(ids[:, k:n + k]), ctx)
                assert torch.allclose(s.cache.kv[:, row, :n], cache.kv[:, 0, :n], atol=1e-12)
            _, accepted, judged = s.round(rows, torch.full((len(rows),), 10))
            refused += int((accepted < judged).sum())
        assert refused > 9 and len(set(s.known.tolist())) > 1


def outcomes(model, layers, ids, keys: int, **settings) -> dict[tuple, float]:
    said, _ = mtp.speculative(model, layers, [ids] * keys, 4, keys=range(keys), **settings)
    return {out: n / keys for out, n in Counter(map(tuple, said)).items()}


def exact(model, ids, length: int, sampling: mtp.Sampling) -> dict[tuple, float]:
    """Probability of every continuation."""
    if length == 0:
        return {(): 1.0}
    with torch.no_grad():
        p = sampling.logp(model.lm_head(model(torch.tensor([ids])))[:, -1]).exp()[0]
    return {(t, *rest): p[t].item() * q for t in p.nonzero().flatten().tolist() for rest,
            q in exact(model, [*ids, t], length - 1, sampling).items()}


def test_sampled_speculation_follows_the_model_and_wrong_rules_do_not(monkeypatch) -> None:
    """Four tokens, two drafts a round, against the enumeration of all continuations; p and q warped alike."""
    c = dataclasses.replace(C, vocab_size=5, n_layers=1)  # the dense layer alone
    model, layers = moe.Transformer(c), mtp.MTP(c, 2)
    model.reset_parameters(9)
    layers.reset_parameters(109)
    model, layers, ids, n = model.double().eval(), layers.double().eval(), [3, 1, 4], 2000

    def far(**settings) -> tuple[float, float]:
        """Distance of n speculative samples from the model's distribution; the largest of 50 draws of n from it."""
        want = exact(model, ids, 4, mtp.Sampling(**settings))
        assert sum(want.values()) == pytest.approx(1.0)
        got = outcomes(model, layers, ids, n, **settings)
        p, g = torch.tensor(list(want.values())), torch.Generator().manual_seed(0)
        counts = [torch.bincount(torch.multinomial(p, n, True, generator=g), minlength=len(p)) for _ in range(50)]
        noise = max(0.5 * (x / n - p).abs().sum().item() for x in counts)
        return 0.5 * sum(abs(want.get(o, 0.0) - got.get(o, 0.0)) for o in want | got), noise

    for settings in (dict(temperature=0.8, top_p=0.7), dict(temperature=1.0, top_k=2)):
        distance, noise = far(**settings)
        assert distance < noise
    for wrong in (resample_from_p, keep_everything):
        monkeypatch.setattr(mtp, "verify", wrong)
        assert far(**settings)[0] > 1.3 * noise, wrong.__name__
    monkeypatch.setattr(mtp, "verify", REAL)
    monkeypatch.setattr(mtp.Speculation, "draft", greedy_draft)
    assert far(**settings)[0] > 1.3 * noise


DRAFT = mtp.Speculation.draft


def greedy_draft(self, rows):
    """Wrong rule 3: drafts are the most likely tokens, judged as if drawn from the softmax."""
    real = mtp.draw
    mtp.draw = lambda q, u: q.argmax(-1)
    try:
        return DRAFT(self, rows)
    finally:
        mtp.draw = real


# ----------------------------------------------------------------------------------------------------------------- engine


def finish(engine: mtp.Engine) -> None:
    while engine.live.any():
        engine.step()


def run(engine: mtp.Engine, prompts: dict[int, list[int]], limit: int, keys: dict[int, int]) -> dict[int, list[int]]:
    for slot, ids in prompts.items():
        engine.force(slot, ids, limit, reset=True, key=keys[slot])
    finish(engine)
    return {slot: engine.window(slot)[0] for slot in prompts}


def test_plain_decoding_is_the_model_run_anew_for_every_token() -> None:
    model, _ = build()
    prompts = [prompt(seed) for seed in range(6)]
    room = [3, 9, 0, 5, 1, 7]
    with torch.no_grad():
        for ids, n, got in zip(prompts, room, mtp.generate(model, prompts, room)):
            want = list(ids)
            for _ in range(n):
                want.append(int(model.lm_head(model(torch.tensor([want]))[0, -1]).argmax()))
            assert got == want[len(ids):]


@pytest.mark.parametrize("settings", (dict(temperature=0.0), dict(temperature=1.0), dict(temperature=0.9, top_k=5, top_p=0.8)))
def test_engine_and_plain_decoding_say_the_same(settings: dict) -> None:
    """The same keys give the same tokens, however the work was cut into passes."""
    model, _ = build()
    prompts = [prompt(seed) * 3 for seed in range(7)]
    want = mtp.generate(model, prompts, 12, stop=0, keys=range(50, 57), **settings)
    for slots, chunk in ((7, 512), (2, 4), (3, 1)):
        engine, queue, got = mtp.Engine(model, slots, 40, stop=0, chunk=chunk, **settings), list(range(7)), {}
        owner: dict[int, int] = {}
        while queue or owner:
            for slot in set(range(slots)) - owner.keys():
                if queue:
                    owner[slot] = i = queue.pop(0)
                    engine.force(slot, prompts[i], len(prompts[i]) + 12, reset=True, key=50 + i)
            for slot in engine.step():
                i = owner.pop(slot)
                got[i] = engine.window(slot)[0][len(prompts[i]):]
        assert [got[i] for i in range(7)] == want


def test_a_row_does_not_depend_on_its_company() -> None:
    model, _ = build()
    prompts = {0: [1, 2, 3], 1: [4], 2: [5, 6, 7, 8, 9], 3: [2, 2]}
    keys = {i: 100 + i for i in prompts}
    together = run(mtp.Engine(model, 4, 40, stop=0), prompts, 30, keys)
    for slot, ids in prompts.items():
        assert run(mtp.Engine(model, 1, 40, stop=0), {0: ids}, 30, {0: keys[slot]})[0] == together[slot]
    assert run(mtp.Engine(model, 4, 40, stop=0), prompts, 30, {i: 7 for i in prompts}) != together


@pytest.mark.parametrize("company", (0, 1, 4))
def test_forced_tokens_enter_as_if_they_had_been_there(company: int) -> None:
    """After a forced chunk the recorded log-probs and routes are those of one pass over the whole window, whether the slot
    rested alone, or idle among few or many others that went on."""
    model, _ = build()
    engine = mtp.Engine(model, 5, 60, stop=-1)
    for other in range(company):
        engine.force(other, [other + 1], 60, reset=True, key=other)
    engine.force(4, [1, 2, 3], 9, reset=True, key=5)
    while engine.live[4]:
        engine.step()
    for _ in range(5):
        engine.step()
    engine.force(4, [4, 5, 6, 7], 30)
    while engine.live[4]:
        engine.step()
    engine.step()
    ids, mask, logprobs, versions, routes = engine.window(4)
    assert len({len(ids), len(mask), len(logprobs), len(versions), len(routes), 30}) == 1
    assert mask == [0] * 3 + [1] * 6 + [0] * 4 + [1] * 17 and ids[9:13] == [4, 5, 6, 7]
    ctx = model.context(torch.arange(len(ids))[None], record=True)
    with torch.no_grad():
        logp = model.lm_head(model(torch.tensor([ids]), ctx)[0]).log_softmax(-1)
    for i, m in enumerate(mask):
        assert logprobs[i] == pytest.approx(logp[i - 1, ids[i]].item() if m else 0.0, abs=1e-5)
    assert torch.equal(torch.stack(ctx.routes, 2)[0, :-1].to(torch.int16), routes[:-1]) and (routes[-1] == -1).all()


def test_a_chunk_waits_for_others_but_not_for_ever() -> None:
    """One slot with a chunk among 16 that decode gets its turn once they have ended, and nobody else is held up."""
    model, _ = build()
    engine = mtp.Engine(model, 17, 30, stop=-1)
    for slot in range(16):
        engine.force(slot, [slot % 12], 12, reset=True, key=slot)
    engine.step()
    engine.force(16, [1, 2, 3], 10, reset=True, key=16)
    engine.step()
    assert int(engine.known[16]) == 3 and int(engine.known[0]) == 3
    finish(engine)
    assert int(engine.known[16]) == 10


def test_new_weights_enter_between_two_tokens_and_are_tagged() -> None:
    """Log-probs before and after are those of old and new weights, the latter on top of the old cache."""
    model, _ = build()
    old, other = copy.deepcopy(model), copy.deepcopy(model)
    other.reset_parameters(9)
    engine = mtp.Engine(model, 1, 40, stop=-1)
    engine.force(0, [1, 2], 20, reset=True, key=0)
    for _ in range(5):
        engine.step()
    engine.load(other.state_dict(), 3)
    finish(engine)
    ids, _, logprobs, versions, _ = engine.window(0)
    assert versions == [0] * 7 + [3] * 13
    with torch.no_grad():
        cache, logp = moe.Cache(C, 1, 40, dtype=torch.float64), {}
        for at, weights in [(t, old if t < 6 else other) for t in range(19)]:  # token 7, from the state of token 6
            hidden = weights(torch.tensor([ids[at:at + 1]]), weights.context(torch.tensor([[at]]), cache=cache))
            logp[at + 1] = weights.lm_head(hidden)[0, 0].log_softmax(-1)[ids[at + 1]].item()
    assert logprobs[2:] == pytest.approx([logp[t] for t in range(2, 20)], abs=1e-5)


def counting(model: moe.Transformer, counter: list[int]) -> moe.Transformer:
    model.embed_tokens.register_forward_hook(lambda _, args, out: counter.append(args[0].numel()))
    return model


def test_a_group_reads_its_prompt_once_and_gets_what_it_would_have_read() -> None:
    model, _ = build()
    ids, keys, counter = prompt(4) * 4, dict(enumerate(range(60, 68))), []
    apart = {i: run(mtp.Engine(model, 1, 40, stop=0), {0: ids}, 30, {0: key})[0] for i, key in keys.items()}
    engine = mtp.Engine(counting(model, counter), 8, 40, stop=0)
    for slot in range(8):
        engine.force(slot, ids, 30, reset=True, key=keys[slot])
    engine.step()
    assert counter == [20]  # one row of 20 tokens
    engine.step()
    assert counter[1:] == [8]  # seven times the last token, and the reader
    finish(engine)
    assert {slot: engine.window(slot)[0] for slot in range(8)} == apart
    with torch.no_grad():
        got = engine.window(5)
        ctx = model.context(torch.arange(len(got[0]))[None], record=True)
        model(torch.tensor([got[0]]), ctx)
    assert torch.equal(torch.stack(ctx.routes, 2)[0, :-1].to(torch.int16), got[4][:-1])


def test_part_of_a_prefix_is_shared_too() -> None:
    model, _ = build()
    counter: list[int] = []
    engine = mtp.Engine(counting(model, counter), 2, 40, stop=-1)
    run(engine, {0: [1, 2, 3, 4, 5, 6]}, 8, {0: 0})
    counter.clear()
    got = run(engine, {1: [1, 2, 3, 4, 9, 9, 9]}, 12, {1: 1})[1]
    assert counter[0] == 3  # only what differs is read
    assert got == run(mtp.Engine(model, 1, 40, stop=-1), {0: [1, 2, 3, 4, 9, 9, 9]}, 12, {0: 1})[0]


def test_no_prefix_survives_new_weights() -> None:
    model, _ = build()
    other = copy.deepcopy(model)
    other.reset_parameters(9)
    engine, ids = mtp.Engine(model, 2, 40, stop=-1), [1, 2, 3, 4, 5, 6]
    engine.force(0, ids, 30, reset=True, key=0)
    for _ in range(4):
        engine.step()
    engine.load(other.state_dict(), 1)
    for _ in range(4):
        engine.step()  # slot 0 goes on, on its old cache
    got = run(engine, {1: ids}, 20, {1: 1})[1]
    assert got == run(mtp.Engine(other, 1, 40, stop=-1), {0: ids}, 20, {0: 1})[0]
    assert engine.window(1)[3] == [1] * 20


def test_stops_and_limits() -> None:
    model, _ = build()
    engine = mtp.Engine(model, 2, 20, stop=-1)
    engine.force(0, [1], 8, reset=True)
    while engine.live.any():
        ended = engine.step()
    assert ended == [0] and int(engine.known[0]) == 8
    free = run(mtp.Engine(model, 1, 60, stop=-1), {0: [1]}, 60, {0: 3})[0]
    for stops in ({free[5]}, {free[5], free[9]}, {free[20]}):
        want = next(i for i, t in enumerate(free) if i and t in stops)
        assert run(mtp.Engine(model, 1, 60, stop=stops), {0: [1]}, 60, {0: 3})[0] == free[:want + 1]


def test_refusals() -> None:
    model, layers = build()
    engine = mtp.Engine(model, 2, 20, stop=-1)
    for ids, limit, match in (([], 5, "nothing"), ([1] * 30, 40, "do not fit"), ([12], 5, "vocabulary of 12"),
                              ([-1], 5, "vocabulary of 12"), ([1], 21, "do not fit"), ([1, 2], 2, "do not fit")):
        with pytest.raises(ValueError, match=match):
            engine.force(1, ids, limit, reset=True)
    for settings, match in ((dict(temperature=-1), "temperature = -1"), (dict(temperature=float("nan")), "temperature"),
                            (dict(top_p=0.0), "top_p = 0.0"), (dict(top_p=1.1), "top_p = 1.1"), (dict(top_k=-1), "top_k")):
        for make in (lambda **s: mtp.Engine(model, 1, 8, 0, **s), lambda **s: mtp.generate(model, [[1]], 5, **s),
                     lambda **s: mtp.speculative(model, layers, [[1]], 5, **s)):
            with pytest.raises(ValueError, match=match):
                make(**settings)
    for call, match in ((lambda: mtp.speculative(model, layers, [[1], []], 5), "empty prompt"),
                        (lambda: mtp.generate(model, [[1], []], 5), "empty prompt"),
                        (lambda: mtp.speculative(model, layers, [[12]], 5), "vocabulary"),
                        (lambda: mtp.speculative(model, layers, [[1]], 5, n_draft=2), "between 0 and the 1"),
                        (lambda: mtp.speculative(model, layers, [[1]], 0), "at least one token"),
                        (lambda: mtp.generate(model, [[1] * 300], 5), "exceed the context of 256"),
                        (lambda: mtp.Engine(model, 1, 257, 0), "exceed the context of 256"),
                        (lambda: mtp.MTP(C, 0), "at least one layer")):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(ValueError, match="kl, ce or tv"):
        mtp.distill_loss(model, layers, *[torch.zeros(1, 4, 16).double(), *data(1, 4)], kind="mse")
