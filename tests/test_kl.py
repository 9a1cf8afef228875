"""kl.py: worked vectors, stability, closed forms against samples, and what each estimator's gradient is."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kl

ROOT = Path(kl.__file__).parent


def test_smallest_vector() -> None:
    """π = (.5, .5), reference (.8, .2): values and expected gradients by hand."""
    theta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    logp = theta.log_softmax(-1)
    z, p = ref - logp, logp.detach().exp()
    exact = kl.exact_kl(theta, ref)
    assert exact.item() == pytest.approx(0.223144, abs=1e-6)
    (true,) = torch.autograd.grad(exact, theta, retain_graph=True)
    assert true.tolist() == pytest.approx([-0.346574, 0.346574], abs=1e-6)
    expect = {"k1": (0.0, 0.223144), "k2": (-0.346574, 0.265123), "k3": (-0.3, 0.223144)}
    for name, (first, value) in expect.items():
        mean = (p * getattr(kl, name)(z)).sum()
        (g,) = torch.autograd.grad(mean, theta, retain_graph=True)
        assert mean.item() == pytest.approx(value, abs=1e-6)
        assert g.tolist() == pytest.approx([first, -first], abs=1e-6)
    (g,) = torch.autograd.grad((p * kl.k1(z).detach() * logp).sum(), theta)
    assert torch.allclose(g, true)


# --------------------------------------------------------------------------------------------------- numerics


def test_k3_keeps_its_digits_and_is_never_negative() -> None:
    z = torch.tensor([1e-4, -1e-4, 1e-5, -3e-8, 0.0])
    assert (kl.k3(z) >= 0).all()
    exact = z.double() ** 2 / 2 + z.double() ** 3 / 6
    assert torch.allclose(kl.k3(z)[:2].double(), exact[:2], rtol=1e-2, atol=0)
    assert (z.exp() - 1 - z)[1] < 0  # the naive form


def test_nothing_is_clamped() -> None:
    z = torch.tensor([3.0, 20.0], requires_grad=True)
    kl.k3(z).sum().backward()
    assert z.grad[0].item() == pytest.approx(math.e**3 - 1, rel=1e-5) and z.grad[1] > 1e8


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    z = torch.tensor([12.0, 0.001], dtype=dtype)
    value = kl.k3(z)
    assert value.dtype == torch.float32 and value[0].item() == pytest.approx(math.exp(12) - 13, rel=1e-5)
    small = z[1].double().item()
    assert value[1].item() == pytest.approx(math.expm1(small) - small, rel=1e-2)


def test_masked_infinities_do_no_harm() -> None:
    """z = 99 overflows fp32's exponential; masked afterwards, loss and gradient would be NaN."""
    z = torch.tensor([99.0, math.inf, -0.2], requires_grad=True)
    for f in (kl.k1, kl.k2, kl.k3):
        z.grad = None
        value = f(z, torch.tensor([0, 0, 1])).sum()
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(z.grad).all() and z.grad[:2].tolist() == [0, 0]
    naive = ((z.exp() - 1 - z) * torch.tensor([0, 0, 1])).sum()
    assert not torch.isfinite(naive)


def test_a_mask_broadcasts() -> None:
    z = torch.ones(2, 3)
    assert torch.equal(kl.k2(z, torch.tensor([1, 0, 1])), torch.tensor([[0.5, 0, 0.5]] * 2))


def test_exact_kl_with_tokens_that_cannot_be_drawn() -> None:
    q, p = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True), torch.tensor([1.0, 0.0, -math.inf])
    value = kl.exact_kl(q, p)
    assert value.item() == pytest.approx(kl.exact_kl(q[:2], p[:2]).item())
    assert kl.exact_kl(q, torch.tensor([0.0, 0.0, 5.0])).isfinite()  # p may be wider than q
    assert kl.exact_kl(p.nan_to_num(neginf=0.0), q).item() == math.inf  # not the other way round


def test_exact_kl_is_the_mean_of_k1() -> None:
    g = torch.Generator().manual_seed(0)
    q, p = torch.randn(2, 4, 50, generator=g, dtype=torch.float64)
    log_q, log_p = q.log_softmax(-1), p.log_softmax(-1)
    exact = kl.exact_kl(q, p)
    assert exact.shape == (4,) and (exact > 0).all() and kl.exact_kl(q, q).abs().max() < 1e-12
    for f in (kl.k1, kl.k3):
        assert torch.allclose((log_q.exp() * f(log_p - log_q)).sum(-1), exact)


def test_tool_tokens_stay_out_of_the_sum() -> None:
    """Search-R1 #21: with tool tokens in it the sum is −3.7, and training climbs it."""
    pi, ref, mask = torch.tensor([-1.0, -5, -1]), torch.tensor([-1.2, -1, -1.1]), torch.tensor([1, 0, 1])
    assert kl.k1(ref - pi, mask).sum().item() == pytest.approx(0.3)
    assert kl.k1(ref - pi).sum().item() == pytest.approx(-3.7)


def test_penalty_of_four_rollouts() -> None:
    """Σ k1 per rollout for sampled probabilities, and the reward that it leaves at β = 0.1."""
    mu = torch.tensor([[0.5, 0.25, 0.8], [0.4, 1, 1], [0.2, 0.5, 1], [0.9, 0.3, 0.5]]).log()
    ref = torch.tensor([[0.4, 0.25, 0.9], [0.5, 1, 1], [0.3, 0.4, 1], [0.9, 0.2, 0.5]]).log()
    nats = kl.k1(ref - mu, torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])).sum(1)
    assert nats.tolist() == pytest.approx([0.1053605, -0.2231436, -0.1823216, 0.4054651], abs=1e-6)
    shaped = torch.tensor([1.0, 0, 0, 1]) - 0.1 * nats
    centred = [0.4920980, -0.4750516, -0.4791338, 0.4620875]
    assert (shaped - shaped.mean()).tolist() == pytest.approx(centred, abs=1e-6)


# ----------------------------------------------------------------------------------------------------- values


def test_closed_form_table() -> None:
    """Variances of k1, k2, k3 at KLs from 0.01 to 12.5 nats."""
    table = {0.01: (0.02, 0.000202, 0.000201), 0.125: (0.25, 0.0352, 0.0340), 0.5: (1, 0.75, 0.718),
             1: (2, 4, 4.39), 2: (4, 24, 49.6), 4.5: (9, 222.8, 8093), 8: (16, 1152, 8.9e6),
             12.5: (25, 4219, 7.2e10)}
    for D, variances in table.items():
        got = kl.gaussian(math.sqrt(2 * D))
        assert [got[name][1] for name in ("k1", "k2", "k3")] == pytest.approx(variances, rel=5e-3)
        assert [got[name][0] for name in ("k1", "k2", "k3")] == pytest.approx((D, D + D * D / 2, D))


@pytest.mark.parametrize("delta", (0.3, 1.0, 1.4))
def test_closed_forms_against_samples(delta: float) -> None:
    drawn = kl.sampled(delta, 1_000_000)
    for name, (mean, variance) in kl.gaussian(delta).items():
        assert drawn[name][0] == pytest.approx(mean, rel=0.02)
        assert drawn[name][1] == pytest.approx(variance, rel=0.12)


def test_k1_is_often_negative_and_k3_never() -> None:
    """P(k1 < 0) = Φ(−δ/2): 0.3085 at δ = 1."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z = x - 0.5
    assert (kl.k1(z) < 0).double().mean().item() == pytest.approx(0.3085, abs=4e-3)
    assert (kl.k3(z) >= 0).all()


def test_crossovers() -> None:
    D = kl.crossover()
    assert D == pytest.approx(0.628216, abs=1e-6)
    below, above = (kl.gaussian(math.sqrt(2 * x)) for x in (D * 0.999, D * 1.001))
    assert below["k3"][1] < below["k1"][1] and above["k3"][1] > above["k1"][1]
    k = kl.gaussian(math.sqrt(math.sqrt(5) - 1))  # Var k2 = Var k1 at δ² = √5 − 1
    assert k["k2"][1] == pytest.approx(k["k1"][1])


# -------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("seed", range(4))
def test_gradient_table(seed: int) -> None:
    e, g = kl.gradient_errors(seed), kl.expected_gradients(seed)
    assert e["k1, differentiated in the loss"] == pytest.approx(1.0)
    assert g["k1, differentiated in the loss"].abs().max() < 1e-12  # not small: zero
    for exact in ("k1 as a number in the reward", "k1 to go, as a number",
                  "k2 of the whole sequence, in the loss", "ρ · k3 of the whole sequence, in the loss"):
        assert e[exact] < 1e-9
    for wrong in ("k3 of the whole sequence, in the loss", "k3 per token, in the loss",
                  "k2 per token, in the loss"):
        assert e[wrong] > 0.01
    # the ratio repairs a token, not what later tokens see;
    # without it k3 pulls towards the KL's other direction
    assert torch.allclose(g["ρ · k3 per token, in the loss"], g["k2 per token, in the loss"])
    assert torch.allclose(g["k3 of the whole sequence, in the loss"], g["∇KL(π_ref‖π)"])


def test_k1_in_the_loss_regularises_nothing_whatever_beta() -> None:
    """And in the reward it leads to the optimum that is known in closed form."""
    none = kl.regularised_run("none", steps=150)
    for beta in (0.5, 4.0):
        assert abs(kl.regularised_run("k1 loss", steps=150, beta=beta) - none) < 0.05
    for beta in (0.5, 1.0):
        assert kl.regularised_run("k1 reward", beta=beta) == pytest.approx(kl.optimal_kl(beta), rel=0.1)
    with pytest.raises(ValueError, match="choose none"):
        kl.regularised_run("k2 loss")


def test_a_dead_group_is_dead_in_the_reward_and_not_in_the_loss() -> None:
    """TRL #7068: all rewards equal. A KL loss still moves the weights; in the reward differences count."""
    theta = torch.tensor([0.3, -0.3], requires_grad=True)
    logp, ref = theta.log_softmax(-1), torch.tensor([0.5, 0.5]).log()
    arms = torch.tensor([0, 0, 0, 0])  # four equal rollouts
    z = ref[arms] - logp[arms]
    (loss,) = torch.autograd.grad(kl.k3(z).mean(), theta, retain_graph=True)
    shaped = 1.0 - 0.1 * kl.k1(z).detach()
    (reward,) = torch.autograd.grad(-((shaped - shaped.mean()) * logp[arms]).mean(), theta)
    assert loss.abs().max() > 0.05 and reward.abs().max() == 0


# --------------------------------------------------------------------------------------------------- the plot


def run(code: str, folder: Path) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}; import kl; kl.main()"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_plot_without_matplotlib_says_what_to_do(tmp_path) -> None:
    done = run("sys.modules['matplotlib'] = None; sys.argv = ['kl.py', '--plot', 'x.png']", tmp_path)
    assert done.returncode != 0 and "pip install matplotlib" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_plot_writes_the_figure(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    done = run("sys.argv = ['kl.py', '--plot']", tmp_path)
    assert done.returncode == 0 and (tmp_path / "fig4.png").stat().st_size > 5000


def test_terminal_output(capsys) -> None:
    """Every column of the terminal plot holds its three points, where a star counts for two or more."""
    kl.show_plot()
    rows = [line[7:] for line in capsys.readouterr().out.splitlines() if " | " in line]
    for column in range(0, 64, 2):
        marks = [row[column] for row in rows if len(row) > column and row[column] != " "]
        assert marks and (len(marks) == 3 or "*" in marks)
