"""The expert layer of a mixture of experts: routing, grouped GEMM and block-scaled numbers (report §6.1; K1–K5, P2, S4).

Each token goes to k of E small experts. Sorted by expert, the work is one ragged "grouped" matrix product per weight, and
the report speeds that product up by computing it in numbers of 4 and 8 bits that share a scale per small block:

    forward   NVFP4: E2M1 values, one E4M3 scale per 16 of them, and one FP32 scale per token (the report's change, K2)
    backward  MXFP8: E4M3 values, one power-of-two (E8M0) scale per 32 of them (K4)

Figure 10's flow is one `torch.autograd.Function`, `_Experts`; its boxes are the methods of `TorchStages` (plain torch, the
reference, and what a CPU runs) and of `TritonStages` (GPU): quantise, fprop_up, fprop_down, combine, dgrad_down, dgrad_up,
wgrad. `experts` picks one of the two and says once which and why.

Legend: T tokens, k experts per token, S = T·k rows sorted by expert, E experts, D width, I hidden width of an expert.

Differences from the report, and choices where it is silent:
1. The outer NVFP4 scale of a weight is one FP32 per output row, the same function as for tokens. Rounding is to nearest even.
2. dgrad and wgrad see the gradients, weights and activations as they were before the forward's quantisation, quantised
   anew to MXFP8: blocks of 32 run along the axis that is summed, so every operand is quantised once per direction.
   The gradient of a gate is ⟨dy W₂, h⟩ with the unquantised h, so the expert's output need not be kept.
3. The E8M0 exponent is ⌈log₂(amax / 448)⌉ (never clips; the OCP text's ⌊log₂ amax⌋ − 8 may). It is found on the bits of
   amax, without any division, so chip, interpreter and torch agree exactly.
4. H200 has no 4-bit matrix instruction: there NVFP4 and MXFP8 operands are decoded to bf16 (exactly) inside the kernel.
5. Left out: TMA and persistent scheduling, 2-CTA matrix instructions, quantising in the epilogue of the product before.

    python kernels.py            the lessons: round-trip errors, batch dependence, leaks, rounding, training curves
    python kernels.py --report   compiles every kernel for sm_80, sm_90, sm_100 without a GPU: registers, spills, instructions
    python kernels.py --bench    on a GPU: checks every kernel against torch, then times it
"""
# ruff: noqa: E741 (I is the hidden width of an expert, here and in the papers)
from __future__ import annotations

import argparse
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:                              # the torch paths need nothing of Triton
    triton = None

jit = triton.jit if triton else (lambda kernel: kernel)
# True under TRITON_INTERPRET=1: kernels run on the CPU, in numpy, one program after the other. numpy has no bfloat16, and the
# interpreter then computes on its raw bits; the kernels widen before they compute and round by hand where this is set.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret) if triton else False

MX_BLOCK, FP4_BLOCK = 32, 16                     # values that share a scale
E4M3_MAX, E2M1_MAX = 448.0, 6.0
PRECISIONS = ("native", "mxfp8", "nvfp4")        # of the forward; the backward of the last two is mxfp8


# ------------------------------------------------------------------------------------------------------- the choice


@functools.cache
def _say(choice: str, reason: str) -> None:
    print(f"kernels: {choice} ({reason})", file=sys.stderr)


def choose(x: Tensor, backend: str | None = None, precision: str | None = None) -> str:
    """'triton' or 'torch' for an operation on `x`, said once per reason on stderr. `backend` forces it, or fails saying why not.
    `precision` is given for the products of the experts only, whose kernels are for bf16."""
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend = {backend!r}: choose 'torch', 'triton' or None for the automatic choice")
    if backend == "torch":
        return "torch"
    obstacle = _obstacle(x.device, x.dtype, precision)
    if backend == "triton" and obstacle and not (INTERPRETED and x.device.type == "cpu"):
        raise ValueError(f"backend = 'triton' cannot be had: {obstacle}")
    choice = "triton" if backend == "triton" or not obstacle else "torch"
    _say(choice, "as asked" if backend else obstacle or f"{torch.cuda.get_device_name(x.device)}")
    return choice


@functools.cache
def _obstacle(device: torch.device, dtype: torch.dtype, precision: str | None) -> str:
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return f"tensors on {device.type}" if torch.cuda.is_available() else "no CUDA device"
    major = torch.cuda.get_device_capability(device)[0]
    if major < 8 or (precision in ("mxfp8", "nvfp4") and major not in (9, 10)):
        return f"no {precision or 'such'} kernels for compute capability {major}.x"
    if dtype.is_floating_point and dtype not in ((torch.bfloat16,) if precision else (torch.bfloat16, torch.float32)):
        return f"no kernels for {dtype}{' experts' if precision else ''}"
    return ""


# ------------------------------------------------------------------------------------------------------------ MXFP8


def _blocks(x: Tensor, size: int) -> Tensor:
    """x [..., N] as float32 [..., N / size, size]."""
    if x.shape[-1] % size:
        raise ValueError(f"the last dimension, {x.shape[-1]}, is no multiple of the block of {size}: pad it with zeros")
    return x.float().unflatten(-1, (-1, size))


def mxfp8_quantise(x: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Values [..., N] to E4M3 codes [..., N] and E8M0 bytes [..., N / 32] (OCP MX v1.0; K4).

    With the byte b, the scale is 2^(b − 127). Rounding is to nearest even and saturates at ±448 scales. A block of zeros has
    b = 0; an infinity takes the largest finite block's scale and decodes to infinity; a NaN makes its block NaN (b = 255).
    """
    if choose(x, backend) == "triton" and x.numel():
        return _mxfp8_triton(x)
    v = _blocks(x, MX_BLOCK)                                                             # [..., N / 32, 32]
    amax = v.abs().amax(-1).view(torch.int32)
    # amax = m·2^e with 1 ≤ m < 2, 448 = 1.75·2^8:  ⌈log₂(amax / 448)⌉ = e − 8 + [m > 1.75]. Adding 0x1FFFFF carries iff m > 1.75
    byte = (((amax.clamp(max=0x7F800000) + 0x1FFFFF) >> 23) - 8).clamp(min=0)
    inverse = (254 - byte << 23).view(torch.float32).unsqueeze(-1)                       # 2^(127 − b)
    nan = amax > 0x7F800000
    codes = (v * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(nan.unsqueeze(-1), 0x7F).flatten(-2)
    return codes.view(torch.float8_e4m3fn), byte.masked_fill(nan, 255).to(torch.uint8)


def mxfp8_dequantise(codes: Tensor, scales: Tensor, backend: str | None = None) -> Tensor:
    """E4M3 codes [..., N] and E8M0 bytes [..., N / 32] to float32 [..., N]."""
    raw = codes.view(torch.uint8)
    if choose(raw, backend) == "triton" and codes.numel():
        return _dequantise_triton(raw, scales, None)
    return (_blocks(codes, MX_BLOCK) * scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)).flatten(-2)


def mxfp8_pack(x: Tensor, backend: str | None = None) -> Tensor:
    """What the dispatch sends (S4): per token [..., N] its N codes and then its N / 32 scales, uint8 [..., 33 N / 32]."""
    if choose(x, backend) == "triton" and x.numel():
        packed = x.new_empty(*x.shape[:-1], x.shape[-1] * 33 // 32, dtype=torch.uint8)
        _mxfp8_triton(x, packed)
        return packed
    codes, scales = mxfp8_quantise(x, "torch")
    return torch.cat((codes.view(torch.uint8), scales), dim=-1)


def mxfp8_unpack(packed: Tensor, dtype: torch.dtype = torch.bfloat16, backend: str | None = None) -> Tensor:
    """The receiver's side of `mxfp8_pack`: bytes [..., 33 N / 32] to values [..., N]."""
    if packed.shape[-1] % 33:
        raise ValueError(f"{packed.shape[-1]} bytes a token is no multiple of 33 (32 codes and their scale): not packed here")
    codes, scales = packed.split([packed.shape[-1] // 33 * 32, packed.shape[-1] // 33], dim=-1)
    return mxfp8_dequantise(codes.contiguous().view(torch.float8_e4m3fn), scales.contiguous(), backend).to(dtype)


# ------------------------------------------------------------------------------------------------------------ NVFP4


def nvfp4_quantise(x: Tensor, outer: str = "token", backend: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Values [..., N] to packed E2M1 codes uint8 [..., N / 2], E4M3 scales [..., N / 16] and FP32 scales g (K2).

    g is [..., 1], one per token (the report), or of shape [] for outer='tensor' (the original format, arXiv 2509.25149):

        g = amax / (6·448)        s = E4M3(amax_block / 6 / g)        code = E2M1(x / (s·g))        decoded = code·s·g

    Every division is IEEE's (K5). Two codes a byte, the first in the low half. Zeros keep their sign. A row of zeros has
    g = s = 0; a block too small beside its row has s = 0 and decodes to 0. A row with a NaN or an infinity decodes to NaN:
    nothing finite stands for it, and with one scale per token no other token notices.
    """
    if outer not in ("token", "tensor"):
        raise ValueError(f"outer = {outer!r}: choose 'token' or 'tensor'")
    if choose(x, backend) == "triton" and x.numel():
        return _nvfp4_triton(x, outer)
    v = _blocks(x, FP4_BLOCK)                                                            # [..., N / 16, 16]
    block_amax = v.abs().amax(-1)
    amax = block_amax.amax(-1, keepdim=True) if outer == "token" else block_amax.amax()
    g = amax / (E2M1_MAX * E4M3_MAX)
    s = (block_amax / E2M1_MAX / g).clamp(max=E4M3_MAX)
    s = torch.where(g > 0, s, 0.0).masked_fill(~g.isfinite(), math.nan).to(torch.float8_e4m3fn)
    scale = (s.float() * g).unsqueeze(-1)
    m = torch.where(scale > 0, v.abs() / scale, 0.0)
    code = (_e2m1(m) | torch.signbit(v).byte() << 3).flatten(-2)
    return code[..., 0::2] | code[..., 1::2] << 4, s, g


def _e2m1(m: Tensor) -> Tensor:
    """m ≥ 0 to the code of the nearest of 0 ½ 1 1½ 2 3 4 6; a midpoint goes to the even code."""
    return (m > 0.25).byte() + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5.0)


def nvfp4_dequantise(codes: Tensor, scales: Tensor, g: Tensor, backend: str | None = None) -> Tensor:
    """What `nvfp4_quantise` returned, to float32 [..., N]."""
    if choose(codes, backend) == "triton" and codes.numel():
        return _dequantise_triton(codes, scales.view(torch.uint8), g)
    table = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], device=codes.device)
    v = table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]          # [..., N]
    return (_blocks(v, FP4_BLOCK) * (scales.float() * g).unsqueeze(-1)).flatten(-2)


# ------------------------------------------------------------------------------------------ the formats' kernels
# They work on the bits: |x| as an integer orders like |x|, carries NaN above infinity, and needs no rounding. 0x7F800000 is
# infinity, shifts by 23 reach the exponent. No value is ever cast to or from an 8-bit float type, so sm_80 runs these too.


@jit
def _widen(x):
    """To float32. Exact, but for the interpreter, which gets the subnormals of bf16 wrong: there the bits are moved."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def _narrow(x, dtype: tl.constexpr):
    """To `dtype`, rounding to nearest even. The interpreter would cut bf16 off, so there the bits are rounded first."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536
        x = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits, rounded).to(tl.float32, bitcast=True)
    return x.to(dtype)


@jit
def _e4m3(a):
    """0 ≤ a ≤ 448 to the nearest E4M3: (its byte, its value). n counts the steps of 2^(e − 3) in a."""
    e = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    n = a * (130 - e << 23).to(tl.float32, bitcast=True) + 8388608.0                     # + 2^23 rounds to an integer, to even
    n = n.to(tl.int32, bitcast=True) & 31
    return (e + 6) * 8 + n, n.to(tl.float32) * (124 + e << 23).to(tl.float32, bitcast=True)


@jit
def _e4m3_values(code):
    """E4M3 bytes to float32: exponent and mantissa moved into place, then the exponent's bias corrected by 2^120."""
    code = code.to(tl.int32)
    value = ((code & 127) << 20 | code >> 7 << 31).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((code & 127) == 127, float("nan"), value)


@jit
def _mxfp8_values(codes, scales):
    """Codes [R, C] and E8M0 bytes [R, C / 32] to float32 [R, C]."""
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    byte = scales.to(tl.int32)
    scale = tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)       # 2^−127 is a subnormal
    scale = tl.where(byte == 255, float("nan"), scale)[:, :, None]
    return tl.reshape(_e4m3_values(tl.reshape(codes, (R, C // 32, 32))) * scale, (R, C))


@jit
def _nvfp4_values(codes, scales):
    """Packed codes [R, C / 2] times float32 scales [R, C / 16]: float32 [R, C]. E2M1's exponent bias differs by 2^126."""
    R: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1] * 2
    code = tl.reshape(tl.join(codes & 15, codes >> 4), (R, C // 16, 16)).to(tl.int32)
    value = ((code & 7) << 22 | code >> 3 << 31).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0
    return tl.reshape(value * scales[:, :, None], (R, C))


@jit
def mxfp8_kernel(x_ptr, columns_ptr, codes_ptr, scales_ptr,
                 R, C, stride_b, stride_r, stride_c, stride_codes, stride_scales,
                 BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """codes, scales [B·R, C] of x[b, r, columns[c]], blocks along c. A column of −1 reads as zeros (padding of an expert)."""
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = tl.program_id(2).to(tl.int64)
    column = c
    if columns_ptr is not None:
        column = tl.load(columns_ptr + c, mask=c < C, other=-1)
    real = (r < R)[:, None] & ((c < C) & (column >= 0))[None, :]
    at = batch * stride_b + r[:, None] * stride_r + column.to(tl.int64)[None, :] * stride_c
    x = _widen(tl.load(x_ptr + at, mask=real, other=0.0))
    x = tl.reshape(x, (BLOCK_R, BLOCK_C // 32, 32))
    bits = x.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, axis=2)
    nan = amax > 0x7F800000
    byte = tl.maximum((tl.minimum(amax, 0x7F800000) + 0x1FFFFF >> 23) - 8, 0)
    inverse = (254 - byte << 23).to(tl.float32, bitcast=True)
    code, _ = _e4m3(tl.minimum(tl.abs(x) * inverse[:, :, None], 448.0))
    code = tl.where(nan[:, :, None], 0x7F, code | (bits >> 31 & 1) << 7)
    row = (batch * R + r)[:, None]
    block = tl.program_id(1) * (BLOCK_C // 32) + tl.arange(0, BLOCK_C // 32)
    tl.store(codes_ptr + row * stride_codes + c[None, :], tl.reshape(code, (BLOCK_R, BLOCK_C)).to(tl.uint8),
             mask=(r < R)[:, None] & (c < C)[None, :])
    tl.store(scales_ptr + row * stride_scales + block[None, :], tl.where(nan, 255, byte).to(tl.uint8),
             mask=(r < R)[:, None] & (block < C // 32)[None, :])


@jit
def nvfp4_kernel(x_ptr, codes_ptr, scales_ptr, outer_ptr, R, C,
                 PER_TOKEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Two walks along each row of x [R, C]: its amax (PER_TOKEN; else g is given), then its codes. div_rn: IEEE division."""
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    if PER_TOKEN:
        amax = tl.zeros((BLOCK_R, 1), tl.int32)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)[None, :]
            x = _widen(tl.load(x_ptr + r * C + c, mask=(r < R) & (c < C), other=0.0))
            amax = tl.maximum(amax, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None])
        g = tl.div_rn(amax.to(tl.float32, bitcast=True), 2688.0)
        tl.store(outer_ptr + r, g, mask=r < R)
    else:
        g = tl.load(outer_ptr + tl.zeros((BLOCK_R, 1), tl.int32))
    finite = (g.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)[None, :]
        x = _widen(tl.load(x_ptr + r * C + c, mask=(r < R) & (c < C), other=0.0))
        x = tl.reshape(x, (BLOCK_R, BLOCK_C // 16, 16))
        bits = x.to(tl.int32, bitcast=True)
        block_amax = tl.max(bits & 0x7FFFFFFF, axis=2).to(tl.float32, bitcast=True)
        s = tl.minimum(tl.div_rn(tl.div_rn(block_amax, 6.0), g), 448.0)
        s_byte, s = _e4m3(tl.where((g > 0) & finite, s, 0.0))
        scale = (s * g)[:, :, None]
        m = tl.where(scale > 0, tl.div_rn(tl.abs(x), scale), 0.0)
        code = ((m > 0.25).to(tl.int32) + (m >= 0.75) + (m > 1.25) + (m >= 1.75) + (m > 2.5) + (m >= 3.5) + (m > 5.0)
                | (bits >> 31 & 1) << 3)
        low, high = tl.split(tl.reshape(code, (BLOCK_R, BLOCK_C // 2, 2)))
        pair, block = c0 // 2 + tl.arange(0, BLOCK_C // 2)[None, :], c0 // 16 + tl.arange(0, BLOCK_C // 16)[None, :]
        tl.store(codes_ptr + r * (C // 2) + pair, (low | high << 4).to(tl.uint8), mask=(r < R) & (pair < C // 2))
        tl.store(scales_ptr + r * (C // 16) + block, tl.where(finite, s_byte, 0x7F).to(tl.uint8),
                 mask=(r < R) & (block < C // 16))


@jit
def dequantise_kernel(codes_ptr, scales_ptr, outer_ptr, values_ptr, R, C,
                      FP4: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Both formats back to float32 [R, C]."""
    PACK: tl.constexpr = 2 if FP4 else 1
    BLOCK: tl.constexpr = 16 if FP4 else 32
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    c = tl.program_id(1) * (BLOCK_C // PACK) + tl.arange(0, BLOCK_C // PACK)[None, :]
    block = tl.program_id(1) * (BLOCK_C // BLOCK) + tl.arange(0, BLOCK_C // BLOCK)[None, :]
    codes = tl.load(codes_ptr + r * (C // PACK) + c, mask=(r < R) & (c < C // PACK), other=0)
    scales = tl.load(scales_ptr + r * (C // BLOCK) + block, mask=(r < R) & (block < C // BLOCK), other=0)
    if FP4:
        g = tl.load(outer_ptr + (r if PER_TOKEN else r * 0), mask=r < R, other=0.0)
        x = _nvfp4_values(codes, _e4m3_values(scales) * g)
    else:
        x = _mxfp8_values(codes, scales)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    tl.store(values_ptr + r * C + c, x, mask=(r < R) & (c < C))


def _mxfp8_triton(x: Tensor, packed: Tensor | None = None, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., N], up to three dimensions of any strides; with `columns` the N values are gathered. Into `packed` if given."""
    shape = x.shape[:-1]
    x = x if x.dim() == 3 else x.reshape(-1, x.shape[-1]).unsqueeze(0)
    (B, R, _), C = x.shape, x.shape[2] if columns is None else len(columns)
    if C % MX_BLOCK:
        raise ValueError(f"the last dimension, {C}, is no multiple of the block of {MX_BLOCK}: pad it with zeros")
    if packed is None:
        codes, scales = (x.new_empty(*shape, n, dtype=torch.uint8) for n in (C, C // MX_BLOCK))
    else:
        codes, scales = packed.view(-1, packed.shape[-1]).split([C, C // MX_BLOCK], dim=-1)
    # A thread's neighbours should read neighbouring addresses: wide tiles along rows, square ones when reading transposed.
    block_r, block_c = (16, 128) if x.stride(2) == 1 and columns is None else (64, 64)
    grid = (triton.cdiv(R, block_r), triton.cdiv(C, block_c), B)
    mxfp8_kernel[grid](x, columns, codes, scales, R, C, *x.stride(), codes.stride(-2), scales.stride(-2),
                       BLOCK_R=block_r, BLOCK_C=block_c)
    return codes.view(torch.float8_e4m3fn), scales


def _nvfp4_triton(x: Tensor, outer: str) -> tuple[Tensor, Tensor, Tensor]:
    N = x.shape[-1]
    if N % FP4_BLOCK:
        raise ValueError(f"the last dimension, {N}, is no multiple of the block of {FP4_BLOCK}: pad it with zeros")
    x, R = x.contiguous(), x.numel() // N
    codes = x.new_empty(*x.shape[:-1], N // 2, dtype=torch.uint8)
    scales = x.new_empty(*x.shape[:-1], N // FP4_BLOCK, dtype=torch.uint8)
    if outer == "token":
        g = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    else:
        g = x.abs().amax().float() / (E2M1_MAX * E4M3_MAX)
    nvfp4_kernel[(triton.cdiv(R, 4),)](x, codes, scales, g, R, N, PER_TOKEN=outer == "token", BLOCK_R=4, BLOCK_C=512)
    return codes, scales.view(torch.float8_e4m3fn), g


def _dequantise_triton(codes: Tensor, scales: Tensor, g: Tensor | None) -> Tensor:
    N = codes.shape[-1] * (1 if g is None else 2)
    out = codes.new_empty(*codes.shape[:-1], N, dtype=torch.float32)
    R = out.numel() // N
    dequantise_kernel[(triton.cdiv(R, 16), triton.cdiv(N, 128))](
        codes.contiguous(), scales.contiguous(), g, out, R, N, FP4=g is not None, PER_TOKEN=g is not None and g.dim() > 0,
        BLOCK_R=16, BLOCK_C=128)
    return out


# ----------------------------------------------------------------------------------------------------------- routing


def route(logits: Tensor, bias: Tensor, k: int, scale: float = 1.0, normalise: bool = True, backend: str | None = None
          ) -> tuple[Tensor, Tensor, Tensor]:
    """The router's choice (M2): k experts per token by score plus bias, weighted by score alone.

        s = sigmoid(logits)        ids = top-k of s + bias        w = s[ids] / (Σ s[ids] + 1e-20) · scale

    Logits [T, E], bias [E]. Returns ids [T, k] int64, best first, the lowest index first among equals; weights [T, k] and
    scores [T, E], float32 (float64 for float64 logits), both differentiable in the logits (the bias and the choice are not).
    A row with NaN gets k distinct ids and NaN weights, and no other row notices. normalise=False leaves out the division.
    """
    if logits.dim() != 2 or bias.shape != logits.shape[1:]:
        raise ValueError(f"logits {tuple(logits.shape)} must be [T, E] and bias {tuple(bias.shape)} its [E]")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k = {k} must be between 1 and the {logits.shape[1]} experts")
    if choose(logits, backend) == "triton" and len(logits):
        return _Route.apply(logits, bias, k, scale, normalise)
    scores = torch.sigmoid(wide(logits))
    ids = _top_k(scores.detach() + bias, k)
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids, weights * scale, scores


@torch.no_grad()
def _top_k(choice: Tensor, k: int) -> Tensor:
    """k rounds of argmax, which takes the first of equals; torch.topk promises no order among them."""
    lowest = torch.finfo(choice.dtype).min
    choice = choice.nan_to_num(nan=lowest, neginf=lowest)                                # so that a NaN row finds k distinct ids
    ids = torch.empty(choice.shape[0], k, dtype=torch.long, device=choice.device)
    for j in range(k):
        best = choice.argmax(1, keepdim=True)
        ids[:, j:j + 1] = best
        choice.scatter_(1, best, -math.inf)
    return ids


@jit
def route_kernel(logits_ptr, bias_ptr, ids_ptr, weights_ptr, scores_ptr, T, E, scale,
                 K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    """Everything of `route` for BLOCK_T tokens, the scores held in registers."""
    t, e = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64), tl.arange(0, BLOCK_E)
    ok = (t < T)[:, None] & (e < E)[None, :]
    score = tl.sigmoid(_widen(tl.load(logits_ptr + t[:, None] * E + e[None, :], mask=ok, other=0.0)))
    tl.store(scores_ptr + t[:, None] * E + e[None, :], score, mask=ok)
    choice = score + _widen(tl.load(bias_ptr + e, mask=e < E, other=0.0))[None, :]
    lowest = -3.4028234663852886e38
    choice = tl.where(choice > lowest, choice, lowest)                                   # NaN compares false
    choice = tl.where(ok, choice, float("-inf"))
    slot = tl.arange(0, BLOCK_K)[None, :]
    ids, weights = tl.zeros((BLOCK_T, BLOCK_K), tl.int64), tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for j in tl.static_range(K):
        best = tl.argmax(choice, axis=1)[:, None]                                        # the first of equals
        hit = e[None, :] == best
        ids = tl.where(slot == j, best.to(tl.int64), ids)
        weights = tl.where(slot == j, tl.sum(tl.where(hit, score, 0.0), axis=1)[:, None], weights)
        choice = tl.where(hit, float("-inf"), choice)
    if NORMALISE:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    at = t[:, None] * K + slot
    tl.store(ids_ptr + at, ids, mask=(t < T)[:, None] & (slot < K))
    tl.store(weights_ptr + at, weights * scale, mask=(t < T)[:, None] & (slot < K))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, k, scale, normalise):
        T, E = logits.shape
        ids = logits.new_empty(T, k, dtype=torch.long)
        weights, scores = (logits.new_empty(T, n, dtype=torch.float32) for n in (k, E))
        block = 4 if E > 64 else 16
        route_kernel[(triton.cdiv(T, block),)](logits.contiguous(), bias.contiguous(), ids, weights, scores, T, E, float(scale),
                                               K=k, NORMALISE=normalise, BLOCK_T=block, BLOCK_E=triton.next_power_of_2(E),
                                               BLOCK_K=triton.next_power_of_2(k))
        ctx.save_for_backward(ids, scores)
        ctx.scale, ctx.normalise, ctx.dtype = scale, normalise, logits.dtype
        ctx.mark_non_differentiable(ids)
        return ids, weights, scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _, d_weights, d_scores):
        ids, scores = ctx.saved_tensors
        d_chosen = d_weights * ctx.scale
        if ctx.normalise:                                                                # w = c / n: dc = (dw − Σ dw·c / n) / n
            chosen = scores.gather(1, ids)
            n = chosen.sum(1, keepdim=True) + 1e-20
            d_chosen = (d_chosen - (d_chosen * chosen).sum(1, keepdim=True) / n) / n
        d_scores = d_scores.scatter_add(1, ids, d_chosen)                                # ids are distinct: one addend each
        return (d_scores * scores * (1 - scores)).to(ctx.dtype), None, None, None, None


# ------------------------------------------------------------------------------------------- the sorted order, and back


class Plan(NamedTuple):
    """Where each of the S = T·k (token, slot) pairs goes when they are sorted by expert; all int64."""
    order: Tensor                                # [S] sorted row -> flat slot t·k + j; equal experts keep their order
    rows: Tensor                                 # [S] sorted row -> token t
    counts: Tensor                               # [E] rows per expert
    offsets: Tensor                              # [E + 1] first row of each expert, and S
    inverse: Tensor                              # [S] flat slot -> sorted row


@torch.no_grad()
def plan(ids: Tensor, n_experts: int, backend: str | None = None) -> Plan:
    """Sort the pairs of ids [T, k] by expert, stably, and count them. Ids outside 0 … n_experts − 1 are undefined."""
    flat, k = ids.reshape(-1), ids.shape[-1]
    if choose(flat, backend) == "triton" and len(flat):
        return _plan_triton(flat, k, n_experts)
    order = (flat.short() if n_experts < 2 ** 15 else flat).sort(stable=True).indices    # the radix sort likes few bits
    counts = torch.bincount(flat, minlength=n_experts)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return Plan(order, order // k, counts, F.pad(counts.cumsum(0), (1, 0)), inverse)


@jit
def count_kernel(ids_ptr, counts_ptr, S, E, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts [tiles, E]: how many of a tile's BLOCK slots go to each expert."""
    slot, e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    expert = tl.load(ids_ptr + slot, mask=slot < S, other=0).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0) * E + e, tl.histogram(expert, BLOCK_E, mask=slot < S), mask=e < E)


@jit
def place_kernel(ids_ptr, first_ptr, order_ptr, rows_ptr, inverse_ptr, S, E, k, BLOCK: tl.constexpr):
    """Row of a slot = first row of its (tile, expert) + earlier slots of its tile with the same expert: stable, no atomics."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + slot, mask=slot < S, other=-1).to(tl.int32)
    earlier = (expert[:, None] == expert[None, :]) & (slot[None, :] < slot[:, None])
    row = tl.load(first_ptr + tl.program_id(0) * E + expert, mask=slot < S, other=0) + tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order_ptr + row, slot, mask=slot < S)
    tl.store(rows_ptr + row, slot // k, mask=slot < S)
    tl.store(inverse_ptr + slot, row, mask=slot < S)


def _plan_triton(flat: Tensor, k: int, E: int, block: int = 128) -> Plan:
    S, tiles = len(flat), triton.cdiv(len(flat), block)
    per_tile = flat.new_empty(tiles, E, dtype=torch.int32)
    count_kernel[(tiles,)](flat, per_tile, S, E, BLOCK=block, BLOCK_E=max(triton.next_power_of_2(E), 16))
    counts = per_tile.sum(0)                                                             # [E] int64
    offsets = F.pad(counts.cumsum(0), (1, 0))
    first = offsets[:-1] + per_tile.cumsum(0) - per_tile                                 # [tiles, E]
    order, rows, inverse = (torch.empty_like(flat) for _ in range(3))
    place_kernel[(tiles,)](flat, first, order, rows, inverse, S, E, k, BLOCK=block)
    return Plan(order, rows, counts, offsets, inverse)


def combine(y: Tensor, inverse: Tensor, weights: Tensor | None, k: int, backend: str | None = None) -> Tensor:
    """out[t] = Σ_j weights[t, j] · y[inverse[t·k + j]], in float32 and in the order of j: deterministic, and a token's sum
    does not depend on the others. y [S, D], weights [T, k] or None for ones; returns [T, D]. No gradient: see `_Experts`."""
    T, D = len(inverse) // k, y.shape[1]
    if choose(y, backend) == "triton" and T:
        out = y.new_empty(T, D)
        weights = None if weights is None else weights.contiguous()
        combine_kernel[(T, triton.cdiv(D, 1024))](y, inverse, weights, out, D, y.stride(0), k, BLOCK_D=1024)
        return out
    table = wide(y)
    weights = None if weights is None else weights.to(table.dtype)
    # embedding_bag gathers, weighs and adds in one pass: 5 to 10 times faster on a CPU than indexing, multiplying and summing
    return F.embedding_bag(inverse.view(T, k), table, mode="sum", per_sample_weights=weights).to(y.dtype)


@jit
def combine_kernel(y_ptr, inverse_ptr, weights_ptr, out_ptr, D, stride_y, k, BLOCK_D: tl.constexpr):
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for j in range(k):
        row = tl.load(inverse_ptr + t * k + j).to(tl.int64)                              # row · stride may exceed 2^31
        y = _widen(tl.load(y_ptr + row * stride_y + d, mask=d < D, other=0.0))
        if weights_ptr is not None:
            y *= _widen(tl.load(weights_ptr + t * k + j))
        acc += y
    tl.store(out_ptr + t * D + d, _narrow(acc, out_ptr.dtype.element_ty), mask=d < D)


# ------------------------------------------------------------------------------------ Figure 10, box by box, in torch


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def _identity(x: Tensor) -> Tensor:
    return x


def _through_mxfp8(x: Tensor) -> Tensor:
    return mxfp8_dequantise(*mxfp8_quantise(x, "torch"), "torch")


def _through_nvfp4(x: Tensor) -> Tensor:
    return nvfp4_dequantise(*nvfp4_quantise(x, "token", "torch"), "torch")


class TorchStages:
    """The boxes of Figure 10 in plain torch: the reference for the kernels, and what a CPU runs.

    Block-scaled products are emulated: operands go through their format and back, and are multiplied in float32.
    `rows` picks rows of the operand on the fly (None: as they are); weights are [E, N, K] for products a · wᵀ.
    """

    def __init__(self, precision: str):
        self.forward = {"native": _identity, "mxfp8": _through_mxfp8, "nvfp4": _through_nvfp4}[precision]
        self.backward = _identity if precision == "native" else _through_mxfp8

    def fprop_up(self, x: Tensor, rows: Tensor | None, w_gate_up: Tensor, p: Plan) -> tuple[Tensor, Tensor]:
        """Gate and up projections [S, 2I] and h = silu(gate) · up [S, I]."""
        pre = grouped_mm(self.forward(x), rows, self.forward(w_gate_up), p).to(x.dtype)
        gate, up = wide(pre).chunk(2, dim=1)
        return pre, F.silu(gate).mul_(up).to(x.dtype)

    def fprop_down(self, h: Tensor, w_down: Tensor, p: Plan) -> Tensor:
        return grouped_mm(self.forward(h), None, self.forward(w_down), p).to(h.dtype)

    def combine(self, y: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
        return combine(y, inverse, weights, k, "torch")

    def dgrad_down(self, dy: Tensor, rows: Tensor | None, w_down: Tensor, pre: Tensor, gates: Tensor, p: Plan
                   ) -> tuple[Tensor, Tensor, Tensor]:
        """Back through w_down and SwiGLU: d pre [S, 2I], gates · h [S, I] (what wgrad needs of h), d gates [S]."""
        w = self.backward(w_down.transpose(1, 2))
        dh = wide(grouped_mm(self.backward(dy), rows, w, p))                            # [S, I], not yet times the gate
        gate, up = wide(pre).chunk(2, dim=1)
        act = F.silu(gate)
        h = act * up
        d_gates = torch.linalg.vecdot(dh, h)
        gates = gates.to(dh.dtype).unsqueeze(1)
        dh *= gates
        d_pre = torch.empty_like(pre, dtype=dh.dtype)
        d_gate, d_up = d_pre.chunk(2, dim=1)
        torch.mul(dh, act, out=d_up)
        # d silu(g) = σ(g) · (1 + g · (1 − σ(g)))
        torch.ops.aten.silu_backward.grad_input(dh.mul_(up), gate, grad_input=d_gate)
        return d_pre.to(pre.dtype), h.mul_(gates).to(pre.dtype), d_gates

    def dgrad_up(self, d_pre: Tensor, w_gate_up: Tensor, p: Plan) -> Tensor:
        return grouped_mm(self.backward(d_pre), None, self.backward(w_gate_up.transpose(1, 2)), p).to(d_pre.dtype)

    def wgrad(self, a: Tensor, a_rows: Tensor | None, b: Tensor, b_rows: Tensor | None, p: Plan) -> Tensor:
        """out[e] = Σ over e's rows of aᵢᵀ bᵢ, [E, M, N]; exactly zero for an expert without rows."""
        a = a if a_rows is None else a.index_select(0, a_rows)
        b = b if b_rows is None else b.index_select(0, b_rows)
        if self.backward is _identity and _grouped_mm_takes(a, b):
            out = F.grouped_mm(a.t(), b, offs=p.offsets[1:].int())
            return out.masked_fill_((p.counts == 0).view(-1, 1, 1), 0) if out.is_cuda else out
        out, sizes = a.new_zeros(len(p.counts), a.shape[1], b.shape[1]), p.counts.tolist()
        for a_e, b_e, out_e, n in zip(a.split(sizes), b.split(sizes), out.unbind(0), sizes):
            if n and self.backward is not _identity:                                     # blocks of 32 along the rows
                a_e, b_e = (self.backward(F.pad(q.t(), (0, -n % MX_BLOCK))).t() for q in (a_e, b_e))
            if n:
                out_e.copy_(a_e.t() @ b_e)
        return out


def grouped_mm(a: Tensor, rows: Tensor | None, w: Tensor, p: Plan) -> Tensor:
    """out[i] = w[expert of i] · a[rows[i]] for a [·, K], w [E, N, K]: [S, N]. With w transposed: dgrad.

    torch's own grouped_mm where it can (16-byte strides, no float64), else a loop. Never `w[e]` inside autograd: its backward
    would write a zero tensor of w's full size for every expert.
    """
    a = a if rows is None else a.index_select(0, rows)
    if _grouped_mm_takes(a, w):
        return F.grouped_mm(a, w.transpose(1, 2), offs=p.offsets[1:].int())
    out, sizes = a.new_empty(len(a), w.shape[1]), p.counts.tolist()
    for a_e, w_e, out_e, n in zip(a.split(sizes), w.unbind(0), out.split(sizes), sizes):
        if n:
            torch.mm(a_e, w_e.t(), out=out_e)
    return out


def _grouped_mm_takes(a: Tensor, b: Tensor) -> bool:
    sizes = (a.shape[1], *b.shape[1:])
    dtypes = (torch.bfloat16,) if a.is_cuda else (torch.bfloat16, torch.float32)
    return a.dtype == b.dtype and a.dtype in dtypes and not any(n % 8 for n in sizes)


# ------------------------------------------------------------------------------------------------ the grouped GEMM


@jit
def _tile(pid, n_m, n_n, GROUP_M: tl.constexpr):
    """Program number to tile: GROUP_M tiles of rows cross all columns together, so that neighbours in time share in L2."""
    group, within = pid // (GROUP_M * n_n), pid % (GROUP_M * n_n)
    size = tl.minimum(n_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % size, within // size


@jit
def _multiply(a, a_scale, b, b_scale, acc, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """acc + a · b for a tile a [M, K] and b [K, N], packed along K where two share a byte; scales [M, ·] and [N, ·].

    NATIVE: the chip multiplies block-scaled operands itself. Otherwise they are decoded, exactly: at most 6 significant bits.
    """
    if NATIVE and FORMAT == "mxfp8":
        return tl.dot_scaled(a, a_scale, "e4m3", b, b_scale, "e4m3", acc)
    elif NATIVE and FORMAT == "nvfp4":
        a_scale, b_scale = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
    else:
        if FORMAT == "mxfp8":
            a = _mxfp8_values(a, a_scale).to(tl.bfloat16)
            b = tl.trans(_mxfp8_values(tl.trans(b), b_scale).to(tl.bfloat16))
        elif FORMAT == "nvfp4":
            a = _nvfp4_values(a, _e4m3_values(a_scale)).to(tl.bfloat16)
            b = tl.trans(_nvfp4_values(tl.trans(b), _e4m3_values(b_scale)).to(tl.bfloat16))
        if INTERPRETED:
            a, b = _widen(a), _widen(b)
        return tl.dot(a, b, acc, input_precision="ieee")


@jit
def grouped_gemm_kernel(a_ptr, a_scale_ptr, a_outer_ptr, rows_ptr,                       # a [·, K], row i is rows[i]
                        w_ptr, w_scale_ptr, w_outer_ptr,                                 # w [E, N, K]
                        out_ptr, pre_ptr, h_ptr, gates_ptr, d_gates_ptr,
                        tile_expert_ptr, tile_start_ptr, offsets_ptr,
                        S, N, K, n_m, stride_a, stride_we, stride_wn, stride_wk,
                        FORMAT: tl.constexpr, NATIVE: tl.constexpr, EPILOGUE: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """One tile of out[i] = w[expert of i] · a[rows[i]], rows sorted by expert, sizes as they fall, no padding rows.

    EPILOGUE "none" stores it. "swiglu" takes w's gate and up rows alternately, so that a gate and its up value meet in one
    thread, and stores both and h. "swiglu grad" has N = I, takes the product for dh and goes on through SwiGLU.
    """
    m_tile, n_tile = _tile(tl.program_id(0), n_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    expert = tl.load(tile_expert_ptr + m_tile).to(tl.int64)
    if expert < 0:                                                                       # the tile map is an upper bound
        return
    m = tl.load(tile_start_ptr + m_tile) + tl.arange(0, BLOCK_M)
    m_ok = m < tl.load(offsets_ptr + expert + 1)
    row = m
    if rows_ptr is not None:
        row = tl.load(rows_ptr + m, mask=m_ok, other=0)
    m, row = m.to(tl.int64), row.to(tl.int64)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = n // 2 + n % 2 * (N // 2) if EPILOGUE == "swiglu" else n
    PACK: tl.constexpr = 2 if FORMAT == "nvfp4" else 1
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    k, block = tl.arange(0, BLOCK_K // PACK), tl.arange(0, BLOCK_K // BLOCK)
    a_ptrs = a_ptr + row[:, None] * stride_a + k[None, :]
    w_ptrs = w_ptr + expert * stride_we + w_row[None, :] * stride_wn + k[:, None] * stride_wk
    a_scale_ptrs = a_scale_ptr + row[:, None] * (K // BLOCK) + block[None, :] if FORMAT != "plain" else None
    w_scale_ptrs = w_scale_ptr + (expert * N + w_row)[:, None] * (K // BLOCK) + block[None, :] if FORMAT != "plain" else None
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k_ok, block_ok = k < (K - k0) // PACK, block < (K - k0) // BLOCK
        a = tl.load(a_ptrs + k0 // PACK, mask=m_ok[:, None] & k_ok[None, :], other=0)
        w = tl.load(w_ptrs + k0 // PACK * stride_wk, mask=k_ok[:, None] & (n < N)[None, :], other=0)
        a_scale, w_scale = None, None
        if FORMAT != "plain":
            a_scale = tl.load(a_scale_ptrs + k0 // BLOCK, mask=m_ok[:, None] & block_ok[None, :], other=0)
            w_scale = tl.load(w_scale_ptrs + k0 // BLOCK, mask=(n < N)[:, None] & block_ok[None, :], other=0)
        acc = _multiply(a, a_scale, w, w_scale, acc, FORMAT, NATIVE)
    if FORMAT == "nvfp4":                                                                # the FP32 scales, one per row and column
        acc *= tl.load(a_outer_ptr + row, mask=m_ok, other=0.0)[:, None]
        acc *= tl.load(w_outer_ptr + expert * N + w_row, mask=n < N, other=0.0)[None, :]
    if EPILOGUE == "none":
        at = m[:, None] * N + n[None, :]
        tl.store(out_ptr + at, _narrow(acc, out_ptr.dtype.element_ty), mask=m_ok[:, None] & (n < N)[None, :])
    elif EPILOGUE == "swiglu":
        left, right = _halves(acc)                                                       # by halves: fewer registers at a time
        n = n_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 4)
        _swiglu(left, m, n, m_ok, N // 2, pre_ptr, out_ptr)
        _swiglu(right, m, n + BLOCK_N // 4, m_ok, N // 2, pre_ptr, out_ptr)
    else:
        left, right = _halves(acc)
        n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        gates = tl.load(gates_ptr + m, mask=m_ok, other=0.0)[:, None]
        part = _swiglu_grad(left, gates, m, n, m_ok, N, pre_ptr, out_ptr, h_ptr)
        part += _swiglu_grad(right, gates, m, n + BLOCK_N // 2, m_ok, N, pre_ptr, out_ptr, h_ptr)
        tl.store(d_gates_ptr + n_tile.to(tl.int64) * S + m, part, mask=m_ok)             # one partial sum per column tile


@jit
def _halves(x):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@jit
def _swiglu(acc, m, n, m_ok, I, pre_ptr, h_ptr):
    """Columns gate, up, gate, up, … of acc: store pre [S, 2I] and h = silu(gate) · up [S, I]."""
    gate, up = tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))
    ok, at = m_ok[:, None] & (n < I)[None, :], m[:, None] * (2 * I) + n[None, :]
    dtype = h_ptr.dtype.element_ty
    gate, up = _narrow(gate, dtype), _narrow(up, dtype)
    tl.store(pre_ptr + at, gate, mask=ok)
    tl.store(pre_ptr + at + I, up, mask=ok)
    gate, up = _widen(gate), _widen(up)                                                  # h as the backward recomputes it
    tl.store(h_ptr + m[:, None] * I + n[None, :], _narrow(gate * tl.sigmoid(gate) * up, dtype), mask=ok)


@jit
def _swiglu_grad(dh, gates, m, n, m_ok, I, pre_ptr, d_pre_ptr, h_ptr):
    """dh = dy · w_down before the gate: store d pre [S, 2I] and gates · h [S, I]; return ⟨dh, h⟩ over these columns."""
    ok, at = m_ok[:, None] & (n < I)[None, :], m[:, None] * (2 * I) + n[None, :]
    dtype = h_ptr.dtype.element_ty
    gate = _widen(tl.load(pre_ptr + at, mask=ok, other=0.0))
    up = _widen(tl.load(pre_ptr + at + I, mask=ok, other=0.0))
    sig = tl.sigmoid(gate)
    act = gate * sig
    tl.store(h_ptr + m[:, None] * I + n[None, :], _narrow(act * up * gates, dtype), mask=ok)
    part = tl.sum(dh * act * up, axis=1)
    dh *= gates
    # d silu(g) = σ(g) · (1 + g · (1 − σ(g)))
    tl.store(d_pre_ptr + at, _narrow(dh * up * (sig + act * (1 - sig)), dtype), mask=ok)
    tl.store(d_pre_ptr + at + I, _narrow(dh * act, dtype), mask=ok)
    return part


@jit
def wgrad_kernel(a_ptr, a_scale_ptr, a_rows_ptr, b_ptr, b_scale_ptr, b_rows_ptr, out_ptr, offsets_ptr, M, N, S,
                 FORMAT: tl.constexpr, NATIVE: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """One tile of out[e] = Σ over e's rows of aᵢᵀ bᵢ. An expert without rows runs no step and stores its zeros.

    "plain": a [·, M] and b [·, N] in rows. "mxfp8": codes [M, S] and [N, S], transposed when they were quantised, each
    expert's span a multiple of 32.
    """
    n_m, n_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    expert = (tl.program_id(0) // (n_m * n_n)).to(tl.int64)
    m_tile, n_tile = _tile(tl.program_id(0) % (n_m * n_n), n_m, n_n, GROUP_M)
    m, n = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok, m_row, n_row = m < M, n < N, m.to(tl.int64), n.to(tl.int64)
    start, end = tl.load(offsets_ptr + expert).to(tl.int32), tl.load(offsets_ptr + expert + 1).to(tl.int32)
    if FORMAT == "mxfp8":
        start, end = tl.multiple_of(start, 32), tl.multiple_of(end, 32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i0 in range(start, end, BLOCK_K):
        i = i0 + tl.arange(0, BLOCK_K)
        i_ok = i < end
        if FORMAT == "plain":
            a_row = tl.load(a_rows_ptr + i, mask=i_ok, other=0) if a_rows_ptr is not None else i
            b_row = tl.load(b_rows_ptr + i, mask=i_ok, other=0) if b_rows_ptr is not None else i
            a = tl.load(a_ptr + a_row.to(tl.int64)[:, None] * M + m[None, :], mask=i_ok[:, None] & m_ok[None, :], other=0)
            b = tl.load(b_ptr + b_row.to(tl.int64)[:, None] * N + n[None, :], mask=i_ok[:, None] & n_ok[None, :], other=0)
            acc = _multiply(tl.trans(a), None, b, None, acc, FORMAT, NATIVE)
        else:
            j = i0 // 32 + tl.arange(0, BLOCK_K // 32)
            j_ok = (j < end // 32)[None, :]
            a = tl.load(a_ptr + m_row[:, None] * S + i[None, :], mask=m_ok[:, None] & i_ok[None, :], other=0)
            b = tl.load(b_ptr + n_row[None, :] * S + i[:, None], mask=i_ok[:, None] & n_ok[None, :], other=0)
            a_scale = tl.load(a_scale_ptr + m_row[:, None] * (S // 32) + j[None, :], mask=m_ok[:, None] & j_ok, other=0)
            b_scale = tl.load(b_scale_ptr + n_row[:, None] * (S // 32) + j[None, :], mask=n_ok[:, None] & j_ok, other=0)
            acc = _multiply(a, a_scale, b, b_scale, acc, FORMAT, NATIVE)
    at = (expert * M + m_row)[:, None] * N + n[None, :]
    tl.store(out_ptr + at, _narrow(acc, out_ptr.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


# ----------------------------------------------------------------------------------- Figure 10, box by box, in Triton


class Tile(NamedTuple):
    """How one kernel is cut: block sizes (block_k counts values, not bytes), warps, pipeline stages."""
    m: int
    n: int
    k: int
    warps: int
    stages: int


# (chip, format) -> tiles of the epilogues none and swiglu, of swiglu grad, and of wgrad. Chosen so that nothing spills and
# the loop pipelines, as far as a compiler can tell; `--bench` is what can tell more.
TILES = {
    (80, "plain"): (Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 5)),
    (90, "plain"): (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 5)),
    (90, "mxfp8"): (Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    (90, "nvfp4"): (Tile(128, 128, 32, 8, 4), None, None),
    (100, "plain"): (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 5)),
    (100, "mxfp8"): (Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 3)),
    (100, "nvfp4"): (Tile(128, 128, 128, 8, 3), None, None),
}


def tile_map(p: Plan, block: int) -> tuple[Tensor, Tensor]:
    """Expert and first row of every tile of `block` rows, int32, −1 where there is none.

    How many tiles there are is known only on the device, and asking would stall the queue; the length is the bound
    S for S ≤ E, else E − 1 + ⌈(S − E + 1) / block⌉: E − 1 experts with one row each and one with the rest.
    """
    S, E = len(p.order), len(p.counts)
    bound = S if S <= E else E - 1 + -(-(S - E + 1) // block)
    tiles = (p.counts + block - 1) // block
    ends, i = tiles.cumsum(0), torch.arange(bound, device=p.counts.device)
    expert = torch.searchsorted(ends, i, right=True)
    real = expert < E
    safe = expert.clamp(max=E - 1)
    start = p.offsets[safe] + (i - ends[safe] + tiles[safe]) * block
    return torch.where(real, expert, -1).int(), start.int()


def padded_columns(p: Plan) -> tuple[Tensor, Tensor]:
    """For wgrad in MXFP8: each expert's rows padded to a multiple of 32. Source row of each padded one, −1 for padding,
    int32, again of a length known without asking the device; and the padded offsets [E + 1]."""
    S, E = len(p.order), len(p.counts)
    bound = -(-(S + (MX_BLOCK - 1) * min(E, S)) // MX_BLOCK) * MX_BLOCK
    offsets = F.pad(((p.counts + MX_BLOCK - 1) // MX_BLOCK * MX_BLOCK).cumsum(0), (1, 0))
    i = torch.arange(bound, device=p.counts.device)
    expert = torch.searchsorted(offsets[1:], i, right=True).clamp(max=E - 1)
    within = i - offsets[expert]
    return torch.where(within < p.counts[expert], p.offsets[expert] + within, -1).int(), offsets


class TritonStages:
    """The boxes of Figure 10 as kernel launches. Same methods and meaning as `TorchStages`."""

    def __init__(self, precision: str, device: torch.device, tiles: tuple[Tile, ...] | None = None):
        self.chip = {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80) if device.type == "cuda" else 90
        self.native = self.chip == 100
        self.forward = "plain" if precision == "native" else precision
        self.backward = "plain" if precision == "native" else "mxfp8"
        self.tiles = tiles

    def _tile(self, fmt: str, which: int) -> Tile:
        return (self.tiles or TILES[self.chip, fmt])[which]

    @staticmethod
    def quantise(x: Tensor, fmt: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, block scales and outer scales of an operand [..., K]; any strides (weights arrive transposed in dgrad)."""
        if fmt == "plain":
            return x, None, None
        if fmt == "mxfp8":
            codes, scales = _mxfp8_triton(x)
            return codes.view(torch.uint8), scales, None
        codes, scales, g = _nvfp4_triton(x, "token")
        return codes, scales.view(torch.uint8), g

    def _gemm(self, a: Tensor, rows: Tensor | None, w: Tensor, p: Plan, fmt: str, epilogue: str,
              pre: Tensor | None = None, gates: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        S, (_, N, K), dtype = len(p.order), w.shape, a.dtype
        tile = self._tile(fmt, 1 if epilogue == "swiglu grad" else 0)
        (a, a_scale, a_outer), (w, w_scale, w_outer) = self.quantise(a, fmt), self.quantise(w, fmt)
        n_n, h, d_gates = triton.cdiv(N, tile.n), None, None
        if epilogue == "swiglu":
            out, pre = a.new_empty(S, N // 2, dtype=dtype), a.new_empty(S, N, dtype=dtype)
        elif epilogue == "swiglu grad":
            out, h = a.new_empty(S, 2 * N, dtype=dtype), a.new_empty(S, N, dtype=dtype)
            d_gates = a.new_zeros(n_n, S, dtype=torch.float32)
        else:
            out = a.new_empty(S, N, dtype=dtype)
        expert, start = tile_map(p, tile.m)
        grouped_gemm_kernel[(len(expert) * n_n,)](
            a, a_scale, a_outer, rows, w, w_scale, w_outer, out, pre, h, gates, d_gates, expert, start, p.offsets,
            S, N, K, len(expert), a.stride(0), *w.stride(), FORMAT=fmt, NATIVE=self.native, EPILOGUE=epilogue,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=8, num_warps=tile.warps, num_stages=tile.stages)
        return out, pre if h is None else h, d_gates

    def fprop_up(self, x, rows, w_gate_up, p):
        h, pre, _ = self._gemm(x, rows, w_gate_up, p, self.forward, "swiglu")
        return pre, h

    def fprop_down(self, h, w_down, p):
        return self._gemm(h, None, w_down, p, self.forward, "none")[0]

    def combine(self, y, inverse, weights, k):
        return combine(y, inverse, weights, k, "triton")

    def dgrad_down(self, dy, rows, w_down, pre, gates, p):
        d_pre, h, parts = self._gemm(dy, rows, w_down.transpose(1, 2), p, self.backward, "swiglu grad", pre, gates.float())
        return d_pre, h, parts.sum(0)

    def dgrad_up(self, d_pre, w_gate_up, p):
        return self._gemm(d_pre, None, w_gate_up.transpose(1, 2), p, self.backward, "none")[0]

    def wgrad(self, a, a_rows, b, b_rows, p):
        tile, (M, N), E = self._tile(self.backward, 2), (a.shape[1], b.shape[1]), len(p.counts)
        out, S, offsets, a_scale, b_scale = a.new_empty(E, M, N), len(p.order), p.offsets, None, None
        if self.backward == "mxfp8":
            columns, offsets = padded_columns(p)
            S = len(columns)
            picked = [columns if r is None else torch.where(columns < 0, -1, r[columns.clamp(min=0).long()]).int()
                      for r in (a_rows, b_rows)]
            (a, a_scale), (b, b_scale) = (_mxfp8_triton(x.t(), columns=c) for x, c in zip((a, b), picked))
            a, b, a_rows, b_rows = a.view(torch.uint8), b.view(torch.uint8), None, None
        grid = (E * triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)
        wgrad_kernel[grid](a, a_scale, a_rows, b, b_scale, b_rows, out, offsets, M, N, S, FORMAT=self.backward, NATIVE=self.native,
                           BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=8,
                           num_warps=tile.warps, num_stages=tile.stages)
        return out


# -------------------------------------------------------------------------------------- Figure 10, the flow (K1, K2, K4)


def _flow(x, weights, w_gate_up, w_down, p, k, stages):
    """Forward through the boxes: the output and the gate and up projections."""
    rows = None if weights is None else p.rows
    pre, h = stages.fprop_up(x, rows, w_gate_up, p)
    y = stages.fprop_down(h, w_down, p)
    return y if weights is None else stages.combine(y, p.inverse, weights, k), pre


class _Experts(torch.autograd.Function):
    """Sorted or unsorted rows through the experts and back. With `weights` None the rows of x are the sorted ones."""

    @staticmethod
    def forward(ctx, x, weights, w_gate_up, w_down, p, k, stages):
        y, pre = _flow(x, weights, w_gate_up, w_down, p, k, stages)
        ctx.save_for_backward(x, weights, w_gate_up, w_down, pre)                        # h is recomputed, y is not needed
        ctx.p, ctx.k, ctx.stages = p, k, stages
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weights, w_gate_up, w_down, pre = ctx.saved_tensors
        p, stages, needs, dy = ctx.p, ctx.stages, ctx.needs_input_grad, dy.contiguous()
        dx = d_weights = d_w_gate_up = d_w_down = None
        rows = None if weights is None else p.rows
        gates = pre.new_ones(len(pre)) if weights is None else weights.flatten()[p.order]
        d_pre, h, d_gates = stages.dgrad_down(dy, rows, w_down, pre, gates, p)
        if needs[0]:
            dx = stages.dgrad_up(d_pre, w_gate_up, p)
            dx = dx if weights is None else stages.combine(dx, p.inverse, None, ctx.k)
        if needs[1]:
            d_weights = d_gates[p.inverse].view_as(weights).to(weights.dtype)
        if needs[2]:
            d_w_gate_up = stages.wgrad(d_pre, None, x, rows, p).to(w_gate_up.dtype)
        if needs[3]:
            d_w_down = stages.wgrad(dy, rows, h, None, p).to(w_down.dtype)
        return dx, d_weights, d_w_gate_up, d_w_down, None, None, None


def experts(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, precision: str = "native",
            backend: str | None = None) -> Tensor:
    """Every token through its experts (M2, K1): y[t] = Σ_j weights[t, j] · E_ids[t, j](x[t]).

        E(x) = w_down (silu(w_gate x) · (w_up x))

    x [T, D], ids and weights [T, k], w_gate_up [E, 2I, D] (the gate's rows first), w_down [E, D, I]; returns [T, D].
    `precision`: "native" (the dtype of x), "mxfp8" both ways, or "nvfp4" forward and MXFP8 backward (the report's; D and I
    multiples of 32 for both). Differentiable in x, weights and both w. T = 0 and experts without tokens are ordinary cases.
    """
    _check(x, w_gate_up, w_down, precision)
    if ids.shape != weights.shape or ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} must both be [{len(x)}, k], a row a token")
    stages = _stages(x, precision, backend)
    p = plan(ids, len(w_gate_up), "torch" if isinstance(stages, TorchStages) else "triton")
    if not torch.is_grad_enabled():              # decoding a token a row: what autograd keeps would cost a fifth of it
        return _flow(x.contiguous(), weights, w_gate_up, w_down, p, ids.shape[1], stages)[0]
    return _Experts.apply(x.contiguous(), weights, w_gate_up, w_down, p, ids.shape[1], stages)


def grouped_experts(x_sorted: Tensor, counts: Tensor, w_gate_up: Tensor, w_down: Tensor, precision: str = "native",
                    backend: str | None = None) -> Tensor:
    """`experts` for rows that are sorted by expert already, as after an all-to-all; counts [E] int64, summing to the rows."""
    _check(x_sorted, w_gate_up, w_down, precision)
    if counts.shape != w_gate_up.shape[:1]:
        raise ValueError(f"counts {tuple(counts.shape)} must be [{len(w_gate_up)}], a number per expert")
    rows = torch.arange(len(x_sorted), device=x_sorted.device)
    p = Plan(rows, rows, counts, F.pad(counts.cumsum(0), (1, 0)), rows)
    return _Experts.apply(x_sorted.contiguous(), None, w_gate_up, w_down, p, 1, _stages(x_sorted, precision, backend))


def _check(x: Tensor, w_gate_up: Tensor, w_down: Tensor, precision: str) -> None:
    if not x.dtype == w_gate_up.dtype == w_down.dtype:
        raise ValueError(f"x is {x.dtype}, w_gate_up {w_gate_up.dtype} and w_down {w_down.dtype}: cast them to one type")
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: choose one of {', '.join(PRECISIONS)}")
    E, D, I = w_down.shape
    if w_gate_up.shape != (E, 2 * I, D) or x.dim() != 2 or x.shape[1] != D:
        raise ValueError(f"w_down {tuple(w_down.shape)} is [E, D, I], so w_gate_up must be {(E, 2 * I, D)}, not "
                         f"{tuple(w_gate_up.shape)}, and x [T, {D}], not {tuple(x.shape)}")
    if precision != "native" and (D % MX_BLOCK or I % MX_BLOCK):
        raise ValueError(f"{precision} needs widths that are multiples of {MX_BLOCK}, not D = {D}, I = {I}; use 'native'")


def _stages(x: Tensor, precision: str, backend: str | None) -> TorchStages | TritonStages:
    # An empty batch launches nothing: torch's path knows what to return.
    if choose(x, backend, precision) == "torch" or not len(x):
        return TorchStages(precision)
    return TritonStages(precision, x.device)


# ------------------------------------------------------------------------------------------------------------ the lessons


def lesson_round_trip(seed: int = 0) -> dict[str, tuple[float, float]]:
    """Relative RMS error of each format, over all tokens and of the worst token, when tokens differ in size (K2, K4)."""
    g = torch.Generator().manual_seed(seed)
    even = torch.randn(512, 1024, generator=g)
    uneven = even * torch.exp(3 * torch.randn(512, 1, generator=g))                      # sizes lognormal, σ = 3
    formats = {"MXFP8": _through_mxfp8, "NVFP4, scale per token": _through_nvfp4,
               "NVFP4, scale per tensor": lambda x: nvfp4_dequantise(*nvfp4_quantise(x, "tensor"))}
    print("round trip, relative RMS error   equal tokens   uneven tokens   worst uneven token")
    result = {}
    for name, through in formats.items():
        errors = [(through(x) - x).norm(dim=1) / x.norm(dim=1) for x in (even, uneven)]
        result[name] = tuple(e.square().mean().sqrt().item() for e in errors)
        print(f"  {name:28}{result[name][0]:15.2%}{result[name][1]:16.2%}{errors[1].max():21.2%}")
    return result


def causal_outputs(x: Tensor, w: Tensor, outer: str) -> Tensor:
    """A small causal model: attention over each of x [..., T, D], then one linear layer on NVFP4 activations."""
    h = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return nvfp4_dequantise(*nvfp4_quantise(h, outer, "torch"), "torch") @ w.t()


def lesson_leak(seed: int = 0) -> dict[str, tuple[int, int]]:
    """K3: outputs that move although nothing that they may depend on has changed. One sequence's last token is exchanged
    (its earlier tokens must not notice), then the sequence shares its batch with a louder one (none may notice)."""
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(1, 64, 128, generator=g), torch.randn(128, 128, generator=g)
    loud = 100 * torch.randn(1, 64, 128, generator=g)
    print("outputs that move   of 63, when the 64th token is exchanged   of 64, when a louder sequence joins the batch")
    result = {}
    for outer in ("tensor", "token"):
        print(f"  scale per {outer:7}", end="")
        result[outer] = ()
        for other, n in ((torch.cat((x[:, :-1], loud[:, -1:]), dim=1), 63), (torch.cat((x, loud)), 64)):
            before, after = (causal_outputs(v, w, outer)[0, :n] for v in (x, other))
            result[outer] += (before != after).any(dim=1).sum().item(),
            print(f"{result[outer][-1]:16} by {(before - after).norm() / before.norm():7.2%} of their size", end="")
        print()
    return result


def lesson_division(n: int = 4_000_000, seed: int = 0) -> int:
    """K5: how many E2M1 codes change when x / scale becomes x · (1 / scale), as fast division may compute it."""
    x = torch.randn(n // 16, 16, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    scale = (x.abs().amax(1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    exact, fast = _e2m1(x.abs() / scale), _e2m1(x.abs() * (1 / scale))
    differ = int((exact != fast).sum())
    print(f"division: {differ} of {n} codes differ between x / scale and x · (1 / scale); e.g. 2.34375 / 1.875 = 1.25 → 1, but\n"
          f"  2.34375 · (1 / 1.875) = {torch.tensor(2.34375) * (1 / torch.tensor(1.875)):.8f} → 1.5")
    return differ


def lesson_training(steps: int = 100, seed: int = 0) -> dict[str, list[float]]:
    """P2: a toy expert layer fits a fixed function, in float32, in MXFP8, and in NVFP4 forward with MXFP8 backward."""
    T, D, I, E, k = 512, 64, 64, 8, 2
    curves = {}
    for precision in PRECISIONS:
        g = torch.Generator().manual_seed(seed)
        draw = [torch.randn(*shape, generator=g) / fan ** 0.5
                for shape, fan in (((E, D), D), ((E, 2 * I, D), D), ((E, D, I), I), ((D, D), D))]
        *parameters, teacher = draw
        optimizer = torch.optim.Adam([p.requires_grad_() for p in parameters], lr=5e-3)
        curves[precision] = []
        for _ in range(steps):
            x = torch.randn(T, D, generator=g)
            ids, weights, _ = route(x @ parameters[0].t(), torch.zeros(E), k)
            loss = (experts(x, ids, weights, *parameters[1:], precision) - torch.sin(x @ teacher.t())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curves[precision].append(loss.item())
    print("a toy expert layer in training: loss at step " + "".join(f"{i:9}" for i in range(1, steps + 1, (steps - 1) // 5)))
    for precision, curve in curves.items():
        print(f"  {precision:43}" + "".join(f"{curve[i]:9.4f}" for i in range(0, steps, (steps - 1) // 5)))
    return curves


# ------------------------------------------------------------------------------------------- compiled without a GPU


class Card(NamedTuple):
    """Dense peaks of a card in TFLOP/s by format of the matrix instruction, and memory in TB/s. Source: NVIDIA's datasheets."""
    name: str
    plain: float
    mxfp8: float
    nvfp4: float
    memory: float


# An H200 has an 8-bit peak of 1979, which needs scales per row, not per 32 values: decoded operands run at the bf16 rate.
CARDS = {80: Card("A100", 312, 0, 0, 2.0), 90: Card("H200", 989, 989, 989, 4.8), 100: Card("B300", 2250, 4500, 13500, 8.0)}
BITS = {"plain": 16.0, "mxfp8": 8.25, "nvfp4": 4.5}      # per value, block scales included
FULL = dict(T=16_384, D=7168, I=2048, E=48, k=8)         # one rank of the full config under 8-way expert parallelism


# Types of the kernels' pointers by name; every argument that is neither here nor a constant is an int32.
TYPES = {f"{name}_ptr": kind for kind, names in {
    "*bf16": "x y out pre h", "*u8": "codes scales a_scale w_scale b_scale", "*i32": "columns counts tile_expert tile_start",
    "*fp32": "logits bias weights scores outer a_outer w_outer gates d_gates values",
    "*i64": "ids first order rows inverse offsets a_rows b_rows"}.items() for name in names.split()} | {"scale": "fp32"}
# Pointers that a format or an epilogue does not use; wgrad gathers x where it is not transposed by quantising.
UNUSED = {"plain": "a_scale w_scale b_scale a_outer w_outer a_rows", "mxfp8": "a_outer w_outer a_rows b_rows", "nvfp4": "",
          "none": "rows pre h gates d_gates", "swiglu": "h gates d_gates", "swiglu grad": "", "wgrad": ""}


class Spec(NamedTuple):
    """A kernel as shipped on one chip, and what it does at the full shapes."""
    name: str
    kernel: object
    constants: dict[str, object]                 # None for a pointer that is not used
    flops: float
    bytes: float
    fmt: str = "plain"
    warps: int = 4
    stages: int = 3


def specs(chip: int) -> list[Spec]:
    """Every kernel in the configurations that ship on `chip`."""
    T, D, I, E, k = FULL.values()
    S = T * k
    result = [
        Spec("route", route_kernel, dict(K=k, NORMALISE=True, BLOCK_T=4, BLOCK_E=512, BLOCK_K=8), 0, T * 384 * 8 + S * 12),
        Spec("plan: count", count_kernel, dict(BLOCK=128, BLOCK_E=512), 0, S * 8 + S // 128 * E * 4),
        Spec("plan: place", place_kernel, dict(BLOCK=128), 0, S * 32),
        Spec("combine", combine_kernel, dict(BLOCK_D=1024), 0, (S + T) * D * 2),
        Spec("quantise mxfp8", mxfp8_kernel, dict(columns_ptr=None, stride_c=1, BLOCK_R=16, BLOCK_C=128), 0, T * D * 3.03),
        Spec("quantise mxfp8 transposed", mxfp8_kernel, dict(stride_r=1, BLOCK_R=64, BLOCK_C=64), 0, S * D * 3.03),
        Spec("quantise nvfp4", nvfp4_kernel, dict(PER_TOKEN=True, BLOCK_R=4, BLOCK_C=512), 0, T * D * 2.56),
        Spec("dequantise mxfp8", dequantise_kernel,
             dict(outer_ptr=None, FP4=False, PER_TOKEN=False, BLOCK_R=16, BLOCK_C=128), 0, S * D * 5.03),
        Spec("dequantise nvfp4", dequantise_kernel, dict(FP4=True, PER_TOKEN=True, BLOCK_R=16, BLOCK_C=128), 0, S * D * 4.56)]
    for fmt in ("plain", "mxfp8", "nvfp4") if chip > 80 else ("plain",):
        result += [_product_spec(chip, "fprop up", fmt, "swiglu", S, E, 2 * I, D),
                   _product_spec(chip, "fprop down", fmt, "none", S, E, D, I)]
        if fmt != "nvfp4":
            result += [_product_spec(chip, "dgrad down", fmt, "swiglu grad", S, E, I, D),
                       _product_spec(chip, "wgrad", fmt, "wgrad", S, E, 2 * I, D)]
        if fmt == "plain":                       # reads its weight along the other axis; block-scaled ones are copied anew
            result.append(_product_spec(chip, "dgrad up", fmt, "none", S, E, D, 2 * I, transposed=True))
    return result


def _product_spec(chip: int, name: str, fmt: str, what: str, S: int, E: int, N: int, K: int, transposed: bool = False) -> Spec:
    """A grouped product of S rows, E matrices of N·K weights; for wgrad N·K is the size of what it makes."""
    kernel = wgrad_kernel if what == "wgrad" else grouped_gemm_kernel
    tile = TILES[chip, fmt][{"swiglu grad": 1, "wgrad": 2}.get(what, 0)]
    constants = {f"{n}_ptr": None for n in f"{UNUSED[fmt]} {UNUSED[what]}".split() if f"{n}_ptr" in kernel.arg_names}
    constants |= dict(FORMAT=fmt, NATIVE=chip == 100, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=8)
    read, written = (S + E * N) * K * BITS[fmt] / 8, S * N * {"none": 2, "swiglu": 3, "swiglu grad": 10, "wgrad": 0}[what]
    if what == "wgrad":
        read, written = S * (N + K) * BITS[fmt] / 8, E * N * K * 2
    else:
        constants |= {"EPILOGUE": what, "stride_wn" if fmt == "plain" and (transposed or what == "swiglu grad") else "stride_wk": 1}
    return Spec(f"{name} {fmt}", kernel, constants, 2 * S * N * K, read + written, fmt, tile.warps, tile.stages)


def compile_for(chip: int, spec: Spec) -> tuple[dict, str]:
    """Compile one kernel ahead of time; returns what the chip's assembler says of it, and the PTX."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    names = spec.kernel.arg_names
    operand = "*bf16" if spec.fmt == "plain" else "*u8"
    types = TYPES | {n: operand for n in ("a_ptr", "b_ptr", "w_ptr")}
    signature = {n: "constexpr" if n in spec.constants else types.get(n, "i32") for n in names}
    # Triton is told at launch which arguments are multiples of 16, all of ours at real shapes; without it nothing pipelines.
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] == "i32" or signature[n][0] == "*"}
    compiled = triton.compile(ASTSource(spec.kernel, signature, spec.constants, aligned), target=GPUTarget("cuda", chip, 32),
                              options=dict(num_warps=spec.warps, num_stages=spec.stages))
    ptx = compiled.asm["ptx"]
    arch = f"sm_{chip}" + ("a" if chip >= 90 else "")
    assembler = triton.knobs.nvidia.ptxas_blackwell if chip >= 100 else triton.knobs.nvidia.ptxas
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        log = subprocess.run([assembler.path, "-v", f"--gpu-name={arch}", f.name, "-o", "/dev/null"], capture_output=True,
                             text=True, check=True).stderr
    mma = re.search(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", ptx)
    return {"name": spec.name, "chip": f"sm_{chip}", "registers": int(re.search(r"Used (\d+) registers", log)[1]),
            "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))), "shared": compiled.metadata.shared,
            "mma": mma[0] if mma else "", "scaled": "block_scale" in ptx}, ptx


def report(chips: tuple[int, ...] = (80, 90, 100)) -> None:
    """The table of all kernels on all chips; its last line is one JSON object."""
    if triton is None or INTERPRETED:
        raise ValueError("--report needs Triton and no TRITON_INTERPRET: it compiles for real chips, on any machine")
    print(f"one rank at the full shapes: {FULL}; the roofline is max(operations / peak, bytes / memory)")
    print(f"{'kernel':28}{'chip':7}{'registers':>10}{'spilled':>8}{'KiB':>6}  {'instruction':24}{'FLOP/byte':>10}  roofline")
    rows = []
    for chip in chips:
        card = CARDS[chip]
        for spec in specs(chip):
            row, _ = compile_for(chip, spec)
            compute = spec.flops / (getattr(card, spec.fmt) * 1e12) if spec.flops else 0.0
            ms = 1e3 * max(compute, spec.bytes / (card.memory * 1e12))
            rows.append(row | {"flop_per_byte": round(spec.flops / spec.bytes, 1), "roofline_ms": round(ms, 4), "card": card.name})
            print(f"{row['name']:28}{row['chip']:7}{row['registers']:10}{row['spill_bytes']:8}{row['shared'] / 1024:6.0f}  "
                  f"{row['mma'] + ('.block_scale' if row['scaled'] else ''):24}{spec.flops / spec.bytes:10.0f}  "
                  f"{ms:.3f} ms on {card.name}", flush=True)
    print(json.dumps({"kernels": rows}))


# ------------------------------------------------------------------------------------------------- on a GPU

SHAPES = {"toy": (2048, 128, 64, 8, 2), "mid": (8192, 2048, 1024, 64, 8), "full": tuple(FULL.values())}   # T, D, I, E, k


def _draw(T: int, D: int, I: int, E: int, k: int, skew: float, device: str) -> tuple[Tensor, ...]:
    """Inputs of `experts` in bf16, and the gradient of its output. skew 0: balanced; 1: popularity falls as 1 / rank."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape, std=1.0):
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, std, generator=g)

    popularity = torch.arange(1, E + 1, device=device).float().log().mul(-skew)
    gumbel = -torch.empty(T, E, device=device).exponential_(generator=g).log()           # top-k of log p + Gumbel draws from p
    ids = (popularity + gumbel).topk(k, dim=1).indices
    weights = torch.rand(T, k, device=device, generator=g)
    return normal(T, D), ids, weights, normal(E, 2 * I, D, std=D ** -0.5), normal(E, D, I, std=I ** -0.5), normal(T, D)


def _stage_calls(stages: TorchStages | TritonStages, x, weights, w_gate_up, w_down, dy, p: Plan, k: int) -> dict:
    """Each box of Figure 10 as (function without arguments, multiply-adds), fed with the same inputs for either kind."""
    reference, (S, D, I) = TorchStages("native"), (len(p.order), x.shape[1], w_down.shape[2])
    pre, h = reference.fprop_up(x, p.rows, w_gate_up, p)
    gates = weights.flatten()[p.order]
    d_pre = reference.dgrad_down(dy, p.rows, w_down, pre, gates, p)[0]
    y = reference.fprop_down(h, w_down, p)
    return {"fprop_up": (lambda: stages.fprop_up(x, p.rows, w_gate_up, p)[1], 2 * S * D * I),
            "fprop_down": (lambda: stages.fprop_down(h, w_down, p), S * D * I),
            "combine": (lambda: stages.combine(y, p.inverse, weights, k), 0),
            "dgrad_down": (lambda: stages.dgrad_down(dy, p.rows, w_down, pre, gates, p)[0], S * D * I),
            "dgrad_up": (lambda: stages.dgrad_up(d_pre, w_gate_up, p), 2 * S * D * I),
            "wgrad_up": (lambda: stages.wgrad(d_pre, None, x, p.rows, p), 2 * S * D * I),
            "wgrad_down": (lambda: stages.wgrad(dy, p.rows, h, None, p), S * D * I)}


def _loop(x, ids, weights, w_gate_up, w_down):
    """The layer as one matrix product per expert, in plain autograd."""
    p = plan(ids, len(w_gate_up), "torch")
    sizes, picked = p.counts.tolist(), x[p.rows]
    parts = []
    for x_e, w_in, w_out in zip(picked.split(sizes), w_gate_up.unbind(0), w_down.unbind(0)):
        gate, up = F.linear(x_e, w_in).chunk(2, dim=1)
        parts.append(F.linear(F.silu(gate) * up, w_out))
    return (torch.cat(parts)[p.inverse].view(*ids.shape, -1) * weights.unsqueeze(2)).sum(1).to(x.dtype)


def _milliseconds(run, device: str) -> float:
    if device == "cuda":
        return triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median")
    start = time.perf_counter()                  # only so that the script itself can be tested without a GPU
    run()
    return 1e3 * (time.perf_counter() - start)


def _check_stages(want: dict, got: dict, tolerance: float, where: str) -> None:
    for name in want:
        a, b = want[name][0]().float(), got[name][0]().float()
        error = ((a - b).norm() / a.norm()).item()
        if not error < tolerance:
            raise AssertionError(f"{where} {name}: relative error {error:.2e} against torch, {tolerance} allowed")


def _public_layers() -> dict:
    """Other projects' grouped products where they are installed: name -> f(sorted x, counts, w [E, N, K])."""
    found = {"torch grouped_mm": lambda x, p, w: F.grouped_mm(x, w.transpose(1, 2), offs=p.offsets[1:].int())}
    try:
        from grouped_gemm.ops import gmm  # tgale96/grouped_gemm, the CUTLASS kernels that MegaBlocks uses
        found["grouped_gemm (CUTLASS)"] = lambda x, p, w: gmm(x, w, p.counts.cpu(), trans_b=True)
    except ImportError:
        pass
    return found


def bench(device: str = "cuda", shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict:
    """Check every kernel on the device against torch, then time it: a table, and one JSON object as the last line."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--bench needs a CUDA device, and there is none; --report needs none")
    n = 8192 if device == "cuda" else 64
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    ceiling = 2 * n ** 3 / _milliseconds(lambda: a @ a, device) / 1e9                    # TFLOP/s
    copy = 4 * a.numel() / _milliseconds(lambda: a.clone(), device) / 1e9                # TB/s, read and written
    card = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{card}: {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, triton {triton.__version__}\n"
          f"measured ceilings: {ceiling:.0f} TFLOP/s in a bf16 product of {n}³, {copy:.2f} TB/s in a copy")
    results = []

    def row(where: str, what: str, run, madds: float = 0, bytes_moved: float = 0) -> None:
        ms = _milliseconds(run, device)
        rate, unit, top = (2 * madds / ms / 1e9, "TFLOP/s", ceiling) if madds else (bytes_moved / ms / 1e9, "TB/s", copy)
        results.append({"shape": where, "what": what, "ms": round(ms, 4), "rate": round(rate, 2), "unit": unit,
                        "share": round(rate / top, 3)})
        print(f"  {where:16}{what:34}{ms:10.3f} ms{rate:10.2f} {unit:8}{rate / top:7.1%}", flush=True)

    for name, shape in shapes.items():
        _bench_small(name, shape, device, row)
        for load, skew in (("balanced", 0.0), ("skewed", 1.0)):
            _bench_shape(f"{name}, {load}", shape, skew, device, row)
    summary = {"card": card, "ceiling_tflops": round(ceiling, 1), "copy_tb_s": round(copy, 3), "rows": results}
    print(json.dumps(summary))
    return summary


def _bench_small(where: str, shape: tuple[int, ...], device: str, row) -> None:
    """Routing and the formats: those that promise torch's bits are held to them."""
    T, D, _, E, k = shape
    x = torch.randn(T, D, device=device, dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(1))
    logits, bias = (torch.randn(*s, device=device, generator=torch.Generator(device).manual_seed(2)) for s in ((T, E), (E,)))
    # The chip's sigmoid may differ from torch's in the last bit, so the choice is checked on the kernel's own scores.
    ids, weights, scores = route(logits, bias, k, backend="triton")
    chosen = scores.gather(1, ids)
    _same(f"{where} route", ids, _top_k(scores + bias, k))
    torch.testing.assert_close(scores, logits.sigmoid(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights, chosen / (chosen.sum(1, keepdim=True) + 1e-20), rtol=1e-5, atol=1e-7)
    row(where, "route", lambda: route(logits, bias, k, backend="triton"), 0, T * E * 8 + T * k * 12)
    formats = {"quantise mxfp8": (lambda b: mxfp8_quantise(x, b), 2 + 33 / 32),
               "pack mxfp8": (lambda b: mxfp8_pack(x, b), 2 + 33 / 32),
               "quantise nvfp4 per token": (lambda b: nvfp4_quantise(x, "token", b), 2 + 9 / 16),
               "quantise nvfp4 per tensor": (lambda b: nvfp4_quantise(x, "tensor", b), 4 + 9 / 16)}
    codes, small = mxfp8_quantise(x, "torch"), nvfp4_quantise(x, "token", "torch")
    formats["dequantise mxfp8"] = lambda b: mxfp8_dequantise(*codes, b), 4 + 33 / 32
    formats["dequantise nvfp4"] = lambda b: nvfp4_dequantise(*small, b), 4 + 9 / 16
    for name, (run, bytes_per_value) in formats.items():
        _same(f"{where} {name}", run("triton"), run("torch"))
        row(where, name, functools.partial(run, "triton"), 0, x.numel() * bytes_per_value)


def _same(what: str, got: Tensor | tuple[Tensor, ...], want: Tensor | tuple[Tensor, ...]) -> None:
    for a, b in zip(*((v,) if isinstance(v, Tensor) else v for v in (got, want)), strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise AssertionError(f"{what}: {a.dtype} {tuple(a.shape)}, but torch's is {b.dtype} {tuple(b.shape)}")
        differ = int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum())
        if differ:
            raise AssertionError(f"{what}: {differ} bytes differ from torch's")


def _bench_shape(where: str, shape: tuple[int, ...], skew: float, device: str, row) -> None:
    T, D, I, E, k = shape
    x, ids, weights, w_gate_up, w_down, dy = _draw(*shape, skew, device)
    precisions = [v for v in PRECISIONS if device == "cpu" or not _obstacle(x.device, x.dtype, v)]
    p = plan(ids, E, "triton")
    _same(f"{where} plan", p, plan(ids, E, "torch"))
    arguments = x, weights, w_gate_up, w_down, dy, p, k
    for precision in precisions:
        calls = _stage_calls(TritonStages(precision, x.device), *arguments)
        _check_stages(_stage_calls(TorchStages(precision), *arguments), calls, 2e-2, f"{where}, {precision}")
        for name, (run, madds) in calls.items():
            if madds or precision == "native":
                row(where, f"{precision} {name}", run, madds, (T * k + T) * D * 2)
    row(where, "plan", lambda: plan(ids, E, "triton"), 0, T * k * 40)
    for name, product in _public_layers().items():
        row(where, f"fprop_up's product: {name}", functools.partial(product, x[p.rows], p, w_gate_up), 2 * T * k * D * I)
    leaves = [v.requires_grad_() for v in (x, weights, w_gate_up, w_down)]
    for name, layer in [(f"layer, {v}", functools.partial(experts, precision=v, backend="triton")) for v in precisions] + [
            ("layer, torch grouped_mm", functools.partial(experts, backend="torch")), ("layer, loop of matmuls", _loop)]:
        both = functools.partial(_both_ways, layer, leaves, ids, dy)
        row(where, f"{name}, both ways", both, 9 * T * k * D * I)


def _both_ways(layer, leaves: list[Tensor], ids: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x, weights, w_gate_up, w_down = leaves
    return torch.autograd.grad(layer(x, ids, weights, w_gate_up, w_down), leaves, dy)


def main() -> None:
    parser = argparse.ArgumentParser(description="the lessons of the low-precision expert layer; see the top of the file")
    parser.add_argument("--report", action="store_true", help="compile every kernel for three chips, without a GPU")
    parser.add_argument("--bench", action="store_true", help="check and time every kernel on this machine's GPU")
    arguments = parser.parse_args()
    try:
        if arguments.report:
            report()
            return
        if arguments.bench:
            bench()
            return
    except ValueError as error:
        sys.exit(f"kernels.py: {error}")
    packed = mxfp8_pack(torch.randn(4, 7168))
    print(f"dispatch of a token of width 7168 (S4): {packed.shape[1]} bytes in MXFP8, {2 * 7168} in bf16")
    for lesson in (lesson_round_trip, lesson_leak, lesson_division, lesson_training):
        print()
        lesson()


if __name__ == "__main__":
    main()
