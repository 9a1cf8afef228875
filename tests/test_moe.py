"""moe.py against a naive reference in float64, the worked values of the architecture, and its edges."""

import importlib.util
import json
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
import mtp

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


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def build(c: moe.Config = SMALL, seed: int = 0) -> moe.Transformer:
    model = moe.Transformer(c).double()
    model.reset_parameters(seed)
    return model.eval()


def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * w


def naive(model: moe.Transformer, tokens: list[int]) -> torch.Tensor:
    """One token, one head and one expert after the other; nothing shared with the module but weights."""
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


# ------------------------------------------------------------------------------- parity with transformers


def theirs(c: moe.Config, experts: str = "eager"):
    """transformers' DeepseekV3 of the same configuration, with weights and correction biases of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers,
        moe_intermediate_size=c.expert_dim, num_attention_heads=c.n_heads, num_key_value_heads=c.n_heads,
        n_shared_experts=c.n_shared_experts, n_routed_experts=c.n_experts, n_group=1, topk_group=1,
        num_experts_per_tok=c.n_experts_per_tok, first_k_dense_replace=c.n_dense_layers,
        q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank, qk_rope_head_dim=c.qk_rope_head_dim,
        qk_nope_head_dim=c.qk_nope_head_dim, v_head_dim=c.v_head_dim, max_position_embeddings=c.max_len,
        rms_norm_eps=c.norm_eps, routed_scaling_factor=c.route_scale, num_mtp_layers=0, bos_token_id=None,
        eos_token_id=None, initializer_range=0.2, experts_implementation=experts,
        rope_parameters=dict(rope_type="yarn", rope_theta=c.rope_theta, factor=c.rope_factor, mscale=1.0,
                             mscale_all_dim=1.0, original_max_position_embeddings=c.rope_original_len,
                             beta_fast=c.rope_beta_fast, beta_slow=c.rope_beta_slow))).float()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, c.n_experts))
    return model


def their_name(name: str) -> str:
    name = name.replace("mlp.w_gate_up", "mlp.experts.gate_up_proj")
    name = name.replace("mlp.w_down", "mlp.experts.down_proj")
    return name if name.startswith("lm_head") else "model." + name


@pytest.mark.parametrize("experts", ("eager", "grouped_mm"))
def test_logits_and_gradients_equal_transformers(experts: str) -> None:
    other, ours = theirs(SMALL, experts), moe.Transformer(SMALL)
    state = other.state_dict()
    ours.load_state_dict({name: state[their_name(name)] for name in ours.state_dict()})
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    a, b = other(tokens).logits, ours.lm_head(ours(tokens))
    assert (a - b).abs().max() < 2e-6 * a.abs().max()
    for logits in (a, b):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, p in ours.named_parameters():
        want = gradients[their_name(name)]
        assert want.abs().sum() > 0 and (p.grad - want).norm() < 1e-5 * want.norm(), name


def test_checkpoints_of_transformers_are_read_and_ours_are_read_by_it(tmp_path) -> None:
    other, tokens = theirs(SMALL), torch.arange(40).view(2, 20)
    other.save_pretrained(tmp_path / "whole")
    other.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    for folder in ("whole", "shards"):
        ours = moe.Transformer(SMALL)
        moe.load(ours, tmp_path / folder)
        assert (ours.lm_head(ours(tokens)) - other(tokens).logits).abs().max() < 1e-5
    ours.reset_parameters(3)
    moe.save(tmp_path / "ours", dict(moe.public_views(ours)), 30_000)
    (tmp_path / "ours" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    back = type(other).from_pretrained(tmp_path / "ours")
    assert (ours.lm_head(ours(tokens)) - back(tokens).logits).abs().max() < 1e-5
    safetensors = pytest.importorskip("safetensors.torch")
    for file in (tmp_path / "ours").glob("*.safetensors"):
        mine, official = moe.read_safetensors(file), safetensors.load_file(file)
        assert mine.keys() == official.keys()
        assert all(torch.equal(mine[name].tensor(), official[name]) for name in official)


# --------------------------------------------------------------------------------------------- checkpoints


def equal_states(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    b = b.state_dict()
    return all(torch.equal(t, b[name]) for name, t in a.state_dict().items())


def test_a_sharded_checkpoint_round_trips_bit_for_bit(tmp_path) -> None:
    model = moe.Transformer(SMALL).bfloat16()
    model.reset_parameters(1)
    model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    views = dict(moe.public_views(model))
    moe.save(tmp_path, views, 10_000)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors"
    other = moe.Transformer(SMALL).bfloat16()
    moe.load(other, tmp_path)
    assert equal_states(model, other)
    wide = moe.Transformer(SMALL)  # bf16 in the file, float32 in the model: exact
    moe.load(wide, tmp_path)
    assert torch.equal(wide.lm_head.weight, model.lm_head.weight.float())
    checkpoint = moe.Checkpoint(tmp_path)
    assert set(checkpoint) == set(views) and len(checkpoint) == len(views)
    w = model.layers[2].mlp.w_gate_up[4]
    assert torch.equal(checkpoint["model.layers.2.mlp.experts.4.up_proj.weight"], w[16:])
    assert torch.equal(checkpoint["model.layers.2.mlp.experts.4.gate_proj.weight"], w[:16])
    with pytest.raises(ValueError, match="already"):
        moe.save(tmp_path, views)


def pack_int4(w: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As compressed-tensors does, number by number: words, bf16 scales, and w as it must come back."""
    rows, columns = w.shape
    scale = (w.view(rows, -1, group).abs().amax(-1) / 7.5).bfloat16()
    words, back = torch.zeros(rows, -(-columns // 8), dtype=torch.int64), torch.zeros_like(w)
    for i in range(rows):
        for j in range(columns):
            s = float(scale[i, j // group])
            q = max(-8, min(7, round(float(w[i, j]) / s)))
            words[i, j // 8] |= (q + 8) << 4 * (j % 8)
            back[i, j] = q * s
    return words.to(torch.uint32).view(torch.int32), scale, back.bfloat16().float()


def test_int4_worked_example() -> None:
    word = torch.tensor([[0xFEA98710 - 2**32]], dtype=torch.int32)
    out = moe.unpack_int4(word, torch.tensor([[0.5]]), torch.tensor([1, 8]))
    assert out.tolist() == [[-4, -3.5, -0.5, 0, 0.5, 1, 3, 3.5]]
    with pytest.raises(ValueError, match="1 x 9"):
        moe.unpack_int4(word, torch.tensor([[0.5]]), torch.tensor([1, 9]))


def test_kimi_k25_layout_with_int4_experts_and_a_vision_tower(tmp_path) -> None:
    model = moe.Transformer(SMALL)
    model.reset_parameters(2)
    stored = {"vision_tower.patch.weight": torch.ones(3), "mm_projector.weight": torch.ones(2)}
    for name, t in moe.public_views(model):
        name = "language_model." + name
        if ".experts." not in name:
            stored[name] = t.clone() if name.endswith("bias") else t.bfloat16()
            t.copy_(stored[name])  # what the file can hold
            continue
        packed, scale, back = pack_int4(t, 8)
        shape = torch.tensor(t.shape, dtype=torch.int32)
        stored |= {name + "_packed": packed, name + "_scale": scale, name + "_shape": shape}
        t.copy_(back)
    moe.save(tmp_path, stored, 15_000)
    other = moe.Transformer(SMALL)
    moe.load(other, tmp_path)
    assert equal_states(model, other)
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    assert moe.Checkpoint(tmp_path).spec(name) == ((32, 16), torch.bfloat16)


def test_fp8_blocks_are_scaled_one_by_one(tmp_path) -> None:
    codes = torch.randn(150, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    moe.save(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scale})
    checkpoint = moe.Checkpoint(tmp_path)
    w = checkpoint["x.weight"]
    assert list(checkpoint) == ["x.weight"] and checkpoint.spec("x.weight") == ((150, 200), torch.bfloat16)
    for i, j in ((0, 0), (127, 128), (128, 127), (149, 199)):
        assert w[i, j] == (codes[i, j].float() * scale[i // 128, j // 128]).bfloat16()
    with pytest.raises(ValueError, match=r"not \[2, 2\]"):
        moe.unpack_fp8(codes, scale[:1])


def test_a_rank_reads_only_its_experts(tmp_path) -> None:
    model = moe.Transformer(SMALL)
    model.reset_parameters(4)
    moe.save(tmp_path, dict(moe.public_views(model)))
    asked = []

    class Watched(moe.Checkpoint):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return super().__getitem__(name)

    rank = moe.Transformer(SMALL)
    for layer in rank.layers[1:]:
        for name in ("w_gate_up", "w_down"):
            setattr(layer.mlp, name, torch.nn.Parameter(getattr(layer.mlp, name)[:2].clone()))
    moe.load(rank, Watched(tmp_path), range(2, 4))
    assert torch.equal(rank.layers[2].mlp.w_down, model.layers[2].mlp.w_down[2:4])
    assert torch.equal(rank.lm_head.weight, model.lm_head.weight)
    assert {n.split(".experts.")[1].split(".")[0] for n in asked if ".experts." in n} == {"2", "3"}
    with pytest.raises(ValueError, match="holds 2 experts, not the 6"):
        moe.load(rank, tmp_path)


def test_what_does_not_fit_is_one_error_and_changes_nothing(tmp_path) -> None:
    model = moe.Transformer(SMALL)
    model.reset_parameters(5)
    good, untouched = dict(moe.public_views(model)), moe.Transformer(SMALL)
    untouched.reset_parameters(6)

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        moe.save(folder, tensors)
        other = moe.Transformer(SMALL)
        other.load_state_dict(untouched.state_dict())
        with pytest.raises(ValueError, match=message):
            moe.load(other, folder)
        assert equal_states(other, untouched)

    head, norm = "lm_head.weight", "model.norm.weight"
    part = {k: v for k, v in good.items() if ".2.self_attn" not in k}
    refused(part, r"not in the checkpoint: 7 tensors: .*, …")
    refused({k: v for k, v in good.items() if k != norm} | {"model.nrom.weight": good[norm]},
            "model.norm.weight; not in the model: 1 tensors: model.nrom.weight")
    refused(good | {head: good[head][:, :-1]}, r"lm_head.weight is \[50, 31\] .* and \[50, 32\] in the model")
    refused(good | {norm: good[norm].double()}, "float64 in the checkpoint and torch.float32")
    refused(good | {norm: good[norm].int()}, "int32 in the checkpoint")
    refused({k: v[..., :1] for k, v in good.items()}, r"; and \d+ more")
    refused(good | {"model.layers.1.mlp.experts.6.down_proj.weight": good[head]}, "experts.6.down_proj")
    layer = {k.replace("layers.2", "layers.3"): v for k, v in good.items() if "layers.2" in k}
    refused(good | layer, "not in the model: 32 tensors")  # one layer too many is not an MTP layer …
    moe.save(tmp_path / "mtp", good | layer | {"model.layers.3.eh_proj.weight": torch.ones(2)})
    moe.load(untouched, tmp_path / "mtp")  # … unless it says so
    assert equal_states(untouched, model)


def header(entries: dict, data: bytes = b"\0" * 8, pad: int = 0) -> bytes:
    text = json.dumps(entries).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2,), at: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


DAMAGED = {
    "empty": b"", "a length only": (20).to_bytes(8, "little"), "length beyond the file": b"\xff" * 40,
    "no JSON": header({"a": entry()}).replace(b"{", b"[", 1), "a list": (2).to_bytes(8, "little") + b"[]",
    "cut off": header({"a": entry()})[:-1], "too long": header({"a": entry()}) + b"\0",
    "unknown type": header({"a": entry("F7")}), "no shape": header({"a": {"dtype": "F32"}}),
    "not UTF-8": header({"a": entry()}).replace(b"a", b"\xff", 1),
    "size of another shape": header({"a": entry(shape=(3,))}),
    "negative shape": header({"a": entry(shape=(-1, -2))}),
    "overlap": header({"a": entry(), "b": entry(at=(4, 12))}, b"\0" * 12),
    "gap": header({"a": entry(at=(4, 12))}, b"\0" * 12), "backwards": header({"a": entry(at=(8, 0))}),
    "text for offsets": header({"a": entry(at="xy")}), "three offsets": header({"a": entry(at=(0, 8, 8))}),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_refused(what: str, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[what])
    with pytest.raises(ValueError, match="model.safetensors: "):
        moe.read_safetensors(path)


def test_any_cut_is_noticed_and_unaligned_files_are_read(tmp_path) -> None:
    path, value = tmp_path / "x.safetensors", torch.randn(3, 5)
    whole = {"b": torch.tensor([1, 2, 3], dtype=torch.uint8), "a": value, "none": torch.zeros(0, 4)}
    moe.write_safetensors(path, whole)
    raw = path.read_bytes()
    for n in range(0, len(raw), 7):
        path.write_bytes(raw[:n])
        with pytest.raises(ValueError):
            moe.read_safetensors(path)
    data = bytes([7]) + value.numpy().tobytes()
    path.write_bytes(header({"b": entry("U8", (1,), (0, 1)), "a": entry(shape=(3, 5), at=(1, 61))}, data))
    assert torch.equal(moe.read_safetensors(path)["a"].tensor(), value)
    path.write_bytes(header({"__metadata__": {"format": "pt"}, "s": entry("I64", [], (0, 8))}))
    assert moe.read_safetensors(path)["s"].tensor().shape == ()


def test_a_damaged_index_is_refused(tmp_path) -> None:
    folder, first = tmp_path / "checkpoint", "model-00001-of-00002.safetensors"
    moe.save(folder, {"a": torch.ones(2), "b": torch.ones(3)}, 8)
    moe.write_safetensors(tmp_path / "outside.safetensors", {"a": torch.ones(2)})
    index = folder / "model.safetensors.index.json"
    for where, message in (
        (3, "damaged"), ({"a": "gone.safetensors"}, "1 files of the index are not there: gone"),
        ({"a": "../outside.safetensors"}, "not there: outside"), ({"c": first}, "disagree about 2 tensors: a, c"),
    ):
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(ValueError, match=message):
            moe.Checkpoint(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        moe.Checkpoint(folder)
    index.unlink()
    (folder / "again.safetensors").write_bytes((folder / first).read_bytes())
    with pytest.raises(ValueError, match="repeats 1 tensors: a"):
        moe.Checkpoint(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no \\*.safetensors"):
        moe.Checkpoint(tmp_path / "empty")


# ------------------------------------------------------------------------------------------- router replay


def test_replay_closes_the_gap_that_bf16_opens_and_has_both_limits() -> None:
    gaps = moe.replay_gaps()
    assert gaps["none"][1] > 5 * gaps["replay"][1] and gaps["none"][0] > gaps["replay"][0]
    gaps = moe.replay_gaps(damaged=0.02, plausibility=0.0)
    assert gaps["filter"] == gaps["replay"]
    gaps = moe.replay_gaps(damaged=0.02, plausibility=1e9)
    assert gaps["filter"] == gaps["none"] != gaps["replay"]


def test_gates_of_replayed_experts_are_live() -> None:
    c = replace(SMALL, dim=4, n_experts=4)
    m, scores = moe.MoE(c), torch.tensor([[0.9, 0.8, 0.5, 0.4]])
    m.gate.weight.data.copy_(torch.eye(4))
    x = torch.logit(scores).requires_grad_()
    ctx = moe.Context(x, x, torch.zeros(1, 1), None, replay=torch.tensor([[[[0, 3]]]]))
    ids, w = m.route(x, ctx, 0)
    assert ids.tolist() == [[0, 3]]
    assert torch.allclose(w / c.route_scale, torch.tensor([[0.6923077, 0.3076923]]))
    (dx,) = torch.autograd.grad(w[0, 0] / c.route_scale, x)
    d_scores = dx / (scores * (1 - scores))
    assert torch.allclose(d_scores, torch.tensor([[0.2366863, 0, 0, -0.5325444]]), atol=1e-6)


def test_routes_of_another_model_are_refused() -> None:
    model, positions = build(), torch.arange(5)[None]
    with pytest.raises(ValueError, match=r"\(1, 5, 3, 2\), not \(1, 5, 2, 2\)"):  # counts the dense layer
        model.context(positions, replay=torch.zeros(1, 5, 3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(1, 4, 2, 2\), not \(1, 5, 2, 2\)"):
        model.context(positions, replay=torch.zeros(1, 4, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="expert 6, and there are 6"):
        model.context(positions, replay=torch.full((1, 5, 2, 2), 6))


# ------------------------------------------------------------------------------------------ experts' edges


def layer(**changes: object) -> moe.MoE:
    m = moe.MoE(replace(SMALL, **changes)).double()
    moe.initialise(m, m.c, 0)
    return m


def context(x: torch.Tensor, **how: object) -> moe.Context:
    return moe.Context(x, x, torch.zeros(x.shape[:2]), None, routes=[], **how)


def plain_layer(m: moe.MoE, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    out = []
    for t in x.flatten(0, 1):
        scores = torch.sigmoid(m.gate.weight.float() @ t.float())
        choice = (scores + m.gate.e_score_correction_bias).tolist()
        ids = sorted(range(m.c.n_experts), key=lambda e: (-choice[e], e))[: m.c.n_experts_per_tok]
        y = m.shared_experts(t)
        for e in ids:
            g, u = (m.w_gate_up[e] @ t).chunk(2)
            gate = scores[e] / scores[ids].sum() * m.c.route_scale
            y = y + gate * (m.w_down[e] @ (g * torch.sigmoid(g) * u))
        out.append(y)
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("k", (1, 2, 6))
@pytest.mark.parametrize("shape", ((1, 1), (2, 7)))
def test_experts_equal_a_loop_forward_and_backward(k: int, shape: tuple[int, int]) -> None:
    m = layer(n_experts_per_tok=k)
    m.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 6))
    x = torch.randn(*shape, 32, dtype=torch.float64, requires_grad=True)
    a, b = m(x, context(x), 0), plain_layer(m, x)
    assert (a - b).abs().max() < 1e-6
    leaves = [x, *m.parameters()]
    for da, db in zip(torch.autograd.grad(a.sin().sum(), leaves), torch.autograd.grad(b.sin().sum(), leaves)):
        assert (da - db).norm() <= 1e-5 * db.norm() + 1e-5  # gates are fp32; at k = 1 they are constant


def test_no_token_at_all() -> None:
    m = layer()
    x = torch.zeros(2, 0, 32, dtype=torch.float64, requires_grad=True)
    y = m(x, context(x), 0)
    y.sum().backward()
    assert y.shape == (2, 0, 32) and all(not p.grad.any() for p in m.parameters())
    model = build()
    empty = torch.zeros(2, 0, dtype=torch.long)
    cache = moe.Cache(SMALL, 2, 4, dtype=torch.float64)
    assert model(empty, model.context(empty, cache=cache)).shape == (2, 0, 32)


def test_all_tokens_on_one_expert_and_none_on_the_others() -> None:
    m = layer(n_experts_per_tok=1)
    m.gate.e_score_correction_bias[3] = 10
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    ctx = context(x)
    y = m.train()(x, ctx, 0)
    assert (y - plain_layer(m, x)).abs().max() < 1e-6
    assert ctx.routes[0].unique().tolist() == [3] and m.gate.load.tolist() == [0, 0, 0, 18, 0, 0]
    y.sum().backward()
    for w in (m.w_gate_up, m.w_down):
        assert [bool(g.any()) for g in w.grad] == [False, False, False, True, False, False]
        assert w.grad.isfinite().all()


def test_equal_scores_go_to_the_lowest_index() -> None:
    m = layer(n_experts_per_tok=3)
    m.gate.weight.data.zero_()
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    ids, w = m.route(x[0], context(x), 0)
    assert ids.tolist() == [[0, 1, 2]] * 4 and (w.double() - SMALL.route_scale / 3).abs().max() < 1e-15


def test_the_router_of_a_bf16_model_runs_in_fp32() -> None:
    """Logits 2 and 2.0039: a tie in bf16, which would go to the lower index."""
    m = layer(dim=2, n_experts=2, n_experts_per_tok=1).bfloat16()
    m.gate.weight.data.copy_(torch.tensor([[2.0, 0.0], [1.9921875, 1.5]]))
    x = torch.tensor([[[1.0, 0.0078125]]], dtype=torch.bfloat16)
    ids, w = m.route(x[0], context(x), 0)
    assert ids.tolist() == [[1]] and w.dtype == torch.float32 and m(x, context(x), 0).dtype == torch.bfloat16


def test_the_correction_bias_stays_float32() -> None:
    m = moe.Transformer(SMALL)
    bias = torch.linspace(0.3, 0.301, 6)
    m.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    m = m.bfloat16().to("cpu")
    gate = m.layers[1].mlp.gate
    assert gate.weight.dtype == torch.bfloat16 and torch.equal(gate.e_score_correction_bias, bias)
    with torch.device("meta"):
        m = moe.Transformer(SMALL)
    assert m.bfloat16().to_empty(device="cpu").layers[1].mlp.gate.load.dtype == torch.float32


def test_non_contiguous_inputs() -> None:
    m, wide = layer(), torch.randn(4, 64, 3, dtype=torch.float64)
    x = wide.transpose(1, 2)[..., ::2]
    assert not x.is_contiguous()
    y = x.contiguous()
    assert torch.equal(m(x, context(x), 0), m(y, context(y), 0))
    model, tokens = build(), torch.randint(0, 50, (9, 2)).t()
    assert torch.equal(model(tokens), model(tokens.contiguous()))


def test_padding_is_not_counted_and_neither_is_evaluation() -> None:
    model, tokens = build(), torch.randint(0, 50, (2, 8))
    real = torch.arange(8) < torch.tensor([[8], [3]])
    positions = torch.arange(8).expand(2, 8)
    model(tokens, model.context(positions, real=real))
    assert all(not layer.mlp.gate.load.any() for layer in model.layers[1:])
    model.train()(tokens, model.context(positions, real=real))
    assert all(layer.mlp.gate.load.sum() == 11 * 2 for layer in model.layers[1:])


# -------------------------------------------------------------------------------------------- NaN, lengths


def poisoned() -> moe.Transformer:
    model = build()
    with torch.no_grad():
        model.embed_tokens.weight[7] = math.nan
    return model


def test_nan_stays_in_its_row_of_the_batch() -> None:
    clean, model = build(), poisoned()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 8, 9]] * 3)
    tokens[1, 3] = 7
    doc, positions = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]] * 3), torch.arange(8).expand(3, 8)
    for how in ({}, dict(doc=doc)):
        with torch.no_grad():
            want, out = (m(tokens, m.context(positions, **how)) for m in (clean, model))
        assert out[1, 3:5].isnan().all() and torch.allclose(out[[0, 2]], want[[0, 2]])


def test_nan_left_in_the_cache_does_not_reach_the_next_user_of_the_row() -> None:
    clean, model = build(), poisoned()
    tokens, positions = torch.tensor([[1, 2, 7, 4, 5], [1, 2, 3, 4, 5]]), torch.arange(5).expand(2, 5)
    cache = moe.Cache(SMALL, 2, 6, dtype=torch.float64)
    with torch.no_grad():
        out = model(tokens, model.context(positions, cache=cache))
        assert out[0, 2:].isnan().all() and out[0, :2].isfinite().all() and out[1].isfinite().all()
        # Row 0 starts anew with a short prompt while row 1, at position 5, keeps the span long.
        new = torch.tensor([[9], [6]])
        got = model(new, model.context(torch.tensor([[0], [5]]), cache=cache))
        assert torch.allclose(got[0], clean(torch.tensor([[9]]))[0], atol=1e-6)
        assert torch.allclose(got[1, 0], clean(torch.tensor([[1, 2, 3, 4, 5, 6]]))[0, -1], atol=1e-6)


def test_positions_beyond_the_rotary_range_are_refused() -> None:
    model = build()
    cache = moe.Cache(SMALL, 1, 100, dtype=torch.float64)
    model.context(torch.tensor([[63]]), cache=cache)
    for how in ({}, dict(cache=cache), dict(doc=torch.zeros(1, 1, dtype=torch.long))):
        with pytest.raises(ValueError, match="65 tokens exceed the rotary range of 64"):
            model.context(torch.tensor([[64]]), **how)


# ----------------------------------------------------------------------------- low precision, wires, counts


def test_mxfp8_is_a_field_of_the_config() -> None:
    sizes = dict(dim=64, expert_dim=32, init_std=0.0)
    exact, low = (moe.Transformer(replace(SMALL, **sizes, precision=p)) for p in ("native", "mxfp8"))
    for model in (exact, low):
        model.reset_parameters(0)
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    routes = routes_of(exact, tokens)  # the same experts, so that only the arithmetic differs
    a, b = (m(tokens, m.context(torch.arange(16).expand(2, 16), replay=routes)) for m in (exact, low))
    error = ((a - b).norm() / a.norm()).item()
    assert 1e-4 < error < 0.1
    b.sum().backward()
    assert low.layers[1].mlp.w_down.grad.isfinite().all() and low.layers[1].mlp.w_down.grad.any()
    for field in ("precision", "dispatch"):
        with pytest.raises(ValueError, match="multiples of 32"):
            replace(SMALL, **{field: "mxfp8"})
    with pytest.raises(ValueError, match="dispatch = 'fp8'"):
        replace(SMALL, dispatch="fp8")


def test_rows_travel_in_mxfp8_and_return_in_bf16() -> None:
    g, sent = torch.Generator().manual_seed(0), []
    order = torch.randperm(10, generator=g)

    def there(rows: torch.Tensor) -> torch.Tensor:
        sent.append(rows.nbytes)
        return rows[order]

    def back(rows: torch.Tensor) -> torch.Tensor:
        sent.append(rows.nbytes)
        return rows[order.argsort()]

    x, dy = torch.randn(10, 64, generator=g).requires_grad_(), torch.randn(10, 64, generator=g)
    out = moe.dispatch_rows(x, there, back)
    assert torch.equal(out, moe.dispatch_rows(x)[order])  # what moves is only moved
    assert 0.01 < (out - x[order]).norm() / x.norm() < 0.04  # MXFP8's error on Gaussians: 2.7 %
    (dx,) = torch.autograd.grad(out, x, dy)
    assert torch.equal(dx, dy[order.argsort()].bfloat16().float())
    home = moe.combine_rows(x, there, back)
    (dx,) = torch.autograd.grad(home, x, dy)
    assert torch.equal(home, x[order].bfloat16().float())
    assert torch.equal(dx, dy[order.argsort()].bfloat16().float())
    assert sent == [10 * 66, 10 * 128, 10 * 128, 10 * 128]


def test_a_layer_with_mxfp8_dispatch_is_the_layer_on_rounded_tokens() -> None:
    c = replace(SMALL, dim=32, expert_dim=32, dispatch="mxfp8", n_shared_experts=0)
    m = moe.MoE(c)
    moe.initialise(m, c, 0)
    x = torch.randn(6, 32)
    ids, w = m.route(x, context(x[None]), 0)
    want = moe.kernels.experts(moe.dispatch_rows(x), ids, w, m.w_gate_up, m.w_down)
    assert torch.equal(m(x[None], context(x[None]), 0)[0], want)


def test_bytes_on_the_wire() -> None:
    c = moe.Config()
    t = moe.expert_traffic(c, 4096, 8)
    assert t["rows"] == 4096 * 7 and t["dispatch"] == t["rows"] * 7392 and t["combine"] == t["rows"] * 14336
    assert t["sum"] / t["bf16"] == pytest.approx((33 / 32 + 2) / 4)
    assert moe.expert_traffic(c, 4096, 1)["sum"] == 0
    t = moe.latent_traffic(c, 32_768, 2)
    assert t["latents"] == 16_384 * 1152 and t["keys_values"] / t["latents"] == pytest.approx(35.56, abs=0.01)


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_causal_work_per_rank_is_counted_right(cp: int) -> None:
    mask, n = torch.ones(24, 24).tril(), 24 // (2 * cp)
    rows = mask.sum(1).view(2 * cp, n).sum(1).tolist()
    assert moe.causal_pairs(24, cp) == [rows[i] + rows[2 * cp - 1 - i] for i in range(cp)]
    assert moe.causal_pairs(24, cp, zigzag=False) == [rows[2 * i] + rows[2 * i + 1] for i in range(cp)]
    assert len(set(moe.causal_pairs(24, cp))) == 1 and sum(moe.causal_pairs(24, cp)) == 300
    with pytest.raises(ValueError, match="23 tokens"):
        moe.causal_pairs(23, cp)


def test_every_tensor_of_the_full_size_has_a_public_name() -> None:
    with torch.device("meta"):
        views = dict(moe.public_views(moe.Transformer(moe.Config())))
    assert sum(t.numel() for t in views.values()) == 1_026_408_209_408 + 23_040
    assert len(views) == 60 * 384 * 3 + 61 * 9 + 3 + 60 * 5 + 3  # experts, layers, dense, routers and shared, ends
    assert views["model.layers.60.mlp.experts.383.down_proj.weight"].shape == (7168, 2048)


def test_one_mtp_module_makes_it_one_point_oh_four_trillion() -> None:
    n, extra = moe.count(moe.Config()), moe.count_mtp(moe.Config())
    with torch.device("meta"):
        layers = mtp.MTP(moe.Config(), 1)
    assert sum(p.numel() for p in layers.parameters()) == extra
    assert n["biases"] == 23_040 and n["total"] + extra == 1_043_570_356_224


def test_bench_compares_equal_things() -> None:
    best = moe.bench_shape((24, 32, 16, 4, 2), torch.float32, rounds=1)
    assert {"ours", "sliced loop"} <= best.keys()
    if importlib.util.find_spec("transformers"):
        assert {f"transformers {how}" for how in ("eager", "batched_mm", "grouped_mm")} <= best.keys()


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
        if case.dispatch == "native":
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12, msg=lambda text: f"{case} {name}: {text}")
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
