"""mtp.py: which row learns what, what stays frozen, drafts that change nothing, an engine that keeps its rows apart."""

import copy

import pytest
import torch

import moe
import mtp

C = moe.Config(
    vocab_size=12,
    dim=16,
    n_layers=2,
    n_heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    ffn_dim=16,
    expert_dim=8,
    n_experts=4,
    n_experts_per_tok=2,
    rope_factor=1.0,
    rope_original_len=256,
    init_std=0.0,
)


def build(n_mtp: int = 1, dtype: torch.dtype = torch.float64) -> tuple[moe.Transformer, mtp.MTP]:
    model, layers = moe.Transformer(C), mtp.MTP(C, n_mtp)
    model.reset_parameters(0)
    moe.initialise(layers, C, 1)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)  # a peaked distribution
    return model.to(dtype).eval(), layers.to(dtype).eval()


def data(rows: int = 3, length: int = 14) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 12, (rows, length), generator=torch.Generator().manual_seed(0))
    return x, torch.zeros_like(x), torch.arange(length).expand_as(x)


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


def test_frozen_model_gets_no_gradient_and_joint_training_does() -> None:
    model, layers = build()
    x, doc, positions = data()
    mtp.distill_loss(model, layers, model(x), x, doc, positions, detach_trunk=True)[0].backward()
    assert all(p.grad is None for p in model.parameters()) and all(
        p.grad is not None for p in layers.parameters()
    )
    mtp.distill_loss(model, layers, model(x), x, doc, positions, detach_trunk=False)[0].backward()
    assert model.embed_tokens.weight.grad.abs().sum() > 0


def test_documents_end_the_look_ahead() -> None:
    """Packed rows give the loss of their documents taken one by one."""
    model, layers = build(2)
    a, b = data(1, 9)[0], data(1, 7)[0] + 0
    x = torch.cat((a, b), 1)
    doc = torch.tensor([[0] * 9 + [1] * 7])
    positions = torch.cat((torch.arange(9), torch.arange(7)))[None]

    def loss(tokens, doc, positions):
        hidden = model(tokens, model.context(positions, doc=doc))
        return mtp.distill_loss(model, layers, hidden, tokens, doc, positions, norm=1.0)[0]

    apart = sum(loss(t, torch.zeros_like(t), torch.arange(t.shape[1])[None]) for t in (a, b))
    assert loss(x, doc, positions).item() == pytest.approx(apart.item(), rel=1e-6)


def test_chunks_do_not_change_the_loss() -> None:
    model, layers = build()
    x, doc, positions = data()
    values = [
        mtp.distill_loss(model, layers, model(x), x, doc, positions, chunk=n)[0].item() for n in (1, 5, 4096)
    ]
    assert values == pytest.approx([values[0]] * 3)
    with pytest.raises(ValueError, match="kl, ce or tv"):
        mtp.distill_loss(model, layers, model(x), x, doc, positions, kind="mse")


def test_greedy_speculation_is_plain_decoding() -> None:
    model, layers = build()
    for seed in range(24):
        prompt = torch.randint(0, 12, (1 + seed % 5,), generator=torch.Generator().manual_seed(seed)).tolist()
        plain = mtp.generate(model, prompt, 20)
        fast, stats = mtp.speculative(model, layers, prompt, 20)
        assert fast == plain and stats["tokens_per_forward"] >= 1.0
        assert mtp.speculative(model, layers, prompt, 20, stop=plain[7])[0] == mtp.generate(
            model, prompt, 20, stop=plain[7]
        )


def test_a_perfect_draft_gives_two_tokens_per_forward() -> None:
    """A model with one answer for everything and a layer that shares it: every draft is kept."""
    model, layers = build()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        for norm in (model.norm, layers.layers[0].norm):
            norm.weight.zero_()
    out, stats = mtp.speculative(model, layers, [1, 2], 21)
    assert out == [0] * 21 and stats["acceptance"] == 1.0 and stats["tokens_per_forward"] > 1.9


P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)


def emitted(rule, n: int = 4000, q: torch.Tensor = Q, greedy: bool = False) -> torch.Tensor:
    g, counts = torch.Generator().manual_seed(0), torch.zeros(3)
    u = torch.rand(n, 3, generator=g, dtype=torch.float64)
    drafts = torch.full((n,), int(Q.argmax())) if greedy else mtp.draw(Q.expand(n, 3), u[:, 2])
    for i in range(n):
        counts[rule(q, drafts[i : i + 1], u[i, :1], float(u[i, 1]))] += 1
    return counts / n


def right(q, d, u, v) -> int:
    accepted, following = mtp.verify(torch.stack((P, P)), q[None], d, u, v)
    return int(d[0]) if accepted else following


def resample_from_p(q, d, u, v) -> int:
    return (
        int(d[0])
        if mtp.verify(torch.stack((P, P)), q[None], d, u, v)[0]
        else int(mtp.draw(P[None], torch.tensor([v])))
    )


def test_the_output_is_distributed_as_the_model_and_wrong_rules_are_not() -> None:
    far = lambda x: 0.5 * (x - P).abs().sum().item()
    assert far(emitted(right)) < 0.03
    assert (
        far(emitted(right, q=torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), greedy=True)) < 0.03
    )  # one-hot q for greedy drafts
    assert far(emitted(resample_from_p)) > 0.1
    assert far(emitted(right, greedy=True)) > 0.1  # greedy draft, softmax q
    assert far(emitted(lambda q, d, u, v: int(d[0]))) > 0.1  # accept everything


def test_sampled_speculation_follows_the_model() -> None:
    """First two tokens over many keys against the exact joint distribution."""
    model, layers = build()
    prompt, n = [3, 1, 4], 500
    counts = torch.zeros(12, 12)
    for key in range(n):
        a, b = mtp.speculative(model, layers, prompt, 2, temperature=1.0, key=key)[0]
        counts[a, b] += 1
    with torch.no_grad():
        first = model.lm_head(model(torch.tensor([prompt]))[0, -1]).softmax(-1)
        joint = torch.stack(
            [
                first[a] * model.lm_head(model(torch.tensor([[*prompt, a]]))[0, -1]).softmax(-1)
                for a in range(12)
            ]
        )

    def far(x: torch.Tensor) -> float:
        return 0.5 * (x / n - joint).abs().sum().item()

    noise = [
        far(
            torch.bincount(
                torch.multinomial(
                    joint.flatten(), n, replacement=True, generator=torch.Generator().manual_seed(s)
                ),
                minlength=144,
            ).view(12, 12)
        )
        for s in range(20)
    ]
    assert far(counts) < max(noise) + 0.02


# ---------------------------------------------------------------------------------------------------------------- engine


def run(
    engine: mtp.Engine, prompts: dict[int, list[int]], limit: int, keys: dict[int, int]
) -> dict[int, list[int]]:
    for slot, prompt in prompts.items():
        engine.force(slot, prompt, limit, reset=True, key=keys[slot])
    while engine.live.any():
        engine.step()
    return {slot: engine.window(slot)[0] for slot in prompts}


def test_a_row_does_not_depend_on_its_company() -> None:
    model, _ = build()
    prompts = {0: [1, 2, 3], 1: [4], 2: [5, 6, 7, 8, 9], 3: [2, 2]}
    keys = {i: 100 + i for i in prompts}
    together = run(mtp.Engine(model, 4, 40, stop=0), prompts, 30, keys)
    for slot, prompt in prompts.items():
        assert run(mtp.Engine(model, 1, 40, stop=0), {0: prompt}, 30, {0: keys[slot]})[0] == together[slot]
    assert run(mtp.Engine(model, 4, 40, stop=0), prompts, 30, {i: 7 for i in prompts}) != together


def test_forced_tokens_enter_as_if_they_had_been_there() -> None:
    """After a forced chunk the recorded log-probs are those of one pass over the whole window."""
    model, _ = build()
    engine = mtp.Engine(model, 3, 60, stop=0)
    engine.force(1, [1, 2, 3], 9, reset=True, key=5)
    while engine.live.any():
        engine.step()
    engine.force(1, [4, 5, 6, 7], 30)
    while engine.live.any():
        engine.step()
    ids, mask, logprobs, versions, routes = engine.window(1)
    assert len({len(ids), len(mask), len(logprobs), len(versions), len(routes)}) == 1
    with torch.no_grad():
        logp = model.lm_head(model(torch.tensor([ids]))[0]).log_softmax(-1)
    for i, m in enumerate(mask):
        if m:
            assert logprobs[i] == pytest.approx(logp[i - 1, ids[i]].item(), abs=1e-5)
    ctx = model.context(torch.arange(len(ids))[None], record=True)
    model(torch.tensor([ids]), ctx)
    assert (
        torch.equal(torch.stack(ctx.routes, 2)[0, :-1].to(torch.int16), routes[:-1])
        and (routes[-1] == -1).all()
    )


def test_new_weights_enter_between_two_tokens_and_are_tagged() -> None:
    model, _ = build()
    other = copy.deepcopy(model)
    other.reset_parameters(9)
    engine = mtp.Engine(model, 1, 40, stop=-1)
    engine.force(0, [1, 2], 20, reset=True, key=0)
    for _ in range(5):
        engine.step()
    engine.load(other.state_dict(), 3)
    while engine.live.any():
        engine.step()
    assert engine.window(0)[3] == [0] * 7 + [3] * 13


def test_limits_and_refusals() -> None:
    model, layers = build()
    engine = mtp.Engine(model, 2, 20, stop=-1)
    engine.force(0, [1], 8, reset=True)
    while engine.live.any():
        ended = engine.step()
    assert ended == [0] and int(engine.known[0]) == 8
    for ids, limit, match in (
        ([], 5, "nothing"),
        ([1] * 30, 40, "do not fit"),
        ([12], 5, "vocabulary"),
        ([1], 21, "do not fit"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.force(1, ids, limit, reset=True)
    with pytest.raises(ValueError, match="temperature = -1"):
        mtp.Engine(model, 1, 8, 0, temperature=-1)
    with pytest.raises(ValueError, match="empty prompt"):
        mtp.speculative(model, layers, [], 5)
    with pytest.raises(ValueError, match="at least one layer"):
        mtp.MTP(C, 0)


def test_uniforms_are_uniform_and_independent_of_order() -> None:
    u = mtp.uniforms(torch.arange(200)[:, None], torch.arange(200)[None])
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.003
    flat = u - 0.5
    assert abs((flat[:, 1:] * flat[:, :-1]).mean()) < 0.002 and abs((flat[1:] * flat[:-1]).mean()) < 0.002
    assert mtp.uniforms(torch.tensor([7]), torch.tensor([9])) == u[7, 9]
