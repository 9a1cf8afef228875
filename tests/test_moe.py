"""moe.py against a naive reference in float64, the worked values of the architecture, and its edges."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import moe

SMALL = moe.Config(
    vocab_size=50,
    dim=32,
    n_layers=3,
    n_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    ffn_dim=40,
    expert_dim=16,
    n_experts=6,
    n_experts_per_tok=2,
    rope_original_len=16,
    rope_factor=4.0,
    init_std=0.0,
)


def build(c: moe.Config = SMALL, seed: int = 0) -> moe.Transformer:
    model = moe.Transformer(c).double()
    model.reset_parameters(seed)
    return model.eval()


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * w


def naive(model: moe.Transformer, tokens: list[int]) -> torch.Tensor:
    """One token after the other, one head and one expert after the other; nothing shared with the module but weights."""
    c = model.config
    temperature = 0.1 * math.log(c.rope_factor) + 1
    scale = temperature**2 / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
    freq = model.inverse_frequencies.double()

    def turned(v: torch.Tensor, position: int) -> torch.Tensor:
        z = torch.view_as_complex(v.view(-1, 2).contiguous()) * torch.polar(
            torch.ones_like(freq), freq * position
        )
        return torch.view_as_real(z).flatten()

    def swiglu(m, x: torch.Tensor) -> torch.Tensor:
        g = m.gate_proj.weight @ x
        return m.down_proj.weight @ (g * torch.sigmoid(g) * (m.up_proj.weight @ x))

    xs = [model.embed_tokens.weight[t] for t in tokens]
    for layer in model.layers:
        a, past = layer.self_attn, []
        for i, x in enumerate(xs):
            h = norm(x, layer.input_layernorm.weight, c.norm_eps)
            kv = a.kv_a_proj_with_mqa.weight @ h
            latent, k_rope = (
                norm(kv[: c.kv_lora_rank], a.kv_a_layernorm.weight, c.latent_norm_eps),
                turned(kv[c.kv_lora_rank :], i),
            )
            past.append(((a.kv_b_proj.weight @ latent).view(c.n_heads, -1), k_rope))
            q = (
                a.q_b_proj.weight @ norm(a.q_a_proj.weight @ h, a.q_a_layernorm.weight, c.latent_norm_eps)
            ).view(c.n_heads, -1)
            out = []
            for head in range(c.n_heads):
                q_rope = turned(q[head, c.qk_nope_head_dim :], i)
                s = (
                    torch.stack(
                        [
                            q[head, : c.qk_nope_head_dim] @ k[head, : c.qk_nope_head_dim] + q_rope @ r
                            for k, r in past
                        ]
                    )
                    * scale
                )
                p = (s - s.max()).exp() / (s - s.max()).exp().sum()
                out.append(sum(w * k[head, c.qk_nope_head_dim :] for w, (k, _) in zip(p, past)))
            xs[i] = x + a.o_proj.weight @ torch.cat(out)
        for i, x in enumerate(xs):
            h = norm(x, layer.post_attention_layernorm.weight, c.norm_eps)
            if isinstance(layer.mlp, moe.MLP):
                xs[i] = x + swiglu(layer.mlp, h)
                continue
            m = layer.mlp
            scores = torch.sigmoid((m.gate.weight.float() @ h.float())).double()
            chosen = sorted(
                range(c.n_experts), key=lambda e: -(scores[e] + m.gate.e_score_correction_bias[e]).item()
            )[: c.n_experts_per_tok]
            total = sum(scores[e] for e in chosen)
            y = swiglu(m.shared_experts, h)
            for e in chosen:
                g, u = (m.w_gate_up[e] @ h).chunk(2)
                y = y + scores[e] / total * c.route_scale * (m.w_down[e] @ (g * torch.sigmoid(g) * u))
            xs[i] = x + y
    return torch.stack([norm(x, model.norm.weight, c.norm_eps) for x in xs])


def test_forward_equals_the_naive_reference() -> None:
    model = build()
    with torch.no_grad():
        for layer in model.layers[1:]:  # a bias that changes the choice and not the gates
            layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        tokens = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9, 3, 23, 8, 46, 2, 6, 43, 3]
        assert (
            model(torch.tensor([tokens]))[0] - naive(model, tokens)
        ).abs().max() < 1e-5  # the router runs in fp32


@pytest.mark.parametrize("chunk", (1, 3, 20))
def test_absorbed_attention_through_the_cache_equals_plain(chunk: int) -> None:
    model, tokens = build(), torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(0))
    cache, out = moe.Cache(SMALL, 3, 24, dtype=torch.float64), []
    with torch.no_grad():
        for at in range(0, 20, chunk):
            positions = torch.arange(at, min(at + chunk, 20)).expand(3, -1)
            out.append(model(tokens[:, at : at + chunk], model.context(positions, cache=cache)))
        assert (torch.cat(out, 1) - model(tokens)).abs().max() < 1e-6
        rows = torch.tensor([2, 0])  # some rows only, at their own positions
        part = model(tokens[rows, 5:6], model.context(torch.full((2, 1), 5), cache=cache, rows=rows))
        assert (part[:, 0] - model(tokens)[rows, 5]).abs().max() < 1e-6
    with pytest.raises(ValueError, match="24 tokens"):
        model(tokens[:, :1], model.context(torch.full((3, 1), 24), cache=cache))


def test_documents_do_not_see_each_other() -> None:
    model = build()
    a, b = torch.randint(0, 50, (1, 7)), torch.randint(0, 50, (1, 9))
    positions = torch.cat((torch.arange(7), torch.arange(9)))[None]
    doc = torch.tensor([[0] * 7 + [1] * 9])
    with torch.no_grad():
        packed = model(torch.cat((a, b), 1), model.context(positions, doc=doc))
        assert (packed[:, :7] - model(a)).abs().max() < 1e-6 and (packed[:, 7:] - model(b)).abs().max() < 1e-6


def test_full_size_is_kimi() -> None:
    n = moe.count(moe.Config())
    assert n["total"] == 1_026_408_209_408 and n["experts"] == 1_014_686_023_680
    assert abs(n["active"] - 32.862e9) < 1e6
    linear, attention = moe.flops_per_token(moe.Config(), 32_768)
    assert linear / 1e9 == pytest.approx(190, abs=1) and attention / 1e9 == pytest.approx(123, abs=1)


def test_yarn_values() -> None:
    f = moe.yarn_inverse_frequencies(moe.Config())
    for i, value in {
        0: 1.0,
        8: 0.0668740,
        10: 0.0284280,
        15: 0.00267020,
        20: 1.80702e-5,
        31: 4.38221e-7,
    }.items():
        assert f[i].item() == pytest.approx(value, rel=1e-5)
    assert moe.softmax_scale(moe.Config()) == pytest.approx(0.1446796, abs=1e-7)


def test_plausibility_filter_worked_example() -> None:
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.65, 0.3, 0.05]])
    own, replay = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 4, 5]])
    for rho, expect in ((0.0, [0, 1, 4, 5]), (0.4, [0, 1, 4, 2]), (0.5, [0, 1, 2, 3]), (1e9, [0, 1, 2, 3])):
        assert moe.replayed_ids(scores, own, replay, rho)[0].tolist() == expect
    none = torch.full((1, 4), -1)
    assert moe.replayed_ids(scores, own, none, 0.0).tolist() == own.tolist()


def routes_of(model: moe.Transformer, tokens: torch.Tensor) -> torch.Tensor:
    ctx = model.context(torch.arange(tokens.shape[1]).expand_as(tokens), record=True)
    model(tokens, ctx)
    return torch.stack(ctx.routes, 2)


def test_replay_of_own_routes_changes_nothing_and_other_routes_keep_gradients() -> None:
    model, tokens = build(), torch.randint(0, 50, (2, 9))
    routes = routes_of(model, tokens)
    positions = torch.arange(9).expand(2, 9)
    same = model(tokens, model.context(positions, replay=routes))
    assert (same - model(tokens)).abs().max() < 1e-6
    other = (routes + 1) % 6
    out = model(tokens, model.context(positions, replay=other))
    assert (out - model(tokens)).abs().max() > 1e-3
    out.sum().backward()
    assert model.layers[1].mlp.gate.weight.grad.abs().sum() > 0


def test_balance_moves_the_bias_by_the_sign_of_the_load_and_counts_no_padding() -> None:
    c = moe.Config(**{**SMALL.__dict__, "n_experts": 4, "n_experts_per_tok": 1})
    m = moe.MoE(c)
    m.gate.load.copy_(torch.tensor([4.0, 0, 2, 2]))
    m.balance(1e-3)
    assert (
        torch.allclose(m.gate.e_score_correction_bias, torch.tensor([-1e-3, 1e-3, 0, 0]))
        and not m.gate.load.any()
    )
    m._count(torch.tensor([[0], [1], [3], [3]]), torch.tensor([[True, True, False, False]]))
    assert m.gate.load.tolist() == [1, 1, 0, 0]


def test_positional_heads_look_back_at_initialisation() -> None:
    """At the start head h of layer 0 looks most at the token h + 1 places back."""
    c = moe.Config(
        **{
            **SMALL.__dict__,
            "dim": 64,
            "n_heads": 4,
            "qk_rope_head_dim": 16,
            "rope_theta": 1e4,
            "positional_heads": 3,
            "rope_original_len": 256,
        }
    )
    model = build(c)
    a = model.layers[0].self_attn
    tokens = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        x = model.layers[0].input_layernorm(model.embed_tokens(tokens))
        ctx = model.context(torch.arange(40)[None])
        q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x))).unflatten(-1, (4, -1))[..., c.qk_nope_head_dim :]
        k = moe.rotate(a.kv_a_proj_with_mqa(x)[..., c.kv_lora_rank :], ctx.cos, ctx.sin)
        p = (
            torch.einsum("bthr,bsr->bhts", moe.rotate(q, ctx.cos.unsqueeze(2), ctx.sin.unsqueeze(2)), k)
            * a.scale
        )
        p = p.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1)
    for h in range(3):
        i = torch.arange(h + 1, 40)
        assert (p[0, h, i].argmax(-1) == i - h - 1).float().mean() > 0.9 and p[
            0, h, i, i - h - 1
        ].mean() > 0.5


def test_edges() -> None:
    model = build()
    assert model(torch.tensor([[7]])).shape == (1, 1, 32)
    assert model(torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0, 32)
    with pytest.raises(ValueError, match="65 tokens exceed the rotary range of 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    everything = build(moe.Config(**{**SMALL.__dict__, "n_experts_per_tok": 6}))
    assert torch.isfinite(everything(torch.arange(10)[None])).all()
    for bad in (
        dict(n_experts_per_tok=7),
        dict(qk_rope_head_dim=7),
        dict(precision="fp4"),
        dict(n_dense_layers=9),
        dict(positional_heads=3),
    ):
        with pytest.raises(ValueError):
            moe.Config(**{**SMALL.__dict__, **bad})


def test_a_nan_row_stays_alone() -> None:
    model = build()
    m = model.layers[1].mlp
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    ctx = model.context(torch.arange(5)[None])
    with torch.no_grad():
        clean = m(x, ctx, 0)
        x[0, 2] = math.nan
        dirty = m(x, ctx, 0)
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.isnan(dirty[0, 2]).all() and torch.allclose(dirty[0, keep], clean[0, keep])


# ------------------------------------------------------------------------------------------ experts and rows on ranks


class Case(NamedTuple):
    """One comparison of ranks with one process: sizes of the groups, rows of tokens, where they are routed."""

    ep: int
    cp: int
    rows: int = 4
    length: int = 24
    starve: bool = False  # all tokens to two experts: most ranks compute nothing
    docs: bool = False  # several documents a row
    recompute: bool = False
    dispatch: str = "native"


CASES = {
    2: [Case(2, 1), Case(2, 1, starve=True), Case(2, 2, docs=True), Case(1, 2), Case(2, 1, rows=1),
        Case(2, 2, recompute=True, docs=True), Case(2, 1, dispatch="mxfp8")],
    4: [Case(2, 2), Case(4, 1, rows=3), Case(4, 4, docs=True), Case(4, 2, starve=True, recompute=True)],
}


def loss_of(model: moe.Transformer, share: dict[str, torch.Tensor]) -> torch.Tensor:
    ctx = model.context(share["positions"], doc=share["doc"], real=share["real"])
    logits = model.lm_head(model(share["tokens"], ctx))
    return F.cross_entropy(logits.flatten(0, 1), share["labels"].flatten(), ignore_index=-1, reduction="sum")


def rows_of(case: Case) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(case.rows)
    tokens = torch.randint(0, 64, (case.rows, case.length), generator=g)
    cut = 5 if case.docs else case.length
    column = torch.arange(case.length).expand_as(tokens)
    labels = tokens.roll(-1, 1).masked_fill((column + 1) % cut == 0, -1)
    labels[:, -1] = -1
    return dict(tokens=tokens, doc=column // cut, positions=column % cut, labels=labels, real=column < case.length - 1)


def share_of(batch: dict[str, torch.Tensor], ranks: int, rank: int, cp: int) -> dict[str, torch.Tensor]:
    """Rows dealt over dp = ranks / cp (a rank beyond them gets one of padding), tokens by zigzag over cp."""
    dp, index = ranks // cp, moe.zigzag(batch["tokens"].shape[1], cp, rank % cp)
    out = {k: v[rank // cp :: dp][:, index] for k, v in batch.items()}
    if not len(out["tokens"]):
        fill = dict(tokens=0, doc=-1, positions=0, labels=-1, real=False)
        out = {k: torch.full((1, len(index)), fill[k], dtype=v.dtype) for k, v in batch.items()}
    return out


def compare(case: Case, rank: int, ranks: int) -> None:
    wide = dict(dim=32, expert_dim=32, n_experts=8, n_layers=3, vocab_size=64, dispatch=case.dispatch)
    c = replace(SMALL, **wide)
    dense = init_device_mesh("cpu", (ranks // case.cp, case.cp), mesh_dim_names=("dp", "cp"))
    sparse = init_device_mesh("cpu", (ranks // case.ep, case.ep), mesh_dim_names=("efsdp", "ep"))
    one, many = build(c).train(), build(c).train()
    if case.starve:
        for model in (one, many):
            for layer in model.layers[c.n_dense_layers :]:
                layer.mlp.gate.e_score_correction_bias[:2] += 9.0
    batch = rows_of(case)
    value = loss_of(one, batch)
    value.backward()
    moe.shard_experts(many, sparse["ep"])
    moe.parallelise(many, moe.Parallel(dist.group.WORLD, sparse.get_group("ep"), dense.get_group("cp")
                                       if case.cp > 1 else None))
    many.recompute = case.recompute
    part = loss_of(many, share_of(batch, ranks, rank, case.cp))
    part.backward()
    part = part.detach()
    dist.all_reduce(part)

    def close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
        if case.dispatch == "native":  # float64 but for the router, which is float32 in every model
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=lambda text: f"{case} {name}: {text}")
        else:  # many round to bf16 on the way home, one does not
            assert (got - want).norm() <= 0.02 * want.norm(), f"{case} {name}"

    close(part, value.detach(), "loss")
    for (name, p), q in zip(one.named_parameters(), many.parameters()):
        if hasattr(q, "to_local"):  # this rank's experts have seen the tokens of its ep group: sum over efsdp
            grad = q.grad.to_local()
            dist.all_reduce(grad, group=sparse.get_group("efsdp"))
            want = p.grad.chunk(case.ep)[sparse.get_local_rank("ep")]
        else:
            grad, want = q.grad, p.grad
            dist.all_reduce(grad)
        close(grad, want, name)
    one.balance(0.1)
    many.balance(0.1)
    for a, b in zip(one.buffers(), many.buffers()):
        torch.testing.assert_close(a, b)


def on_ranks(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=60))
    for case in CASES[ranks]:
        compare(case, rank, ranks)
    # what a row's tokens see n positions later, across ranks and chunks
    x, group = torch.arange(16).view(1, 16) + torch.zeros(2, 1, dtype=torch.long), dist.group.WORLD
    index = moe.zigzag(16, ranks, rank) if 16 % (2 * ranks) == 0 else None
    assert torch.equal(moe.ahead(x[:, index], 3, moe.Parallel(cp=group)), x.roll(-3, 1)[:, index])
    rows = moe.all_to_all(torch.zeros(0, 3), [0] * ranks, [0] * ranks, group)
    assert rows.shape == (0, 3)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_loss_gradients_and_balance_of_one_process(ranks: int, tmp_path) -> None:
    """Every comparison of one number of ranks in one launch: starting the processes costs more than the work."""
    torch.multiprocessing.spawn(on_ranks, (ranks, str(tmp_path)), ranks)


def test_zigzag_is_a_permutation_and_equalises_the_work() -> None:
    for cp in (1, 2, 4):
        parts = [moe.zigzag(48, cp, r) for r in range(cp)]
        assert torch.cat(parts).sort().values.equal(torch.arange(48))
        pairs = [int((p + 1).sum()) for p in parts]  # a query at position p may look at p + 1 keys
        assert len(set(pairs)) == 1 and pairs == moe.causal_pairs(48, cp)
    with pytest.raises(ValueError, match="multiple of 8"):
        moe.zigzag(50, 4, 0)
