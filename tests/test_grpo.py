"""grpo.py: the loss by hand and by invariance, groups, packing, files, the delta chain, the loop."""

import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import bench
import grpo
import moe
import sandbox
from length_penalty import Penalty
from summarize import Bytes, Protocol, Rollout, Segment, WindowConfig

SMALL = moe.Config(vocab_size=272, dim=32, n_layers=2, n_heads=2, q_lora_rank=16, kv_lora_rank=16,
                   qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, ffn_dim=32, expert_dim=16,
                   n_experts=4, n_experts_per_tok=2, rope_factor=1.0, rope_original_len=512, init_std=0.0)
PROTOCOL, WINDOW = Protocol(Bytes()), WindowConfig(window=136, trigger=104, turn=12, turns=3, summaries=1)


def small_model(seed: int = 0) -> moe.Transformer:
    model = moe.Transformer(SMALL)
    model.reset_parameters(seed)
    return model


def table(rows: list[list[float]], width: int = 4) -> torch.Tensor:
    return torch.tensor([r + [0.5] * (width - len(r)) for r in rows]).log()


# Four rollouts padded to four tokens; the second token of the last row is a tool's.
P = table([[0.5, 0.25, 0.8], [0.4], [0.2, 0.5], [0.9, 0.6, 0.3, 0.5]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1]])
A = grpo.advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))[0][:, None].expand(4, 4)


def gradient(logp: torch.Tensor, mu: torch.Tensor, a: torch.Tensor, mask: torch.Tensor,
             denominator: float = 16.0, **kw):
    logp = logp.clone().requires_grad_()
    value, metrics = grpo.loss(logp, mu, a, mask, denominator, **kw)
    value.backward()
    return value.detach(), logp.grad, metrics


def test_on_policy_vector() -> None:
    value, grad, _ = gradient(P, P, A, MASK)
    assert value == pytest.approx(0.03394343, abs=1e-7)
    assert torch.allclose(grad, -A * MASK / 16, atol=1e-8)


def test_truncated_weights_vector() -> None:
    mu = table([[0.5, 0.5, 0.4], [0.1], [0.4, 0.5], [0.9, 0.1, 0.1, 0.6]])
    value, grad, m = gradient(P, mu, A, MASK)
    assert value == pytest.approx(0.0497832, abs=1e-6)
    expect = torch.tensor([[-0.03125, -0.015625, -0.0625, 0], [0.0625, 0, 0, 0], [0.015625, 0.03125, 0, 0],
                           [-0.03125, 0, -0.0625, -0.0260417]])
    assert torch.allclose(grad, expect, atol=1e-6)
    reading = grpo.summary({k: float(v) for k, v in m.items()})
    assert reading["ess"] == pytest.approx(0.640539,
                                           abs=1e-5) and reading["truncated"] == pytest.approx(2 / 9)


def test_a_masked_infinity_poisons_nothing() -> None:
    value, grad, m = gradient(torch.tensor([-1.0, -1.0]), torch.tensor([-101.0, -1.0]), torch.ones(2),
                              torch.tensor([0, 1]), 1.0, cap=1e9)
    assert grad.tolist() == [0.0, -1.0] and m["weight"] == 1.0 and torch.isfinite(value)


def test_micro_batches_and_padding_do_not_change_the_gradient() -> None:
    whole = gradient(P, P - 0.1, A, MASK)[1]
    parts = torch.cat([gradient(P[i : i + 1], P[i : i + 1] - 0.1, A[i : i + 1], MASK[i : i + 1])[1]
                       for i in range(4)])
    padded = gradient(torch.nn.functional.pad(P, (0, 3), value=-math.inf),
                      torch.nn.functional.pad(P - 0.1, (0, 3)), torch.nn.functional.pad(A, (0, 3)),
                      torch.nn.functional.pad(MASK, (0, 3)))[1]
    assert torch.equal(whole, parts) and torch.equal(padded[:, :4], whole) and not padded[:, 4:].any()


def test_gradient_per_token_does_not_depend_on_length() -> None:
    short = gradient(torch.full((1,), -1.0), torch.full((1,), -1.0), torch.full((1,), -0.5), torch.ones(1))[1]
    long = gradient(torch.full((50,), -1.0), torch.full((50,), -1.0), torch.full((50,), -0.5),
                    torch.ones(50))[1]
    assert (long == short[0]).all()


def test_advantages() -> None:
    assert (
        grpo.advantages(torch.tensor([[0.98, 0.97, 0.98, 0.95]])).abs().max() < 0.021
    )  # a deviation would make it 1.4
    assert not grpo.advantages(torch.full((3, 4), 0.1) + torch.tensor([[1.0], [2.0], [3.0]])).any()
    for bad in (torch.ones(2, 1), torch.ones(4)):
        with pytest.raises(ValueError, match="G"):
            grpo.advantages(bad)


def test_group_mean_is_an_unbiased_direction_and_deviation_is_not() -> None:
    """Enumerate all groups of 3 from a three-armed policy: E[ĝ] is (G − 1)/G of ∇E[R]; dividing by σ turns it."""
    theta = torch.tensor([-1.5, 0.5, 0.8], dtype=torch.float64, requires_grad=True)
    r = torch.tensor([1.0, 0.0, 0.1], dtype=torch.float64)
    logp = theta.log_softmax(-1)
    (true,) = torch.autograd.grad((logp.exp() * r).sum(), theta, retain_graph=True)
    plain, scaled = 0.0, 0.0
    for arms in torch.cartesian_prod(*[torch.arange(3)] * 3):
        weight = logp.detach()[arms].sum().exp()
        a = grpo.advantages(r[arms][None])[0]
        plain = plain + weight * (a * logp[arms]).sum() / 3
        scaled = scaled + weight * (a / (r[arms].std() + 1e-6) * logp[arms]).sum() / 3
    (g,), (h,) = (torch.autograd.grad(x, theta, retain_graph=True) for x in (plain, scaled))
    assert torch.allclose(g, true * 2 / 3, atol=1e-12)
    assert torch.cosine_similarity(h, true, dim=0) < 0.99


def test_off_policy_bias_is_ordered_and_the_sequence_weight_is_exact() -> None:
    for seed in range(3):
        assert (grpo.off_policy_bias(0.0, "token", seed) < 1e-12 and grpo.off_policy_bias(0.7, "sequence",
                                                                                          seed) < 1e-12)
    none, token = (sum(grpo.off_policy_bias(0.5, w, s) for s in range(20)) for w in ("none", "token"))
    assert token < 0.8 * none


def test_packing_keeps_every_token_once_and_balances_cost() -> None:
    rng = random.Random(0)
    lengths = [rng.randrange(1, 60) for _ in range(40)]
    items = [grpo.Item(Segment([i] * n, [1] * n, [-1.0] * n, [0] * n), float(i), i) for i,
             n in enumerate(lengths)]
    rows = grpo.pack(items, 64)
    assert all(sum(len(item.segment.ids) for item in row) <= 64 for row in rows)
    assert sorted(item.owner for row in rows for item in row) == list(range(40))
    assert len(rows) <= 1.3 * sum(lengths) / 64 + 1
    batch = grpo.tensors(rows, 64)
    assert int((batch["doc"] >= 0).sum()) == sum(lengths)
    for key in ("advantage", "owner"):
        assert torch.equal(batch[key][batch["mask"]].long(), batch["ids"][batch["mask"]])
    with pytest.raises(ValueError, match="65 tokens"):
        grpo.pack([grpo.Item(Segment([0] * 65, [0] * 65))], 64)
    lengths = [131072, 65536, 65536] + [16384] * 8
    load = [sum(grpo.cost(lengths[i]) for i in r) for r in grpo.balance(lengths, 2)]
    assert max(load) / (sum(load) / 2) < 1.01 and sorted(sum(grpo.balance(lengths, 2), [])) == list(range(11))


def rollouts_of(model: moe.Transformer, tasks: list, n: int, slots: int = 8, seed: int = 0,
                environment: type = sandbox.Memory) -> list[Rollout]:
    world = grpo.World(lambda t: bench.open_workspace(environment, t), bench.grade)
    sampler = grpo.Sampler(model.eval(), PROTOCOL, WINDOW, world, slots, seed=seed)
    with torch.no_grad():
        out = [r for _, r in sampler.run((t, g) for t in tasks for g in range(n))]
    sampler.close()
    return out


def test_trainer_log_probs_equal_the_samplers() -> None:
    """Whatever was packed with whatever: with replayed routes the ratio is 1 before any update (M3)."""
    model = small_model()
    rollouts = rollouts_of(model, bench.suite("train", 1), 2)
    assert len(rollouts) == 18 and all(r.finish for r in rollouts)
    rows = grpo.pack([grpo.Item(s, 1.0) for r in rollouts for s in r.segments], 256)
    batch = grpo.tensors(rows, 256)
    logp, entropy, index = grpo.logprobs(model, batch)
    assert int(index.sum()) == sum(r.tokens for r in rollouts)
    assert (logp - batch["logp_sampled"][index]).abs().max() < 1e-4
    assert (entropy > 0).all()


def test_replay_removes_the_mismatch_of_flipped_experts() -> None:
    model = small_model()
    rollouts = rollouts_of(model, bench.suite("train", 1), 2)
    batch = grpo.tensors(grpo.pack([grpo.Item(s, 1.0) for r in rollouts for s in r.segments], 256), 256)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "gate.weight" in name:  # another engine's arithmetic, at the router only
                p += 0.05 * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        gaps = {}
        for replay in (False, True):
            logp, _, index = grpo.logprobs(model, batch, replay=replay)
            gaps[replay] = (logp - batch["logp_sampled"][index]).abs().quantile(0.99)
    assert gaps[True] < gaps[False]


def test_a_rollout_does_not_depend_on_its_company() -> None:
    model, tasks = small_model(), bench.suite("train", 1)[:4]
    alone = {(r.task, i): r for t in tasks for i, r in enumerate(rollouts_of(model, [t], 1))}
    together = rollouts_of(model, tasks, 1, slots=3)
    for r in together:
        assert [s.ids for s in r.segments] == [s.ids for s in alone[r.task, 0].segments]


def test_reference_kl_of_the_policy_itself_is_zero() -> None:
    model = small_model()
    rollouts = rollouts_of(model, bench.suite("train", 1)[:3], 1)
    c = grpo.GRPOConfig(row=256)
    assert max(map(abs, grpo.reference_kl(model, rollouts, c))) < 0.05
    other = grpo.reference_kl(small_model(1), rollouts, c)
    assert sum(other) > 1.0  # own samples: the sum over many tokens is positive


def test_group_file_round_trip_damage_and_half_written(tmp_path) -> None:
    rollouts = rollouts_of(small_model(), bench.suite("train", 1)[:2], 1)
    path = tmp_path / "g.pt"
    grpo.write_file(path, grpo.group_state(rollouts, 5))
    back = grpo.group_of(grpo.read_file(path))
    assert [s.ids for r in back for s in r.segments] == [s.ids for r in rollouts for s in r.segments]
    pairs = [(a, b) for x, y in zip(back, rollouts) for a, b in zip(x.segments, y.segments)]
    assert all(torch.equal(a.routes, b.routes) for a, b in pairs)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        grpo.read_file(path)
    path.write_bytes(raw[:100])
    with pytest.raises(ValueError, match="damaged"):
        grpo.read_file(path)


def same_bits(got: dict, state: dict) -> bool:
    return all(torch.equal(got[k].to(torch.bfloat16).view(torch.int16),
                           v.to(torch.bfloat16).view(torch.int16)) for k, v in state.items())


def nudge(model: moe.Transformer, by: float = 1e-4) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p += by * torch.sign(p)


def test_delta_chain_rebuilds_bit_for_bit_and_heals(tmp_path) -> None:
    model, publisher = small_model(), grpo.Publisher(tmp_path, full_every=4)
    reader, late = (grpo.Subscriber(tmp_path, model.state_dict()) for _ in range(2))
    for version in range(7):
        publisher.publish(model.state_dict(), version)
        info = publisher.flush()
        got = reader.poll()
        assert reader.version == version and same_bits(got, model.state_dict())
        if version not in (0, 4):
            assert 0 < info["weight_changed"] < 1 and info["weight_ratio"] > 2
        nudge(model)
    assert late.poll() is not None and late.version == 6  # from the last snapshot on
    assert reader.poll() is None
    publisher.publish(model.state_dict(), 7)
    publisher.flush()
    damaged = tmp_path / "000007-0of1.delta"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    assert reader.poll() is None and reader.version == 6  # named and not used
    publisher.publish(model.state_dict(), 8)
    publisher.flush()
    assert reader.poll() is not None and reader.version == 8  # the next snapshot heals the gap


def test_a_trainer_that_goes_back_is_followed(tmp_path) -> None:
    """After a restart from an older checkpoint, versions repeat with other weights: no mixture of the two."""
    first, second = small_model(), small_model(1)
    publisher = grpo.Publisher(tmp_path, full_every=100)
    fast, slow = (grpo.Subscriber(tmp_path, first.state_dict()) for _ in range(2))
    for version in range(6):
        publisher.publish(first.state_dict(), version)
        publisher.flush()
        nudge(first)
    assert fast.poll() is not None and slow.poll() is not None and fast.version == slow.version == 5
    publisher = grpo.Publisher(tmp_path, full_every=100)
    for version in range(3, 8):
        publisher.publish(second.state_dict(), version)
        publisher.flush()
        if version == 3:
            assert same_bits(fast.poll(), second.state_dict())
        kept = {k: v.clone() for k, v in second.state_dict().items()}
        nudge(second)
    assert same_bits(fast.poll(), kept) and fast.version == 7
    got = slow.poll()  # version 5 and the other 6: refused; the snapshot, now or at the next call
    assert same_bits(got or slow.poll(), kept) and slow.version == 7


def test_parts_of_all_ranks_are_taken_together(tmp_path) -> None:
    whole = {"a": torch.randn(6, 4), "b": torch.randn(5)}
    ranks = [grpo.Publisher(tmp_path, 10, rank, 2) for rank in range(2)]
    reader = grpo.Subscriber(tmp_path, whole)
    for version in range(3):
        for rank, publisher in enumerate(ranks):
            part = {"a": whole["a"][3 * rank:3 * rank + 3], **({"b": whole["b"]} if rank else {})}
            publisher.publish(part, version, {"a": 12 * rank})
            publisher.flush()
            got = reader.poll()
            assert (got is None) == (rank == 0)
        assert same_bits(got, whole)
        whole = {k: v * 1.01 for k, v in whole.items()}


@pytest.mark.parametrize("seed", range(4))
def test_encoding_is_exact_for_any_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(-2**15, 2**15, 70_000).astype(np.int16)
    for share in (0.0, 1e-4, 0.01, 0.5, 1.0):
        new = np.where(rng.random(len(old)) < share, rng.integers(-2**15, 2**15, len(old)), old).astype(np.int16)
        assert np.array_equal(grpo.decode(grpo.encode(new, old), old, len(old)), new)
        assert np.array_equal(grpo.decode(grpo.encode(new, None), None, len(old)), new)
    last = old.copy()
    last[-1] ^= 1  # one change behind a gap of many bytes
    assert np.array_equal(grpo.decode(grpo.encode(last, old), old, len(old)), last)


def test_one_weight_in_a_hundred_by_one_unit_takes_a_sixtieth() -> None:
    rng = np.random.default_rng(0)
    old = torch.randn(1 << 20).mul(0.02).to(torch.bfloat16).view(torch.int16).numpy()
    new = old + (rng.random(len(old)) < 0.01) * rng.choice(np.array([-1, 1], np.int16), len(old))
    assert 2 * len(old) / len(grpo.encode(new.astype(np.int16), old)) > 60


def test_old_weight_plus_rounded_difference_is_not_the_new_weight() -> None:
    g = torch.Generator().manual_seed(0)
    old, new = (torch.randn(4096, generator=g).to(torch.bfloat16) for _ in range(2))
    assert not torch.equal(old + (new - old), new)
    a, b = (x.view(torch.int16).numpy() for x in (old, new))
    assert np.array_equal(grpo.decode(grpo.encode(b, a), a, len(a)), b)


def test_curriculum_draws_each_task_once_and_turns_to_the_costlier_families() -> None:
    c = grpo.Curriculum(["easy", "hard"], size=2000, seed=0)
    assert list(itertools.islice(c.order({1, 2}, late=True), 3)) == [0, 3, 4]  # nothing known yet: in order
    for family, turns in (("easy", 1), ("hard", 4)):
        c.note(Rollout("t", family, [], "", "answered", dict(turns=turns, thinking=0)))
    early = list(itertools.islice(c.order(set(), late=False), 100))
    assert early == list(range(100))
    late = list(c.order(set(early), late=True))
    assert sorted(late) == list(range(100, 2000))  # without replacement
    hard = [c.family(i) for i in late[:500]].count("hard")
    assert 380 < hard < 430  # 4 to 1, a little less as the pool of hard ones empties
    assert late == list(c.order(set(early), late=True))


def test_claims_are_exclusive_survive_use_and_die_with_their_sampler(tmp_path) -> None:
    a, b = grpo.Claims(tmp_path, "a"), grpo.Claims(tmp_path, "b")
    order = lambda taken: (i for i in range(100) if i not in taken)
    assert [c.take(4, order) for c in (a, b, a, b, a, b)] == [0, 1, 2, 3, None, None]
    grpo.write_file(grpo.group_path(tmp_path, 0, 0), {})
    (tmp_path / "used.json").write_text("[1]")
    again = grpo.Claims(tmp_path, "a")  # a died with task 2 unfinished
    assert again.taken() == {0, 1, 3} and again.take(4, order) == 2
    grpo.Claims(tmp_path, "c", patience=-1.0)  # nobody has been heard of for too long
    assert grpo.Claims(tmp_path, "c").taken() == {0, 1}


def test_no_claim_is_made_twice_nor_too_many_by_samplers_at_once(tmp_path) -> None:
    samplers = [grpo.Claims(tmp_path, str(i)) for i in range(4)]

    def work(claims: grpo.Claims) -> list[int | None]:
        return [claims.take(30, lambda taken: (i for i in range(1000) if i not in taken)) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        got = [i for result in pool.map(work, samplers) for i in result if i is not None]
    assert sorted(got) == list(range(30))


def test_chain_ess_sees_what_token_ess_hides() -> None:
    assert grpo.chain_ess(torch.zeros(5)) == pytest.approx(1.0) and grpo.chain_ess(torch.zeros(0)) == 1.0
    assert grpo.chain_ess(torch.tensor([0.0, -1e4, -1e4, -1e4])) == pytest.approx(0.25)
    token = 0.05 * torch.randn(1000, 400, generator=torch.Generator().manual_seed(0))
    w = token.exp()
    assert w.sum() ** 2 / (w.numel() * (w**2).sum()) > 0.99 and grpo.chain_ess(token.sum(1)) < 0.6


def trainer(out, **changes) -> grpo.Trainer:
    c = grpo.GRPOConfig(**{**dict(steps=2, groups=2, group_size=2, row=256, micro_rows=4), **changes})
    return grpo.Trainer(small_model(), lambda ps: torch.optim.AdamW(ps, c.lr), c, out)


def store_groups(out, tasks: list, version: int = 0) -> list[list[Rollout]]:
    groups = []
    for i, t in enumerate(tasks):
        group = rollouts_of(small_model(), [t], 2)
        for r, reward in zip(group, (1.0, 0.0)):
            r.reward = r.shaped_reward = reward
            r.extra.update(kl=0.0, length_cost=0.0)
        grpo.write_file(out / "groups" / f"{version:06d}-{i:07d}.pt", grpo.group_state(group, i))
        groups.append(group)
    return groups


def test_training_raises_the_better_rollout_and_uses_no_group_twice(tmp_path) -> None:
    t = trainer(tmp_path)
    store_groups(tmp_path, bench.suite("train", 1)[:3])
    groups, _ = t.collect(5.0, lambda: None)
    batch = grpo.tensors(grpo.pack([grpo.Item(s, r.reward) for g in groups for r in g for s in r.segments], 256), 256)
    before = grpo.logprobs(t.model, batch)[0].detach()
    metrics = t.step(groups)
    after, _, index = grpo.logprobs(t.model, batch)
    good = batch["advantage"][index] == 1.0
    assert (after - before)[good].mean() > (after - before)[~good].mean()
    assert t.version == 1 and t.used == [0, 1] and metrics["reward"] == 0.5 and metrics["ess"] > 0.99
    assert len(list((tmp_path / "groups").glob("*.pt"))) == 3  # nothing is deleted before a checkpoint
    again = trainer(tmp_path)  # a crash without a checkpoint
    assert again.collect(5.0, lambda: None)[0][0][0].task == groups[0][0].task
    resumed = trainer(tmp_path)
    resumed.load(t.state())
    t.forget_used()
    assert [p.stem for p in (tmp_path / "groups").glob("*.pt")] == ["000000-0000002"]
    assert grpo.used_tasks(tmp_path / "groups") == [0, 1]
    with pytest.raises(TimeoutError, match="is a sampler running"):
        resumed.collect(0.1, lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(t.model.parameters(), resumed.model.parameters()))


def test_stale_and_damaged_groups_are_set_aside(tmp_path, capsys) -> None:
    t = trainer(tmp_path, groups=1, drop_staleness=3)
    store_groups(tmp_path, bench.suite("train", 1)[:3])
    t.version = 4  # everything sampled at 0 is too old now
    with pytest.raises(TimeoutError):
        t.collect(0.1, lambda: None)
    assert t.dropped == 3
    store_groups(tmp_path, bench.suite("train", 1)[:2], version=4)
    first = tmp_path / "groups" / "000004-0000000.pt"
    first.write_bytes(first.read_bytes()[:-1])
    groups, _ = t.collect(5.0, lambda: None)
    assert t.used == [1] and "damaged" in capsys.readouterr().out


def test_dead_groups_move_nothing(tmp_path) -> None:
    t = trainer(tmp_path, groups=1)
    (group,) = store_groups(tmp_path, bench.suite("train", 1)[:1])
    for r in group:
        r.reward = r.shaped_reward = 1.0
    before = [p.clone() for p in t.model.parameters()]
    t.optimizer = torch.optim.SGD(t.master, 1.0)
    assert t.step([group])["dead_groups"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, t.model.parameters()))


def test_reward_is_never_overwritten() -> None:
    rollouts = rollouts_of(small_model(), bench.suite("train", 1)[:2], 1)
    for r in rollouts:
        r.reward = 1.0
    grpo.shape_rewards(rollouts, [2.0, 0.0], 0.1, Penalty())
    assert [r.reward for r in rollouts] == [1.0, 1.0]
    assert rollouts[0].shaped_reward == pytest.approx(1.0 - 0.2 - rollouts[0].extra["length_cost"])


@pytest.mark.parametrize("bad",
                         [dict(group_size=1), dict(ratio_cap=0.5), dict(temperature=0.0),
                          dict(max_staleness=9, drop_staleness=2)])
def test_bad_configurations_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        grpo.GRPOConfig(**bad)


class Dying(sandbox.Memory):
    """A workspace whose first calls fail: `plan` says how, one entry a workspace."""

    plan: list = []

    def call(self, tool, args=()):
        if Dying.plan:
            raise sandbox.SandboxDied("gone", policy=Dying.plan.pop(0))
        return super().call(tool, args)


def scripted_sampler(monkeypatch, plan: list, task) -> list[Rollout]:
    written = itertools.repeat(PROTOCOL.render(task.reference.turns[0]))  # writes the file, again and again
    monkeypatch.setattr(Dying, "plan", plan)
    world = grpo.World(lambda t: bench.open_workspace(Dying, t), bench.grade)
    sampler = grpo.Sampler(small_model().eval(), PROTOCOL, WINDOW, world, 1)
    real = sampler.engine.window

    def window(slot):
        """The engine's window with its last turn replaced by the reference's next one."""
        ids, mask, logprobs, versions, routes = real(slot)
        start = sampler.slots[slot].start
        if sampler.slots[slot].pending is None and len(ids) > start:
            turn = next(written)
            ids = ids[:start] + turn
        return ids, [0] * len(ids), [0.0] * len(ids), [0] * len(ids), None

    monkeypatch.setattr(sampler.engine, "window", window)
    with torch.no_grad():
        out = [r for _, r in sampler.run(iter([(task, 0)]))]
    sampler.close()
    return out


def test_a_death_by_the_machine_is_repeated_and_one_by_the_model_scores_zero(monkeypatch) -> None:
    task = bench.task("new", "train", 0)
    (own,) = scripted_sampler(monkeypatch, [True], task)
    assert own.reward == 0.0 and own.finish == "died"
    (repeated,) = scripted_sampler(monkeypatch, [False], task)
    assert repeated.reward == 1.0 and repeated.finish == "turns" and len(repeated.segments) == 1
    with pytest.raises(sandbox.SandboxDied, match="three workspaces"):
        scripted_sampler(monkeypatch, [False] * 9, task)
