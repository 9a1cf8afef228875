"""Three estimators of a KL divergence, and what each of them does to the gradient.

Report §4.1, Fig. 4 (claim R6). RL is regularised by KL(q‖p) = E_q[−log r], r = p/q, with samples x from the
policy q and a reference p. Per sample, with z = log r = log p(x) − log q(x), in nats:

    k1 = −z             unbiased
    k2 = z² / 2         biased, by about KL²/2
    k3 = e^z − 1 − z    unbiased, never negative; its variance explodes when p and q part

Composer 2 uses k1. The value of an estimator and its gradient are two questions. Differentiated in a loss, k1
has zero expected gradient (E_q ∇log q = 0) and regularises nothing; as a detached number in the reward its
policy gradient is exact.

Legend: q = π the policy, p = π_ref the reference, D = KL, δ the distance of the means of Fig. 4's Gaussians,
sg stop-gradient, ρ = π / sg(π): the number 1 with the gradient of log π.

Differences from the report, which names the estimator only:
1. The caption of Fig. 4 says KL(p‖q), the text KL(q‖p). For two Gaussians of unit variance both are δ²/2.
2. The figure is drawn from closed forms. Beyond δ = 1.5 samples mislead: E r² comes from x ≈ 2δ, hit by few.
3. Where k1 enters is our choice: the reward. Sources: Schulman, "Approximating KL divergence" (2020);
   Tang & Munos, arXiv 2506.09477; Shah et al., arXiv 2512.21852.
No value is ever clamped: a clamp has zero gradient exactly where a penalty is needed.

    python kl.py               the tables, and a plot in the terminal
    python kl.py --plot        Figure 4 as fig4.png or the file named behind it; needs matplotlib
"""
from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

# ------------------------------------------------------------------------------------------------- estimators


def _prepared(z: Tensor, mask: Tensor | None) -> Tensor:
    """z in fp32 or better, 0 where the mask is off.

    Half precision would end early: e^z overflows at z = 11.1 in fp16. The mask comes before any exponential:
    masking afterwards multiplies an infinity by 0, which is NaN in the gradient.
    """
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    return z if mask is None else torch.where(mask.bool(), z, torch.zeros_like(z))


def k1(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """−z, for z = log p − log q at samples of q: any shape in, the same shape out, in nats, 0 where masked.

    One token's k1 is often negative. A negative mean over many own samples means that log-probs, mask or
    temperature of the two models disagree.
    """
    return -_prepared(z, mask)


def k2(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """z²/2; shapes as k1. A biased value, but for a single token its gradient is that of the KL."""
    return _prepared(z, mask) ** 2 / 2


def k3(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """e^z − 1 − z; shapes as k1. By expm1: the naive form has no digit left at z = 1e-4 and goes negative."""
    z = _prepared(z, mask)
    return torch.expm1(z) - z


def exact_kl(logits_q: Tensor, logits_p: Tensor) -> Tensor:
    """KL(q‖p) per token in nats, from full logits [..., V] -> [...]: what k1 to k3 estimate.

    Tokens that q cannot draw (logit −∞) count 0; one that q can draw and p cannot makes it infinite.
    """
    log_q, log_p = logits_q.log_softmax(-1), logits_p.log_softmax(-1)
    log_ratio = (log_q - log_p).masked_fill(log_q == -math.inf, 0.0)  # else 0 · (−∞) = NaN
    return (log_q.exp() * log_ratio).sum(-1)


# ----------------------------------------------------------------------------- values: Fig. 4, in closed form


def gaussian(delta: float) -> dict[str, tuple[float, float]]:
    """(mean, variance) of one sample of each estimator, for q = N(0, 1) and p = N(δ, 1).

    z = δx − δ²/2 ~ N(−D, 2D), D = δ²/2 = KL; E e^z = 1, E e^{2z} = e^{2D}, Cov(e^z, z) = E_p z − E_q z = 2D.
    """
    D = delta**2 / 2
    return {
        "k1": (D, 2 * D),
        # Var z² = 2σ⁴ + 4m²σ², here with m = −D, σ² = 2D
        "k2": (D + D**2 / 2, 2 * D**2 + 2 * D**3),
        # Var k3 = Var e^z + Var z − 2 Cov = (e^{2D} − 1) + 2D − 4D
        "k3": (D, math.expm1(2 * D) - 2 * D),
    }


def crossover() -> float:
    """The KL in nats at which Var k3 = Var k1: below it k3 measures better, above it k1. By bisection."""
    low, high = 0.1, 2.0
    while high - low > 1e-12:
        D = (low + high) / 2
        low, high = (D, high) if math.expm1(2 * D) - 4 * D < 0 else (low, D)
    return low


def sampled(delta: float, n: int = 400_000, seed: int = 0) -> dict[str, tuple[float, float]]:
    """(mean, variance) as `gaussian`, by Monte Carlo with n samples."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    z = delta * x - delta**2 / 2
    return {f.__name__: (f(z).mean().item(), f(z).var().item()) for f in (k1, k2, k3)}


# ---------------------------------------------------------------------------------- gradients, by enumeration


def expected_gradients(seed: int = 0, scale: float = 0.7) -> dict[str, Tensor]:
    """E_π[gradient] [4, 3] of every way to use an estimator, enumerated over two tokens out of three.

    The second token's distribution depends on the first, as in text: a per-token loss misses that early
    tokens decide which later states are visited. Beside the ways stand the two gradients that they might be.
    """
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(4, 3, generator=g, dtype=torch.float64)  # row 0: first token; 1 + a: after token a
    ref = (theta + scale * torch.randn(4, 3, generator=g, dtype=torch.float64)).log_softmax(-1)
    theta.requires_grad_()

    def logps(table: Tensor) -> Tensor:  # [9, 2]: both tokens of all nine sequences
        return torch.stack([torch.stack((table[0, a], table[1 + a, b])) for a in range(3) for b in range(3)])

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value.sum(), theta, retain_graph=True)[0]

    logp, logp_ref = logps(theta.log_softmax(-1)), logps(ref)
    z, p = logp_ref - logp, logp.sum(1).exp()  # [9, 2], [9]
    whole, sg, rho = z.sum(1), z.detach(), (logp - logp.detach()).exp()
    ways = {
        "k1, differentiated in the loss": k1(z).sum(1),
        "k2 per token, in the loss": k2(z).sum(1),
        "k3 per token, in the loss": k3(z).sum(1),
        "ρ · k3 per token, in the loss": (rho * k3(z)).sum(1),
        "k3 of the whole sequence, in the loss": k3(whole),
        "k2 of the whole sequence, in the loss": k2(whole),
        "ρ · k3 of the whole sequence, in the loss": rho.prod(1) * k3(whole),
        "k1 to go, as a number": (k1(sg).flip(1).cumsum(1).flip(1) * logp).sum(1),
        "k1 as a number in the reward": k1(sg).sum(1) * logp.sum(1),
    }
    return {
        "∇KL(π‖π_ref)": gradient(p * -whole),
        "∇KL(π_ref‖π)": gradient(logp_ref.sum(1).exp() * whole),
        **{name: gradient(p.detach() * value) for name, value in ways.items()},
    }


def gradient_errors(seed: int = 0, scale: float = 0.7) -> dict[str, float]:
    """‖E[gradient] − ∇KL(π‖π_ref)‖ / ‖∇KL(π‖π_ref)‖ of every way: 0 is right, 1 as bad as doing nothing."""
    gradients = expected_gradients(seed, scale)
    true = gradients.pop("∇KL(π‖π_ref)")
    gradients.pop("∇KL(π_ref‖π)")
    return {name: float((g - true).norm() / true.norm()) for name, g in gradients.items()}


# ------------------------------------------------------------------------------- gradients, in a training run

ARMS = 8


def regularised_run(way: str, steps: int = 300, beta: float = 1.0, seed: int = 0) -> float:
    """KL to the reference, in nats, after training a bandit: reward 1 for arm 0 of eight, start uniform.

    way: "none" (no penalty), "k1 loss", "k3 loss" (β · estimate, differentiated) or "k1 reward" (β ·
    estimate, subtracted as a number). The start is the reference. Policy gradient, 256 samples a step.
    ValueError for another way.
    """
    if way not in ("none", "k1 loss", "k3 loss", "k1 reward"):
        raise ValueError(f"way {way!r}: choose none, k1 loss, k3 loss or k1 reward")
    g = torch.Generator().manual_seed(seed)
    theta, ref = torch.zeros(ARMS, requires_grad=True), torch.zeros(ARMS).log_softmax(-1)
    for _ in range(steps):
        logp = theta.log_softmax(-1)
        arms = torch.multinomial(logp.detach().exp(), 256, replacement=True, generator=g)
        z, reward = ref[arms] - logp[arms], (arms == 0).float()  # [256]
        if way == "k1 reward":
            reward = reward - beta * k1(z).detach()
        value = -((reward - reward.mean()) * logp[arms]).mean()
        if way in ("k1 loss", "k3 loss"):
            value = value + beta * (k1 if way == "k1 loss" else k3)(z).mean()
        (grad,) = torch.autograd.grad(value, theta)
        with torch.no_grad():
            theta -= 2.0 * grad
    return float(exact_kl(theta.detach(), ref))


def optimal_kl(beta: float) -> float:
    """KL(π*‖π_ref) of that bandit: max_π E[reward] − β KL is reached by π* ∝ π_ref · e^{reward / β}."""
    logits = torch.zeros(ARMS)
    logits[0] = 1 / beta
    return float(exact_kl(logits, torch.zeros(ARMS)))


# ---------------------------------------------------------------------------------------------- demonstration


def plot(path: str) -> None:
    """Figure 4: variance over KL; lines from closed forms, dots from samples where those can be trusted."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("kl.py: error: --plot needs matplotlib (pip install matplotlib); "
                         "python kl.py prints the same curves without it") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [(d * d / 2, gaussian(d)) for d in (0.05 * i for i in range(1, 90))]
    dots = [(d * d / 2, sampled(d)) for d in (0.25 * i for i in range(1, 7))]
    for i, name in enumerate(("k1", "k2", "k3")):
        pyplot.semilogy([D for D, _ in lines], [v[name][1] for _, v in lines], f"C{i}", label=name)
        pyplot.semilogy([D for D, _ in dots], [v[name][1] for _, v in dots], f"C{i}o", markersize=4)
    pyplot.xlabel("KL in nats")
    pyplot.ylabel("variance of one sample")
    pyplot.legend()
    pyplot.savefig(path, dpi=150)
    print(f"wrote {path}")


def show_values() -> None:
    names = ("k1", "k2", "k3")
    print("q = N(0, 1), p = N(δ, 1): mean and variance of one sample, closed form; variance of 400,000")
    columns = "".join(f"{f'{n} mean':>11} {'variance':>9} {'sampled':>8}" for n in names)
    print(f"{'δ':>4} {'KL':>6} {columns}")
    for delta in (0.1, 0.5, 1.0, 1.5, 2.0, 3.0):
        draws, row = sampled(delta), f"{delta:4} {delta**2 / 2:6.3f} "
        for n in names:
            mean, variance = gaussian(delta)[n]
            row += f"{mean:11.4f} {variance:9.4g} " + (f"{draws[n][1]:8.3g}" if delta <= 1.5 else f"{'–':>8}")
        print(row)
    print(f"–: too rare to be sampled. k3 has the smaller variance below {crossover():.3f} nats, k1 above\n")


def show_plot() -> None:
    """The three variances over the KL in characters, one column per quarter of a nat."""
    columns = [gaussian(math.sqrt(d / 2)) for d in range(1, 33)]
    print("log10 of the variance over the KL (1, 2, 3: the estimators; *: several)")
    for power in range(7, -2, -1):
        line = ""
        for column in columns:
            here = [n[1] for n in column if round(math.log10(column[n][1])) == power]
            line += ("*" if len(here) > 1 else here[0] if here else " ") + " "
        print(f"{power:+4} | {line}".rstrip())
    print("     +" + "-" * 64 + "\n      " + "".join(f"{f'{d} nats':>16}" for d in (2, 4, 6, 8)) + "\n")


def show_gradients() -> None:
    runs = [gradient_errors(seed) for seed in range(20)]
    print("relative error of the expected gradient against ∇KL(π‖π_ref): enumerated, mean of 20 problems")
    for name in runs[0]:
        print(f"    {name:42} {sum(r[name] for r in runs) / len(runs):.3f}")
    betas = (0.25, 0.5, 1.0, 2.0)
    print("\na bandit drawn to one of eight arms: KL to its uniform start after 300 steps, no penalty "
          f"{regularised_run('none'):.3f}\n    {'β':24}" + "".join(f"{b:8}" for b in betas))
    print(f"    {'optimum, in closed form':24}" + "".join(f"{optimal_kl(b):8.3f}" for b in betas))
    for way in ("k1 reward", "k1 loss", "k3 loss"):
        row = "".join(f"{regularised_run(way, beta=b):8.3f}" for b in betas)
        print(f"    {way.replace(' ', ' in the '):24}{row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", nargs="?", const="fig4.png",
                        help="write Figure 4 (default fig4.png); needs matplotlib")
    if (path := parser.parse_args().plot) is not None:
        return plot(path)
    show_values()
    show_plot()
    show_gradients()


if __name__ == "__main__":
    main()
