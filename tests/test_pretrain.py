"""pretrain.py by property: round trips, data that resume exactly, losses that do not depend on their cuts."""

import base64
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import moe
import mtp
import pretrain
from pretrain import BPE, Batch, Bytes, Corpus, Cursor, Phase

TINY = moe.Config(vocab_size=272, dim=32, n_layers=2, n_heads=2, q_lora_rank=16, kv_lora_rank=16,
                  qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, ffn_dim=64, expert_dim=16,
                  n_experts=4, n_experts_per_tok=2, route_scale=1.0, rope_theta=10_000.0, rope_factor=4.0,
                  rope_original_len=256, init_std=0.0, positional_heads=2)
CODE = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    size = 3  # größer\n"
needs_mtp = pytest.mark.skipif(not hasattr(mtp, "distill_loss"), reason="mtp.py has no distill_loss")


def tiny(seed: int = 0) -> moe.Transformer:
    model = moe.Transformer(TINY)
    model.reset_parameters(seed)
    return model


def module_text(i: int, lines: int = 40) -> str:
    rng = random.Random(i)
    return "".join(f"def f{rng.randrange(10**6)}(x{rng.randrange(100)}):\n    return {rng.random()}\n"
                   for _ in range(lines))


@pytest.fixture
def tree(tmp_path):
    """Four packages of two files."""
    for i, package in enumerate(("alpha", "beta", "gamma", "held")):
        (tmp_path / package).mkdir()
        for j in range(2):
            (tmp_path / package / f"m{j}.py").write_text(module_text(10 * i + j))
    return tmp_path


@pytest.fixture
def corpus(tree):
    return Corpus.load(str(tree), "bytes", heldout=("held",))


# ------------------------------------------------------------------------------------------------- tokenizers


def plain_bpe(text: str, size: int) -> list[bytes]:
    """The textbook loop, for comparison."""
    words = Counter(pretrain.PIECE.findall(text.encode()))
    split = {word: [bytes([b]) for b in word] for word in words}
    table = [bytes([b]) for b in range(256)]
    while len(table) < size:
        pairs = Counter()
        for word, n in words.items():
            for pair in zip(split[word], split[word][1:]):
                pairs[pair] += n
        index = {token: i for i, token in enumerate(table)}
        a, b = min(pairs, key=lambda p: (-pairs[p], index[p[0]], index[p[1]]))
        if a + b not in index:
            table.append(a + b)
        for word, parts in split.items():
            out = []
            for part in parts:
                if out and not out[-1][1] and (out[-1][0], part) == (a, b):
                    out[-1] = (a + b, True)  # joined now: takes no part in another join
                else:
                    out.append((part, False))
            split[word] = [part for part, _ in out]
    return table


def test_bpe_training_equals_the_textbook_loop():
    text = CODE * 3 + "aaaaaaa aaa aaaaa " * 4 + module_text(1, 10) + "===== ==== ==\n"
    assert BPE.train(text, 300).table == plain_bpe(text, 300)


@pytest.mark.parametrize("tokenizer", [Bytes(), BPE.train(CODE * 20, 280)], ids=["bytes", "bpe"])
def test_any_bytes_make_the_round_trip(tokenizer):
    rng = random.Random(0)
    samples = [bytes(range(256)), CODE.encode(), b"", b"a" * 5000, " \t\r\n\v\f".encode() * 3]
    samples += [bytes(rng.choices(range(256), k=200)) for _ in range(20)]
    for data in samples:
        ids = tokenizer.encode(data.decode("utf-8", "surrogateescape"))
        assert all(0 <= i < tokenizer.size for i in ids)
        assert tokenizer.decode(ids).encode("utf-8", "surrogateescape") == data


def test_every_byte_belongs_to_exactly_one_piece():
    data = bytes(random.Random(1).choices(range(256), k=20_000))
    assert b"".join(pretrain.PIECE.findall(data)) == data


def test_bpe_shortens_and_its_name_follows_its_table():
    bpe = BPE.train(CODE * 20, 300)
    assert len(bpe.encode(CODE)) < len(CODE) / 2
    assert bpe.name == BPE(bpe.table).name != BPE(bpe.table[:-1]).name


def test_vocabularies_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match="256"):
        BPE([bytes([b]) for b in range(255)])
    with pytest.raises(ValueError, match="yields"):
        BPE.train("ab", 300)
    (tmp_path / "gap.tiktoken").write_text("YQ== 0\nYg== 2\n")
    with pytest.raises(ValueError, match="gaps"):
        BPE.from_tiktoken(tmp_path / "gap.tiktoken")


def test_tiktoken_files_are_read(tmp_path):
    bpe = BPE.train(CODE * 20, 290)
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(bpe.table)]
    random.Random(0).shuffle(lines)
    (tmp_path / "v.tiktoken").write_text("\n".join(lines) + "\n")
    assert BPE.from_tiktoken(tmp_path / "v.tiktoken").encode(CODE) == bpe.encode(CODE)


# ----------------------------------------------------------------------------------------------------- corpus


def test_what_is_no_source_is_skipped_and_counted(tree):
    def git(*command):
        subprocess.run(["git", "-C", str(tree / "beta"), "-c", "user.name=n", "-c", "user.email=e", *command],
                       check=True, capture_output=True)

    git("init", "-q")
    (tree / "beta" / ".gitignore").write_text("secret.py\n")
    (tree / "beta" / "secret.py").write_text(module_text(90))
    (tree / "alpha" / "data.bin").write_bytes(b"PK\0\1" * 10)
    (tree / "alpha" / "latin.py").write_bytes("naïve = 1\n".encode("latin-1"))
    (tree / "alpha" / "huge.py").write_text("x = 1\n" * 200_000)
    (tree / "alpha" / "empty.py").write_text(" \n")
    (tree / "alpha" / "copy.py").write_bytes((tree / "alpha" / "m0.py").read_bytes())
    (tree / "gamma" / "near.py").write_text(module_text(20).replace("return", "yield", 1))
    (tree / "gamma" / "loop").symlink_to(tree / "gamma")
    (tree / "gamma" / "link.py").symlink_to(tree / "alpha" / "m0.py")
    os.mkfifo(tree / "gamma" / "pipe")
    c = Corpus.load(str(tree), heldout=("held",))
    assert c.counts == {"git-ignored": 1, "binary": 1, "not UTF-8": 1, "too large": 1, "empty": 1,
                        "duplicate": 1, "near duplicate": 1, "link": 2, "no file": 1}
    assert [d.path for d in c.train] == ["alpha/copy.py", "alpha/m1.py", "beta/.gitignore", "beta/m0.py",
                                         "beta/m1.py", "gamma/m0.py", "gamma/m1.py"]


def test_a_training_copy_of_a_heldout_file_is_the_duplicate(tree):
    (tree / "alpha" / "leak.py").write_bytes((tree / "held" / "m0.py").read_bytes())
    c = Corpus.load(str(tree), heldout=("held",))
    assert c.counts == {"duplicate": 1}
    assert "alpha/leak.py" not in {d.path for d in c.train} and "held/m0.py" in {d.path for d in c.heldout}


def test_documents_hold_their_files_and_packages_are_split(tree, corpus):
    assert {d.package for d in corpus.train} == {"alpha", "beta", "gamma"}
    assert {d.package for d in corpus.heldout} == {"held"}
    for d in corpus.train + corpus.heldout:
        assert corpus.text(d) == (tree / d.path).read_text() and corpus.tokens[d.start] == 257
    ids, n_bytes = corpus.joined()
    files = sorted((tree / "held").iterdir())
    assert ids[0] == 257 and bytes(ids[1:].tolist()) == b"".join(f.read_bytes() for f in files)
    assert n_bytes == len(ids) - 1
    assert corpus.joined(limit_bytes=100)[1] == 100 == len(corpus.joined(limit_bytes=100)[0]) - 1


def test_the_cache_is_found_by_content(tree, tmp_path_factory, monkeypatch):
    cache = str(tmp_path_factory.mktemp("cache"))
    first = Corpus.load(str(tree), "bpe300", ("held",), cache)
    assert isinstance(first.tokens, np.memmap)
    monkeypatch.setattr(BPE, "encode", None)  # a second load neither learns nor encodes
    monkeypatch.setattr(BPE, "train", None)
    again = Corpus.load(str(tree), "bpe300", ("held",), cache)
    assert (again.train == first.train and np.array_equal(again.tokens, first.tokens)
            and again.digest == first.digest)
    monkeypatch.undo()
    with open(tree / "alpha" / "m0.py", "a") as f:
        f.write("changed = True\n")
    changed = Corpus.load(str(tree), "bpe300", ("held",), cache)
    assert changed.digest != first.digest and changed.text(changed.train[0]).endswith("changed = True\n")
    assert not [f for f in os.listdir(cache) if not f.endswith((".json", ".bin"))]


def test_unknown_packages_tokenizers_and_folders_are_refused(tree):
    with pytest.raises(ValueError, match="alpha"):
        Corpus.load(str(tree), heldout=("asyncio",))
    with pytest.raises(ValueError, match="leave some"):
        Corpus.load(str(tree), heldout=("alpha", "beta", "gamma", "held"))
    with pytest.raises(ValueError, match="choose bytes"):
        Corpus.load(str(tree), "words", ("held",))
    with pytest.raises(ValueError, match="no folder"):
        Corpus.load(str(tree / "nowhere"))


def test_the_default_corpus_is_the_standard_library():
    c = Corpus.load(None, limit_bytes=200_000)
    assert {d.package for d in c.heldout} == {"asyncio"} and 200_000 <= sum(d.n_bytes
                                                                            for d in c.train) < 500_000
    assert not [d.path for d in c.train if "test" in d.path.split("/")]


def test_an_epoch_visits_every_row_once_and_the_next_cuts_elsewhere(corpus):
    length, per_epoch = 64, corpus.n_train // 64 - 1

    def epoch(n, seed=3):
        rows = [corpus.row(i, length, seed) for i in range(n * per_epoch, (n + 1) * per_epoch)]
        return [np.concatenate([ids for ids, _ in row]).tolist() for row in rows]

    whole = corpus.tokens[: corpus.n_train].tolist()
    first, second = epoch(0), epoch(1)
    for rows in (first, second):  # in store order the rows are one run of the store
        at = {tuple(whole[i : i + length]): i for i in range(len(whole) - length + 1)}
        starts = sorted(at[tuple(row)] for row in rows)
        assert [b - a for a, b in zip(starts, starts[1:])] == [length] * (per_epoch - 1)
    assert first != second and first == epoch(0) and first != epoch(0, seed=4)


def test_rows_are_split_where_a_package_ends(corpus):
    for i in range(corpus.n_train // 512 - 1):
        row = corpus.row(i, 512, 0)
        assert sum(len(ids) for ids, _ in row) == 512
        for ids, _ in row[1:]:
            assert ids[0] == 257  # a package begins with its first file's ⟨document⟩
    assert any(len(corpus.row(i, 512, 0)) > 1 for i in range(corpus.n_train // 512 - 1))
    with pytest.raises(ValueError, match="too few"):
        corpus.row(0, corpus.n_train, 0)


# ------------------------------------------------------------------------------------- schedule, mix, packing


def test_lr_is_a_function_of_the_step_with_the_worked_values():
    phase = Phase("p", 8, 1, 10, lr=1.0, warmup=2, decay=0.4, lr_start=0.2, lr_end=0.2)
    assert [round(pretrain.lr_at(phase, s), 6) for s in range(10)] == [0.6, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]
    flat = Phase("p", 8, 1, 3, lr=0.5)
    assert {pretrain.lr_at(flat, s) for s in range(3)} == {0.5}


@pytest.mark.parametrize("wrong",
                         [dict(length=1), dict(steps=0), dict(mtp="sometimes"), dict(precision="fp8"),
                          dict(mix={"code": 0.9}), dict(mix={"code": 1.5, "track": -0.5}),
                          dict(mix={"code": 0.995, "track": 0.005}), dict(warmup=8, decay=0.5),
                          dict(mtp_every=0)])
def test_phases_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="phase 'p'"):
        Phase(**{**dict(name="p", length=8, rows=1, steps=10, lr=1.0), **wrong})


def test_the_mix_takes_every_source_in_its_share_and_order(corpus):
    calls = {"a": [], "b": []}
    sources = {name: lambda i, name=name: calls[name].append(i) or [([1, 2, 3], None)] for name in calls}
    phase = Phase("p", 4, 10, 1, 1.0, mix={"code": 0.5, "a": 0.3, "b": 0.2})
    batches = list(itertools.islice(pretrain.code_batches(corpus, phase, Cursor(), 0, sources), 20))
    assert calls == {"a": list(range(60)), "b": list(range(40))}  # each index once, in order
    assert [b.sample_ids for b in batches] == [list(range(i, i + 10)) for i in range(0, 200, 10)]
    for start in range(0, 100, 10):  # and evenly spread
        assert abs(pretrain.interleave(phase.mix)[start : start + 10].count("code") - 5) <= 1
    with pytest.raises(ValueError, match="mixes in"):
        next(pretrain.code_batches(corpus, replace(phase, mix={"poems": 1.0}), Cursor(), 0))


def equal(a: Batch, b: Batch) -> bool:
    return a.sample_ids == b.sample_ids and all(
        torch.equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "targets", "doc", "positions", "labels")
    )


def test_batches_after_a_cursor_are_those_of_an_uninterrupted_run(corpus):
    phase = Phase("p", 64, 5, 1, 1.0, mix={"code": 0.7, "track": 0.3})
    epochs = 2 * (corpus.n_train // 64)  # far enough to cross the border of an epoch
    whole = list(itertools.islice(pretrain.code_batches(corpus, phase, Cursor(), 1), epochs // 5))
    for done in (1, 7, len(whole) - 1):
        rest = pretrain.code_batches(corpus, phase, Cursor(sample=5 * done), 1)
        assert all(equal(a, b) for a, b in zip(whole[done:], rest))
    assert not equal(whole[0], next(pretrain.code_batches(corpus, phase, Cursor(), 2)))


def demonstrations(n: int, start: int = 0):
    for i in range(start, n):
        rng = random.Random(i)
        size = rng.randint(3, 20)
        yield [rng.randrange(256) for _ in range(size)], [rng.randint(0, 1) for _ in range(size)]


def test_packing_keeps_every_token_and_resumes_at_any_border():
    batches = list(pretrain.pack(demonstrations(60), 32, 3))
    assert [i for b in batches for i in b.sample_ids] == list(range(60))
    texts = Counter(tuple(b.tokens[r][b.doc[r] == d].tolist()) for b in batches for r in range(len(b.tokens))
                    for d in range(int(b.doc[r].max()) + 1))
    assert texts == Counter(tuple(ids) for ids, _ in demonstrations(60))
    assert sum(int(b.targets.sum()) for b in batches) == sum(sum(mask[1:]) for _, mask in demonstrations(60))
    for k, batch in enumerate(batches):
        first = batch.sample_ids[0]
        assert all(equal(a, b) for a,
                   b in zip(batches[k:], pretrain.pack(demonstrations(60, first), 32, 3, first), strict=True))
    with pytest.raises(ValueError, match="sample 7"):
        list(pretrain.pack([([1] * 33, [1] * 33)], 32, 3, first=7))


def test_no_target_and_no_label_crosses_a_document():
    batch = pretrain.lay_out([[([1, 2, 3], None), ([4, 5], [1, 1]), ([6, 7], [0, 0])]], 9, [0])
    assert batch.targets.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, -1, 5, -1, -1, -1, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 0, 0]]
    assert batch.doc.tolist() == [[0, 0, 0, 1, 1, 2, 2, -1, -1]]


def test_context_parallel_columns_keep_the_labels_of_the_whole_row(corpus):
    batch = next(pretrain.code_batches(corpus, Phase("p", 64, 4, 1, 1.0), Cursor(), 0))
    chunks = torch.arange(64).view(4, 16)
    ranks = [torch.cat((chunks[i], chunks[3 - i])) for i in range(2)]  # zigzag for two ranks
    parts = [batch.columns(index) for index in ranks]
    assert torch.equal(torch.cat([p.labels for p in parts], 1), batch.labels[:, torch.cat(ranks)])
    assert torch.equal(torch.cat([p.positions for p in parts], 1), batch.positions[:, torch.cat(ranks)])
    assert any(
        not torch.equal(p.labels, replace(p, labels=None).labels) for p in parts
    )  # shifting after the cut is wrong


# -------------------------------------------------------------------------------------- loss, optimizer, loop


def test_packed_documents_do_not_see_each_other():
    model = tiny().double()
    documents = [list(demonstrations(9))[i][0] for i in range(9)]
    packed = next(pretrain.pack([(ids, [1] * len(ids)) for ids in documents], 200, 1))
    rows = [packed, *(pretrain.lay_out([[(ids, None)]], len(ids), [0]) for ids in documents)]
    together, *alone = (pretrain.loss(model, row, 1.0)[1]["nll"].item() for row in rows)
    assert together == pytest.approx(sum(alone), rel=1e-6)


def test_only_what_the_model_wrote_is_learned():
    model = tiny().double()
    ids, mask = list(demonstrations(1))[0]
    batch = pretrain.lay_out([[(ids, mask)]], len(ids), [0])
    logp = model.lm_head(model(torch.tensor([ids]))).log_softmax(-1)[0, :-1]
    wanted = -sum(float(logp[t, ids[t + 1]]) for t in range(len(ids) - 1) if mask[t + 1])
    value, sums, _ = pretrain.loss(model, batch, 2.0)
    assert float(value) == pytest.approx(wanted / 2, rel=1e-9) and sums["targets"] == sum(mask[1:])


def gradients(model, micro_rows):
    batch = next(pretrain.pack(demonstrations(40), 40, 6))
    model.zero_grad()
    phase = Phase("p", 40, 6, 1, 1.0, micro_rows=micro_rows)
    value = pretrain._gradients(model, None, phase, batch, False, float)["loss"]
    return value, [p.grad.clone() for p in model.parameters()]


def test_micro_batches_do_not_change_the_gradient():
    model = tiny().double()
    value, whole = gradients(model, 0)
    for micro_rows in (1, 4):
        again, parts = gradients(model, micro_rows)
        assert again == pytest.approx(value, rel=1e-12)
        for a, b in zip(whole, parts):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-8)  # the router computes in fp32


def test_chunks_of_the_head_do_not_change_the_loss():
    model = tiny().double()
    batch = next(pretrain.pack(demonstrations(40), 40, 6))
    results = []
    for chunk in (4096, 7):
        model.zero_grad()
        value, _, _ = pretrain.loss(model, batch, 3.0, chunk)
        value.backward()
        results.append((value.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-7)


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    model = tiny()
    optimizer = pretrain.make_optimizer(
        [model, model.layers[0]], lr=0.1, weight_decay=0.5
    )  # given twice, placed once
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 0.95 if p.dim() > 1 else 1.0  # 1 − lr · decay, once
        torch.testing.assert_close(p, before[name] * factor)


def run(corpus, phase, stops, seed=0):
    """Train to the end, with a new process' worth of objects after every stop; returns what is compared."""
    cursor, saved, log = Cursor(), None, []
    for stop in stops:
        model = tiny()
        optimizer = pretrain.make_optimizer([model], phase.lr)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        batches = pretrain.code_batches(corpus, phase, cursor, seed)
        for metrics in itertools.islice(pretrain.train_phase(model, None, optimizer, phase, batches,
                                                             cursor.step), stop - cursor.step):
            cursor = cursor.after(metrics)
            log.append((metrics["loss"], metrics["grad_norm"], metrics["lr"], metrics["sample_ids"]))
        cursor, buffer = Cursor(**json.loads(json.dumps(asdict(cursor)))), io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return log, saved, cursor


def test_a_resumed_run_is_bit_identical_across_phases_of_the_schedule_and_epochs(corpus):
    per_epoch = corpus.n_train // 64 - 1
    rows = per_epoch // 3  # the third step crosses into the second epoch
    phase = Phase("p", 64, rows, 8, 3e-3, warmup=3, decay=0.4, mix={"code": 0.9, "track": 0.1})
    whole, resumed = run(corpus, phase, [8]), run(corpus, phase, [1, 4, 6, 8])
    assert whole[0] == resumed[0] and whole[2] == resumed[2]
    assert [i for *_, ids in whole[0] for i in ids] == list(range(8 * rows))
    assert whole[2] == Cursor(8, 8 * rows, 8 * rows * 64)
    for name, w in whole[1]["model"].items():
        assert torch.equal(w, resumed[1]["model"][name]), name
    for i, state in whole[1]["optimizer"]["state"].items():
        assert all(torch.equal(x, resumed[1]["optimizer"]["state"][i][key]) for key, x in state.items())
    assert run(corpus, phase, [8], seed=1)[0] != whole[0]


def test_training_learns_and_reports(corpus):
    phase = Phase("p", 64, 8, 30, 1e-2, warmup=3)
    model = tiny()
    batches = pretrain.code_batches(corpus, phase, Cursor(), 0)
    log = list(pretrain.train_phase(model, None, pretrain.make_optimizer([model], 1e-2), phase, batches))
    assert log[-1]["bits"] < log[0]["bits"] - 2 and log[-1]["bits"] == pytest.approx(log[-1]["loss"]
                                                                                     / math.log(2))
    assert all(m["tokens"] == 512 and 0 <= m["data_seconds"] < m["seconds"] for m in log)
    assert any(m.gate.e_score_correction_bias.abs().sum() > 0 for m in model.modules() if isinstance(m,
                                                                                                     moe.MoE))


def test_a_loss_that_is_not_finite_stops_before_the_weights(corpus):
    phase = Phase("p", 64, 2, 5, 1e-3)
    model = tiny()
    steps = pretrain.train_phase(model, None, pretrain.make_optimizer([model], 1e-3), phase,
                                 pretrain.code_batches(corpus, phase, Cursor(), 0))
    next(steps)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(FloatingPointError, match=r"step 1: loss nan.*samples \[2, 3\]"):
        next(steps)
    assert all(torch.equal(p.nan_to_num(7), before[name].nan_to_num(7)) for name,
               p in model.named_parameters())


def test_a_parameter_without_a_gradient_is_noticed(corpus):
    phase, model = Phase("p", 64, 2, 5, 1e-3), tiny()
    model.unused = torch.nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="2 of"):
        next(pretrain.train_phase(model, None, pretrain.make_optimizer([model], 1e-3), phase,
                                  pretrain.code_batches(corpus, phase, Cursor(), 0)))


def test_spikes_are_reported(corpus):
    assert pretrain.spike([1.0] * 8, 1.6, 1.5) and not pretrain.spike([1.0] * 8, 1.4, 1.5)
    assert not pretrain.spike([1.0] * 7, 9.0, 1.5)
    phase, model = Phase("p", 64, 2, 12, 1e-3), tiny()
    steps = pretrain.train_phase(model, None, pretrain.make_optimizer([model], 1e-3), phase,
                                 pretrain.code_batches(corpus, phase, Cursor(), 0))
    assert all(not m["spike"] for m in itertools.islice(steps, 10))
    with torch.no_grad():
        model.lm_head.weight *= 30
    assert "loss" in next(steps)["spike"]


def test_bf16_trains_close_to_fp32(corpus):
    finals = []
    for precision in ("fp32", "bf16"):
        phase, model = Phase("p", 64, 4, 5, 3e-3, precision=precision), tiny()
        batches = pretrain.code_batches(corpus, phase, Cursor(), 0)
        finals.append(list(pretrain.train_phase(model, None, pretrain.make_optimizer([model], 3e-3), phase,
                                                batches))[-1]["loss"])
    assert finals[0] != finals[1] and finals[0] == pytest.approx(finals[1], rel=0.02)


def test_mtp_needs_its_layers(corpus):
    phase, model = Phase("p", 64, 2, 5, 1e-3, mtp="joint"), tiny()
    with pytest.raises(ValueError, match="MTP layers"):
        next(pretrain.train_phase(model, None, pretrain.make_optimizer([model], 1e-3), phase, iter(())))


@needs_mtp
def test_the_mtp_phase_leaves_the_model_alone_and_the_joint_one_trains_both(corpus):
    model = tiny()
    heads = mtp.MTP(TINY, 1)
    optimizer = pretrain.make_optimizer([model, heads], 1e-2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    heads_before = [p.detach().clone() for p in heads.parameters()]
    only = Phase("mtp", 64, 4, 6, 1e-2, mtp="only")
    log = list(pretrain.train_phase(model, heads, optimizer, only,
                                    pretrain.code_batches(corpus, only, Cursor(), 0)))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(not torch.equal(p, q) for p, q in zip(heads.parameters(), heads_before))
    assert any(name.startswith("mtp_") for name in log[0])
    assert all(
        int(m.gate.load.sum()) == 0 for m in model.modules() if isinstance(m, moe.MoE)
    )  # nothing to balance
    joint = Phase("joint", 64, 4, 4, 1e-2, mtp="joint", mtp_every=2)
    log = list(pretrain.train_phase(model, heads, optimizer, joint,
                                    pretrain.code_batches(corpus, joint, Cursor(), 0)))
    assert [any(name.startswith("mtp_") for name in m) for m in log] == [True, False, True, False]
    assert any(not torch.equal(t, before[name]) for name, t in model.state_dict().items())


# --------------------------------------------------------------------------------------------------- measures


class Bigram(torch.nn.Module):
    """A model without context: logits depend on the token before alone."""

    def __init__(self, size: int, scale: float = 1.0):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(size, size, generator=g) * scale)
        self.lm_head = torch.nn.Identity()
        self.config = TINY

    def forward(self, tokens):
        return self.table[tokens]


def test_the_codebase_loss_scores_every_token_once_for_any_window_and_stride():
    model, ids = Bigram(40), np.random.default_rng(0).integers(0, 40, 101)
    logp = model.table.double().log_softmax(-1)
    wanted = -sum(float(logp[a, b]) for a, b in zip(ids, ids[1:]))
    for window, stride, batch in ((16, 8, 8), (16, 16, 3), (16, 1, 8), (7, 5, 2), (100, 50, 8), (500, 3, 8),
                                  (99, 99, 1)):
        result = pretrain.codebase_nll(model, ids, 100, window, stride, batch)
        assert result["nll"] == pytest.approx(wanted, rel=1e-6) and result["tokens"] == 100, (window, stride)
    assert result["bpb"] == pytest.approx(wanted / 100
                                          / math.log(2)) and result["ppl"] == pytest.approx(math.exp(wanted
                                                                                                     / 100))
    for bad in (dict(window=8, stride=9), dict(window=8, stride=-1)):
        with pytest.raises(ValueError, match="stride"):
            pretrain.codebase_nll(model, ids, 100, **bad)
    with pytest.raises(ValueError, match="0 tokens"):
        pretrain.codebase_nll(model, ids[:1], 0, 8)


def test_a_shorter_stride_gives_context_to_a_model_that_uses_it():
    """With stride 1 every token sees a full window: equal to asking for each of them alone."""
    model, ids = tiny().double(), np.random.default_rng(1).integers(0, 256, 41)
    got = pretrain.codebase_nll(model, ids, 40, window=12, stride=1)["nll"]
    wanted = 0.0
    for t in range(1, 41):
        context = torch.tensor(ids[max(0, t - 12) : t + 1]).unsqueeze(0)
        wanted += float(F.cross_entropy(model.lm_head(model(context[:, :-1]))[:, -1], context[:, -1]))
    assert got == pytest.approx(wanted, rel=1e-9)


def test_a_guess_costs_log2_of_the_vocabulary_everywhere(corpus):
    model, bits = Bigram(272, scale=0.0), math.log2(272)
    assert pretrain.loss_by_position(model, corpus.joined()[0], (0, 8, 64, 127)) == pytest.approx([bits] * 3)
    assert pretrain.recall_by_distance(model, corpus, (5, 50), n=3) == pytest.approx({5: bits, 50: bits})


def test_recall_asks_for_the_name_that_was_defined(corpus, monkeypatch):
    pairs = []
    monkeypatch.setattr(pretrain, "_answer_nll", lambda model,
                        asked: pairs.extend(asked) or [0.0] * len(asked))
    pretrain.recall_by_distance(None, corpus, (30,), n=4)
    for asked, answer in pairs:
        text = Bytes().decode(asked[1:])
        assert (asked[0] == 257 and text.startswith(f"KEY={Bytes().decode(answer)}\n")
                and text.endswith("\nKEY="))
        assert len(asked) == 1 + 11 + 30 + 5


def test_track_documents_end_with_the_file_that_their_diffs_make():
    for i in range(60):
        prompt, result = pretrain.track_document(str(i), 1 + i % 9, i % 7)
        before, diffs, _ = prompt.split("---\n")
        lines = before.splitlines()
        changes, k = diffs.splitlines(), 0
        while k < len(changes):  # read as a patch would be
            at = lines.index(changes[k][1:])
            plus = changes[k + 1][1:] if k + 1 < len(changes) and changes[k + 1][0] == "+" else None
            if changes[k][0] == " ":
                lines.insert(at + 1, plus)
            else:
                lines[at : at + 1] = [] if plus is None else [plus]
            k += 1 if plus is None else 2
        assert "".join(f"{line}\n" for line in lines) + "---\n" == result


def test_track_rows_are_full_and_ask_only_for_results():
    for index in range(20):
        ids, mask = pretrain.track_row(Bytes(), 0, index, 256)
        assert len(ids) == len(mask) == 256 and (ids, mask) == pretrain.track_row(Bytes(), 0, index, 256)
        wanted = [bytes(i for i, _ in group).decode() for m,
                  group in itertools.groupby(zip(ids, mask), lambda x: x[1]) if m]
        assert all(text.endswith("---\n") and "+" not in text for text in wanted[:-1]) and 257 in ids
    assert pretrain.track_row(Bytes(), 0, 0, 256) != pretrain.track_row(Bytes(), 1, 0, 256)


def test_edit_distance():
    cases = [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "abc", 0), ("flaw", "lawn", 2),
             ("ab", "ba", 2)]
    assert [pretrain.edit_distance(a, b) for a, b, _ in cases] == [d for *_, d in cases]
    assert [pretrain.edit_distance(b, a) for a, b, _ in cases] == [d for *_, d in cases]


def test_completions_equal_those_without_a_cache():
    model, prompts = tiny(), [ids for ids, _ in demonstrations(6)]
    out = pretrain.complete(model, prompts, 5)
    for prompt, ids in zip(prompts, out):
        text = list(prompt)
        for _ in range(5):
            text.append(int(model.lm_head(model(torch.tensor([text])))[0, -1].argmax()))
        assert text[len(prompt) :] == ids


def test_state_tracking_scores_a_perfect_reader_zero_and_one_that_ignores_edits_as_unread(monkeypatch):
    tokenizer, truth = Bytes(), {}
    for k in (0, 2):
        for i in range(5):
            prompt, result = pretrain.track_document(f"0/state tracking/{k}/{i}", 4, k)
            truth[prompt] = result

    def answer(choose):
        def complete(model, prompts, n):
            texts = [tokenizer.decode(p[1:]) for p in prompts]
            return [(tokenizer.encode(choose(t)) + [0] * n)[: max(n, 1) + 20] for t in texts]

        return complete

    monkeypatch.setattr(pretrain, "complete", answer(lambda prompt: truth[prompt]))
    scores = pretrain.state_tracking(None, tokenizer, (0, 2), n=5, n_lines=4)
    assert scores[0] == (0, 0) and scores[2][0] == 0 < scores[2][1]
    monkeypatch.setattr(pretrain, "complete", answer(lambda prompt: prompt))
    assert all(a == b for a, b in pretrain.state_tracking(None, tokenizer, (0, 2), n=5, n_lines=4).values())


def test_the_probe_finds_what_was_learned():
    sources = [f"def {a}_{b}({', '.join(rng.sample('abcdefghij', 3))}):\n    pass\n"
               for rng in [random.Random(0)] for a in ("load", "save", "find") for b in ("user", "file",
                                                                                         "page", "item")]
    seen, unseen = sources[:10], sources
    model = tiny()
    assert 0 <= pretrain.knowledge_probe(model, Bytes(), unseen, n=12) <= 0.6
    rows = [([257, *Bytes().encode(text)], [1] * (len(text) + 1)) for text in seen]
    phase = Phase("p", 48, 10, 80, 1e-2, warmup=5)
    batches = (next(pretrain.pack(rows, 48, 10)) for _ in itertools.count())
    for _ in pretrain.train_phase(model, None, pretrain.make_optimizer([model], 1e-2), phase, batches):
        pass
    assert pretrain.knowledge_probe(model, Bytes(), seen, n=10) >= 0.9
    with pytest.raises(ValueError, match="too few"):
        pretrain.knowledge_probe(model, Bytes(), sources[:2])


def test_the_probe_offers_different_signatures(monkeypatch):
    sources, pairs = [f"def f{i}(a{i % 4}):\n    pass\n" for i in range(8)], []
    monkeypatch.setattr(pretrain, "_answer_nll", lambda model,
                        asked: pairs.extend(asked) or [0.0] * len(asked))
    pretrain.knowledge_probe(tiny(), Bytes(), sources, n=8)
    for k in range(0, len(pairs), 4):
        name, answers = Bytes().decode(pairs[k][0][1:]), [Bytes().decode(a) for _, a in pairs[k : k + 4]]
        assert len(set(answers)) == 4 and answers[0] == f"a{int(name[5]) % 4}):"


def test_the_log_linear_fit_gives_the_worked_numbers():
    """Held-out bits/byte of a toy run; slope, R² and residuals computed by hand."""
    slope, intercept, r2, residuals = pretrain.log_linear_fit([51e3, 102e3, 205e3, 410e3, 819e3],
                                                              [3.84, 3.32, 2.83, 2.43, 2.15])
    assert slope == pytest.approx(-1.42, abs=0.01) and r2 == pytest.approx(0.987, abs=0.001)
    assert residuals == pytest.approx([0.07, -0.02, -0.08, -0.06, 0.09], abs=0.011)
    assert pretrain.log_linear_fit([1, 10, 100], [3, 2, 1])[:3] == pytest.approx((-1, 3, 1))
    with pytest.raises(ValueError, match="two token counts"):
        pretrain.log_linear_fit([5, 5], [1, 2])


def test_flops_count_the_active_matrices_and_the_causal_half():
    c = TINY
    attention = 32 * 16 + 16 * 2 * 16 + 32 * 24 + 16 * 2 * 24 + 2 * 16 * 32
    dense, sparse = 3 * 32 * 64, 4 * 32 + 3 * 32 * 16 * (2 + 1)
    scores = 3 * 2 * c.n_heads * (8 + 8 + 16) * 100 / 2 * c.n_layers
    assert pretrain.flops_per_token(tiny(), 100) == 6 * (2 * attention + dense + sparse + 272 * 32) + scores


@pytest.mark.slow
def test_the_bench_ends_with_one_line_of_json():
    out = subprocess.run([sys.executable, pretrain.__file__, "--bench"], capture_output=True, text=True,
                         check=True).stdout
    result = json.loads(out.splitlines()[-1])
    assert {"vs_transformers", "data_share", "utilisation"} <= set(result) and result["data_share"] < 0.02
