"""kernels.py by property: formats on worked numbers and edge cases, routing and experts against plain loops, every kernel
against torch in Triton's interpreter, and what the compiler makes of the kernels for real chips."""
# ruff: noqa: E741
import math
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import kernels as K
from kernels import Tile

TRITON = K.triton is not None
interpreted = pytest.mark.skipif(not K.INTERPRETED, reason="run by the tests that call interpret()")
compiled = pytest.mark.skipif(not TRITON or bool(K.INTERPRETED), reason="needs Triton's compiler")
SMALL = (Tile(32, 32, 32, 4, 1),) * 3            # small blocks, so that small sizes meet ragged edges


def same(a, b):
    """Dtype for dtype and bit for bit, NaN equal to NaN."""
    assert a.dtype == b.dtype
    if a.dtype in (torch.uint8, torch.float8_e4m3fn):
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)) and torch.equal(a.isnan(), b.isnan())


def loop(x, ids, weights, w_gate_up, w_down):
    """The layer, one token and expert at a time."""
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[t])
        for j, e in enumerate(ids[t].tolist()):
            gate, up = (w_gate_up[e] @ x[t]).chunk(2)
            y = y + weights[t, j] * (w_down[e] @ (F.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows) if rows else x * 0


def draw(seed, T, E, k, D, I, dtype=torch.float32, spare=0):
    """Leaves (x, weights, w_gate_up, w_down) and ids; the last `spare` experts get no token."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E - spare, generator=g).argsort(1)[:, :k]
    shapes = ((T, D), 1), ((E, 2 * I, D), D), ((E, D, I), I)
    x, w1, w2 = (torch.randn(*s, generator=g, dtype=torch.float64) / fan ** 0.5 for s, fan in shapes)
    leaves = [v.to(dtype).requires_grad_() for v in (x, torch.rand(T, k, generator=g, dtype=torch.float64), w1, w2)]
    return ids, leaves


# ------------------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize("values, byte, codes", [
    ([1, -2.5, 0.3, 500, 0.001, -7], 128, "30 BA 22 78 00 C6"),
    ([300, 1, -0.3, 0], 127, "79 38 AA 00"),
    ([448, 17, 19, -0.0], 127, "7E 58 5A 80"),
    ([896, 3], 128, "7E 3C")])
def test_mxfp8_worked_examples(values, byte, codes):
    x = torch.zeros(32)
    x[:len(values)] = torch.tensor(values)
    got, scale = K.mxfp8_quantise(x)
    assert scale.item() == byte
    assert got.view(torch.uint8)[:len(values)].tolist() == list(bytes.fromhex(codes))


def test_mxfp8_exponent_is_the_smallest_that_never_clips():
    amax = torch.cat((torch.exp2(torch.arange(-120.0, 119)), 448 * torch.exp2(torch.arange(-110.0, 110)), torch.rand(1000) * 1e3))
    for x in (amax, torch.nextafter(amax, torch.tensor(math.inf)), torch.nextafter(amax, torch.tensor(0.0))):
        block = torch.zeros(len(x), 32)
        block[:, 0] = x
        _, byte = K.mxfp8_quantise(block)
        scale = torch.exp2(byte.double().flatten() - 127)
        assert (x.double() <= 448 * scale).all()
        assert ((x.double() > 448 * scale / 2) | (byte.flatten() == 0)).all()


def test_mxfp8_edge_cases():
    x = torch.zeros(6, 32)
    x[1, 0], x[2, :2], x[3, 0] = math.nan, torch.tensor([math.inf, 1e36]), -math.inf
    x[4, :2] = torch.tensor([1e-45, -1e-40])                                              # subnormals
    x[5, :2] = torch.tensor([3.4e38, -0.0])
    codes, scales = K.mxfp8_quantise(x)
    back = K.mxfp8_dequantise(codes, scales)
    assert scales.flatten().tolist() == [0, 255, 247, 247, 0, 247]
    assert not back[0].any() and back[1].isnan().all()
    assert back[2, 0] == math.inf and 0.9e36 < back[2, 1] < 1.1e36 and back[3, 0] == -math.inf
    assert back[4].isfinite().all() and torch.signbit(back[5, 1])


def test_mxfp8_is_idempotent_and_close():
    x = torch.randn(64, 256) * torch.exp(3 * torch.randn(64, 1))
    once = K.mxfp8_dequantise(*K.mxfp8_quantise(x))
    assert same(K.mxfp8_dequantise(*K.mxfp8_quantise(once)), once)
    assert 0.02 < ((once - x).norm() / x.norm()).item() < 0.03


def test_pack_is_33_bytes_for_32_values_and_loses_nothing_more():
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16)
    packed = K.mxfp8_pack(x)
    assert packed.shape == (3, 5, 66) and packed.dtype == torch.uint8
    assert same(K.mxfp8_unpack(packed, torch.float32), K.mxfp8_dequantise(*K.mxfp8_quantise(x)))
    with pytest.raises(ValueError, match="multiple of 33"):
        K.mxfp8_unpack(packed[..., :65])


def test_nvfp4_worked_example():
    x = torch.tensor([.1, -.2, .35, .5, .75, -1, 1.5, 2, -3, 0, .05, .6, 1.1, -1.7, 2.4, 3])
    codes, s, g = K.nvfp4_quantise(x)
    assert bytes(codes.tolist()) == bytes.fromhex("9021C3650F20D476")
    assert s.item() == 448 and g.item() == float.fromhex("0x1.24924ap-10")
    want = torch.tensor([0, -.25, .25, .5, .75, -1, 1.5, 2, -3, 0, 0, .5, 1, -1.5, 2, 3])
    torch.testing.assert_close(K.nvfp4_dequantise(codes, s, g), want, rtol=1e-6, atol=0)


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert K._e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert K._e2m1(torch.nextafter(ties, torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert K._e2m1(torch.nextafter(ties, torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_nvfp4_edge_cases():
    x = torch.ones(7, 32)
    x[0] = 0
    x[1, 0], x[2, 0] = math.nan, -math.inf
    x[3, :16], x[3, 16:] = 1e-3, 0                                                        # a block of zeros
    x[4, :16] = 1e9                                                                       # the other block underflows
    x[5], x[6] = 1e-44, -0.0
    codes, s, g = K.nvfp4_quantise(x)
    back = K.nvfp4_dequantise(codes, s, g)
    assert not codes[0].any() and not back[0].any() and g[0] == 0
    assert back[1].isnan().all() and back[2].isnan().all()
    assert not back[3, 16:].any() and back[3, 0].item() == pytest.approx(1e-3, rel=1e-6)
    assert back[4, 0].item() == pytest.approx(1e9, rel=1e-6) and not back[4, 16:].any()
    assert back[5].isfinite().all() and torch.signbit(back[6]).all()
    assert s[3:].float().isfinite().all()


def test_per_token_scale_ignores_the_neighbours_and_per_tensor_does_not():
    x = torch.tensor([.1, -.2, .35, .5, .75, -1, 1.5, 2, -3, 0, .05, .6, 1.1, -1.7, 2.4, 3]).unsqueeze(0)
    alone = K.nvfp4_quantise(x)
    for factor in (1e2, 1e5, 1e6, math.nan):
        both = K.nvfp4_quantise(torch.cat((x, factor * x)))
        assert all(same(a, b[:1]) for a, b in zip(alone, both))
    halves = torch.stack((alone[0] & 15, alone[0] >> 4))
    codes = K.nvfp4_quantise(torch.cat((x, 1e5 * x)), "tensor")[0][:1]
    assert (torch.stack((codes & 15, codes >> 4)) != halves).sum() == 5
    assert not K.nvfp4_dequantise(*K.nvfp4_quantise(torch.cat((x, 1e6 * x)), "tensor"))[0].any()


def test_approximate_division_gives_other_codes():
    s = torch.tensor(1.875)
    for x, exact, fast in ((2.34375, 2, 3), (4.6875, 4, 5), (9.375, 6, 7)):
        assert (K._e2m1(torch.tensor(x) / s), K._e2m1(torch.tensor(x) * (1 / s))) == (exact, fast)
    assert K.lesson_division(400_000) > 0


def test_leak_through_a_per_tensor_scale_in_time_and_batch():
    assert K.lesson_leak() == {"tensor": (63, 64), "token": (0, 0)}


def test_formats_refuse():
    for f, size in ((K.mxfp8_quantise, 32), (K.nvfp4_quantise, 16)):
        with pytest.raises(ValueError, match=f"40, is no multiple of the block of {size}"):
            f(torch.ones(2, 40))
    with pytest.raises(ValueError, match="'row'"):
        K.nvfp4_quantise(torch.ones(32), "row")


# ------------------------------------------------------------------------------------------------------------ routing


def test_route_worked_example():
    ids, w, s = K.route(torch.tensor([[2.0, 1, 0, -1]]), torch.tensor([0.0, 0, 0, 1]), 2, 2.827)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(w, torch.tensor([[0.6612785, 2.1657214]]))
    torch.testing.assert_close(s, torch.sigmoid(torch.tensor([[2.0, 1, 0, -1]])))


@pytest.mark.parametrize("E, k", [(8, 2), (64, 8), (384, 8), (3, 3)])
def test_route_is_a_stable_sort_with_ties(E, k):
    g = torch.Generator().manual_seed(E)
    logits = torch.randint(-2, 3, (50, E), generator=g).float()                           # many equals
    bias = torch.randint(-1, 2, (E,), generator=g) / 8
    ids, w, s = K.route(logits, bias, k)
    want = (s + bias).sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(ids, want)
    torch.testing.assert_close(w.sum(1), torch.ones(50))
    torch.testing.assert_close(K.route(logits, bias, k, normalise=False)[1], s.gather(1, want))


def test_route_nan_row_stays_alone():
    logits = torch.stack((torch.full((8,), math.nan), torch.arange(8.0), torch.full((8,), -math.inf)))
    ids, w, _ = K.route(logits, torch.zeros(8), 2)
    assert ids[1].tolist() == [7, 6] and len(set(ids[0].tolist())) == 2 and len(set(ids[2].tolist())) == 2
    assert w[0].isnan().all() and torch.equal(w[1], K.route(logits[1:2], torch.zeros(8), 2)[1][0])
    assert K.plan(ids, 8).counts.sum() == 6


def choose_last(backend):
    """A NaN, and an expert that the bias forbids, come last, and still no expert comes twice."""
    ids, _, _ = K.route(torch.tensor([[math.nan, 1, 2, 3]]), torch.zeros(4), 2, backend=backend)
    assert ids.tolist() == [[3, 2]]
    ids, _, _ = K.route(torch.tensor([[0.0, 1, 2, 3]]), torch.tensor([0, -math.inf, -math.inf, -math.inf]), 3, backend=backend)
    assert ids.tolist() == [[0, 1, 2]]


def test_route_what_cannot_be_compared_comes_last():
    choose_last("torch")


def test_route_gradient():
    torch.manual_seed(0)
    logits = torch.randn(4, 6, requires_grad=True)
    weights = K.route(logits, torch.zeros(6), 3, 2.0)[1]
    (gradient,) = torch.autograd.grad((weights * torch.arange(12.0).view(4, 3)).sum(), logits)
    step = 1e-2 * torch.randn(4, 6)
    up, down = (K.route((logits + s).detach(), torch.zeros(6), 3, 2.0)[1] for s in (step, -step))
    numeric = ((up - down) * torch.arange(12.0).view(4, 3)).sum() / 2
    assert ((gradient * step).sum() - numeric).abs() < 1e-3


def test_route_refuses():
    with pytest.raises(ValueError, match="k = 9"):
        K.route(torch.zeros(2, 8), torch.zeros(8), 9)
    with pytest.raises(ValueError, match="bias"):
        K.route(torch.zeros(2, 8), torch.zeros(7), 2)


def test_plan_and_combine():
    ids = torch.tensor([[2, 0], [0, 3], [2, 0]])
    p = K.plan(ids, 5)
    assert p.order.tolist() == [1, 2, 5, 0, 4, 3] and p.rows.tolist() == [0, 1, 2, 0, 2, 1]
    assert p.counts.tolist() == [3, 0, 2, 1, 0] and p.offsets.tolist() == [0, 3, 3, 5, 6, 6]
    assert torch.equal(p.order[p.inverse], torch.arange(6))
    y, w = torch.randn(6, 4), torch.rand(3, 2)
    torch.testing.assert_close(K.combine(y, p.inverse, w, 2), (y[p.inverse].view(3, 2, 4) * w.unsqueeze(2)).sum(1))


def test_tile_map_covers_every_row_once():
    rng = random.Random(0)
    for _ in range(50):
        E, block = rng.randint(1, 9), rng.choice([4, 16])
        counts = torch.tensor([rng.choice([0, 0, 1, rng.randint(0, 40)]) for _ in range(E)])
        S = int(counts.sum())
        if not S:
            continue
        p = K.plan(torch.repeat_interleave(torch.arange(E), counts).unsqueeze(1), E)
        expert, start = K.tile_map(p, block)
        rows = [(e, r) for e, s in zip(expert.tolist(), start.tolist()) if e >= 0
                for r in range(s, min(s + block, int(p.offsets[e + 1])))]
        assert rows == [(e, r) for e in range(E) for r in range(int(p.offsets[e]), int(p.offsets[e + 1]))]
        columns, offsets = K.padded_columns(p)
        assert columns[columns >= 0].tolist() == list(range(S)) and not (offsets % 32).any()
        assert len(columns) % 32 == 0 and int(offsets[-1]) <= len(columns)


# ------------------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("T, E, k, D, I, spare", [(17, 8, 2, 8, 4, 3), (1, 20, 4, 8, 8, 0), (9, 1, 1, 16, 8, 0), (0, 4, 2, 8, 8, 0),
                                                  (12, 5, 2, 6, 10, 1)])
def test_experts_equal_a_loop_in_float64(T, E, k, D, I, spare):
    ids, leaves = draw(T, T, E, k, D, I, torch.float64, spare)
    out, want = (f(leaves[0], ids, *leaves[1:]) for f in (K.experts, loop))
    torch.testing.assert_close(out, want)
    assert out.shape == (T, D)
    dy = torch.randn(T, D, dtype=torch.float64)
    if T:
        for a, b in zip(torch.autograd.grad(out, leaves, dy), torch.autograd.grad(want, leaves, dy, allow_unused=True)):
            torch.testing.assert_close(a, b)
    else:
        assert not any(v.any() for v in torch.autograd.grad(out, leaves, dy))


def test_experts_without_tokens_get_exactly_zero_gradient():
    ids, leaves = draw(1, 24, 6, 2, 16, 8, spare=2)
    gradients = torch.autograd.grad(K.experts(leaves[0], ids, *leaves[1:]).sum(), leaves)
    assert not gradients[2][4:].any() and not gradients[3][4:].any() and all(v.isfinite().all() for v in gradients)


def test_experts_take_any_strides_and_are_deterministic():
    ids, (x, w, w1, w2) = draw(2, 40, 8, 2, 32, 16)
    strided = x.detach().t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(K.experts(strided, ids, w, w1, w2), K.experts(x, ids, w, w1, w2))
    first, second = (torch.autograd.grad(K.experts(x, ids, w, w1, w2).sum(), (x, w, w1, w2)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_grouped_experts_equal_experts():
    ids, (x, w, w1, w2) = draw(3, 30, 5, 2, 16, 8, torch.float64, spare=1)
    p = K.plan(ids, 5)
    rows = x[p.rows]
    y = K.grouped_experts(rows, p.counts, w1, w2)
    a, b = K.combine(y.detach(), p.inverse, w.detach(), 2), K.experts(x, ids, w, w1, w2)
    torch.testing.assert_close(a, b)
    mixed = (y[p.inverse].view(30, 2, -1) * w.unsqueeze(2)).sum(1)
    for u, v in zip(torch.autograd.grad(mixed.sum(), (x, w, w1, w2)), torch.autograd.grad(b.sum(), (x, w, w1, w2))):
        torch.testing.assert_close(u, v)


def test_tiny_layer_by_hand():
    w1 = (torch.arange(1, 25).view(3, 4, 2) / 10).requires_grad_()
    w2 = (torch.arange(1, 13).view(3, 2, 2) / 10).requires_grad_()
    logits, x = torch.tensor([[1.0, 0, -1], [1, 0, -1], [0, 1, -1]]), torch.tensor([[1, 2], [-1, .5], [.5, -1]], requires_grad=True)
    ids, w, _ = K.route(logits, torch.zeros(3), 2)
    y = K.experts(x, ids, w, w1, w2)
    torch.testing.assert_close(y, torch.tensor([[6.4367609, 8.9375868], [.0534533, .0737033], [.1173195, .1637247]]))
    dx, d1 = torch.autograd.grad(y.sum(), (x, w1))
    torch.testing.assert_close(dx[0], torch.tensor([10.2559643, 11.2322540]))
    torch.testing.assert_close(d1[0, 0], torch.tensor([.3104702, .6099200]))
    assert not d1[2].any()


@pytest.mark.parametrize("precision, low, high", [("mxfp8", 0.01, 0.08), ("nvfp4", 0.05, 0.25)])
def test_low_precision_is_near_but_not_equal(precision, low, high):
    ids, leaves = draw(4, 96, 4, 2, 64, 32)
    exact, rough = (K.experts(leaves[0], ids, *leaves[1:], p) for p in ("native", precision))
    assert low < ((exact - rough).norm() / exact.norm()).item() < high
    for a, b in zip(torch.autograd.grad(exact.sum(), leaves), torch.autograd.grad(rough.sum(), leaves)):
        assert 0 < ((a - b).norm() / a.norm()).item() < high


@pytest.mark.parametrize("precision", K.PRECISIONS)
def test_a_token_alone_and_in_a_batch(precision):
    ids, (x, *rest) = draw(5, 16, 4, 2, 64, 32)
    big = torch.cat((x[:1], 1e5 * x[1:])).detach()
    alone, among = (K.experts(v[:n], ids[:n], rest[0][:n], *rest[1:], precision)[0] for v, n in ((x, 1), (big, 16)))
    torch.testing.assert_close(alone, among, rtol=1e-5, atol=1e-6)


def test_low_precision_training_stays_near_native():
    curves = K.lesson_training(steps=41)
    final = {name: sum(curve[-5:]) / 5 for name, curve in curves.items()}
    assert final["native"] < 0.75 * curves["native"][0]
    assert abs(final["mxfp8"] / final["native"] - 1) < 0.03 and abs(final["nvfp4"] / final["native"] - 1) < 0.08


def test_experts_refuse():
    ids, (x, w, w1, w2) = draw(6, 4, 4, 2, 48, 16)
    for match, call in {"w_gate_up must be": lambda: K.experts(x, ids, w, w1[:, :-2], w2),
                        "both be": lambda: K.experts(x, ids[:, :1], w, w1, w2),
                        "multiples of 32": lambda: K.experts(x, ids, w, w1, w2, "nvfp4"),
                        "'fp8'": lambda: K.experts(x, ids, w, w1, w2, "fp8"),
                        "cast them": lambda: K.experts(x.bfloat16(), ids, w, w1, w2),
                        "number per expert": lambda: K.grouped_experts(x, torch.tensor([4]), w1, w2),
                        "'cuda'": lambda: K.experts(x, ids, w, w1, w2, backend="cuda")}.items():
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.skipif(torch.cuda.is_available() or bool(K.INTERPRETED), reason="for machines without a GPU")
def test_choice_is_told_and_forcing_what_cannot_be_fails():
    code = ("import torch, kernels; x, b = torch.randn(4, 8), torch.zeros(8); kernels.route(x, b, 2); kernels.route(x, b, 2);"
            "kernels.route(x, torch.zeros(8), 2, backend='triton')")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(K.__file__))
    reason = "no CUDA device" if TRITON else "Triton is not installed"
    assert run.returncode and run.stderr.count(f"kernels: torch ({reason})") == 1
    assert f"backend = 'triton' cannot be had: {reason}" in run.stderr


def test_works_without_triton():
    code = ("import sys; sys.modules['triton'] = None; import torch, kernels;"
            "i, w, _ = kernels.route(torch.randn(4, 8), torch.zeros(8), 2);"
            "print(kernels.experts(torch.randn(4, 32), i, w, torch.randn(8, 64, 32), torch.randn(8, 32, 32), 'nvfp4').shape)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(K.__file__))
    assert run.stdout.strip() == "torch.Size([4, 32])" and "Triton is not installed" in run.stderr


# ---------------------------------------------------------------------------------------- the kernels, interpreted


def interpret(*selection):
    """Whether kernels are interpreted is settled when Triton is imported, hence a process of its own."""
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__, "-k", "interpreted", "-W", "ignore", *selection],
                         env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


@compiled
def test_every_kernel_in_the_interpreter():
    interpret("-m", "not slow")


@compiled
@pytest.mark.slow
def test_bench_script_and_large_offsets_in_the_interpreter():
    interpret("-m", "slow")


def awkward(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(19, 96, generator=g) * torch.exp(4 * torch.randn(19, 1, generator=g))
    x[3] = 0
    x[4] *= 1e-40
    x[5, :32], x[6, 40], x[7, 1], x[8, 95], x[9, 0] = 3e38, math.nan, math.inf, -math.inf, -0.0
    x[10, 16:32] = 2.34375                                                                # ties of both formats
    x[11, :32] = torch.arange(-16, 16)
    return x.to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interpreted_formats_equal_torch_bit_for_bit(dtype):
    x = awkward(dtype)
    a, b = (K.mxfp8_quantise(x, v) for v in ("torch", "triton"))
    assert same(a[0], b[0]) and same(a[1], b[1])
    assert same(*(K.mxfp8_dequantise(*a, v) for v in ("torch", "triton")))
    assert same(*(K.mxfp8_pack(x, v) for v in ("torch", "triton")))
    for outer, rows in (("token", x), ("tensor", x[9:]), ("tensor", x)):
        a, b = (K.nvfp4_quantise(rows, outer, v) for v in ("torch", "triton"))
        assert all(same(u, v) for u, v in zip(a, b))
        assert same(*(K.nvfp4_dequantise(*a, v) for v in ("torch", "triton")))


@interpreted
def test_interpreted_mxfp8_on_every_code_and_midpoint():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    x = torch.cat((grid, -grid, middle, -middle, torch.nextafter(middle, torch.tensor(0.0)), torch.randn(389) * 100))
    x = F.pad(x, (0, -len(x) % 31)).view(-1, 31).clamp(-448, 448)
    x = F.pad(x, (1, 0), value=448.0)                                                     # fixes the scale at 1
    assert same(*(K.mxfp8_quantise(x, v)[0] for v in ("torch", "triton")))


@interpreted
@pytest.mark.parametrize("T, E, k", [(37, 8, 2), (5, 384, 8), (9, 3, 3), (1, 1, 1)])
def test_interpreted_routing(T, E, k):
    g = torch.Generator().manual_seed(T)
    logits = (torch.randint(-3, 4, (T, E), generator=g) / 2).requires_grad_()             # with ties
    bias = torch.randn(E, generator=g).round() / 4
    a, b = (K.route(logits, bias, k, 2.827, backend=v) for v in ("torch", "triton"))
    assert torch.equal(a[0], b[0])
    torch.testing.assert_close(a[1], b[1])
    torch.testing.assert_close(a[2], b[2])
    dw, ds = torch.randn(T, k, generator=g), torch.randn(T, E, generator=g)
    gradients = [torch.autograd.grad((v[1] * dw).sum() + (v[2] * ds).sum(), logits)[0] for v in (a, b)]
    torch.testing.assert_close(*gradients)
    for u, v in zip(K.plan(a[0], E, "torch"), K._plan_triton(a[0].flatten(), k, E, 16)):
        assert torch.equal(u, v)
    y = torch.randn(T * k, 70, generator=g)
    torch.testing.assert_close(*(K.combine(y, K.plan(a[0], E).inverse, a[1].detach(), k, v) for v in ("torch", "triton")))


@interpreted
def test_interpreted_route_with_nan():
    logits = torch.stack((torch.full((8,), math.nan), torch.arange(8.0)))
    ids, w, _ = K.route(logits, torch.zeros(8), 2, backend="triton")
    assert ids[1].tolist() == [7, 6] and len(set(ids[0].tolist())) == 2 and w[0].isnan().all() and w[1].isfinite().all()
    choose_last("triton")


CASES = [("native", torch.float32, 23, 5, 2, 40, 24, 1), ("native", torch.float32, 3, 4, 4, 8, 8, 0),
         ("native", torch.float32, 1, 1, 1, 33, 7, 0), ("native", torch.bfloat16, 23, 4, 2, 64, 32, 1),
         ("mxfp8", torch.float32, 40, 3, 2, 64, 32, 1), ("nvfp4", torch.float32, 23, 4, 2, 64, 32, 1),
         ("nvfp4", torch.bfloat16, 9, 2, 1, 32, 32, 0)]


@interpreted
@pytest.mark.parametrize("precision, dtype, T, E, k, D, I, spare", CASES)
def test_interpreted_experts_equal_torch(precision, dtype, T, E, k, D, I, spare):
    """Forward and all four gradients, ragged against the blocks of 32 in every dimension."""
    ids, leaves = draw(7, T, E, k, D, I, dtype, spare)
    dy = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    p = K.plan(ids, E, "torch")
    results = []
    for stages in (K.TorchStages(precision), K.TritonStages(precision, dy.device, SMALL)):
        out = K._Experts.apply(*leaves, p, k, stages)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dy)))
    # in bf16 a last-bit difference of a sum may move a value to the next code
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2 if precision == "nvfp4" else 5e-3
    for want, got in zip(*results):
        assert (want - got).float().norm() <= tolerance * want.float().norm()
    for gradient in results[1][3:]:
        assert not gradient[E - spare:].any()


@interpreted
def test_interpreted_grouped_experts_and_empty_batch():
    ids, (x, w, w1, w2) = draw(8, 6, 3, 1, 32, 32)
    p = K.plan(ids, 3)
    rows = x.detach()[p.rows]
    torch.testing.assert_close(*(K.grouped_experts(rows, p.counts, w1, w2, backend=v) for v in ("torch", "triton")))
    assert K.experts(x[:0], ids[:0], w[:0], w1, w2, backend="triton").shape == (0, 32)


@interpreted
@pytest.mark.slow
def test_interpreted_offsets_beyond_32_bits():
    """Row 2048 of rows of 2^20 starts at 2^31; the pages of the 2 GB are never touched but for two."""
    y = torch.zeros(2049 * 2 ** 20, dtype=torch.int8).view(2049, 2 ** 20)
    y[5], y[2048] = 3, 7
    out = torch.empty(2, 16)
    K.combine_kernel[(2, 1)](y, torch.tensor([5, 2048]), None, out, 16, 2 ** 20, 1, BLOCK_D=16)
    assert out[0].eq(3).all() and out[1].eq(7).all()


@interpreted
@pytest.mark.slow
def test_interpreted_bench_script_runs(capsys):
    """The script for the GPU, at a tiny shape and untimed: it runs, and its checks pass on every kernel."""
    summary = K.bench("cpu", {"tiny": (8, 32, 32, 2, 1)})
    named = {r["what"] for r in summary["rows"]}
    assert {"native fprop_up", "nvfp4 fprop_down", "mxfp8 wgrad_up", "plan", "route", "pack mxfp8", "dequantise mxfp8",
            "quantise nvfp4 per token", "quantise nvfp4 per tensor", "layer, loop of matmuls, both ways"} <= named


def test_bench_checks_can_fail():
    codes = torch.arange(4, dtype=torch.uint8)
    K._same("codes", (codes, codes), (codes, codes.clone()))
    with pytest.raises(AssertionError, match="codes: 1 bytes differ"):
        K._same("codes", codes, codes ^ (codes == 2))
    stage = {"combine": (lambda: torch.ones(4), 0)}
    with pytest.raises(AssertionError, match="here combine: relative error 1.00e-01"):
        K._check_stages(stage, {"combine": (lambda: 0.9 * torch.ones(4), 0)}, 2e-2, "here")


# ------------------------------------------------------------------------------------------- the kernels, compiled


def check_compiled(row, ptx, spec, chip):
    assert row["spill_bytes"] == 0, row
    if spec.flops:
        assert row["mma"] == {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[chip], row
        assert row["scaled"] == (chip == 100 and spec.fmt != "plain"), row
        assert "cp.async" in ptx, f"{row['name']} does not pipeline its loads"
    if spec.name == "quantise nvfp4":                                                     # K5
        assert "div.rn.f32" in ptx and "div.full.f32" not in ptx and "div.approx" not in ptx and "rcp.approx" not in ptx


@compiled
@pytest.mark.parametrize("chip, name", [(80, "dgrad up plain"), (90, "quantise nvfp4"), (90, "fprop up plain"),
                                        (90, "fprop down nvfp4"), (100, "fprop down nvfp4"), (100, "wgrad mxfp8")])
def test_compiles_for_a_chip(chip, name):
    (spec,) = [s for s in K.specs(chip) if s.name == name]
    check_compiled(*K.compile_for(chip, spec), spec, chip)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_every_kernel_compiles_for_every_chip(chip):
    for spec in K.specs(chip):
        check_compiled(*K.compile_for(chip, spec), spec, chip)


def test_bench_and_report_say_what_they_need():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA device"):
            K.bench()
    if not TRITON or K.INTERPRETED:
        with pytest.raises(ValueError, match="needs Triton"):
            K.report()
