"""Continued pretraining: a corpus of code, one loop for three phases, measures that say whether it helped.

Before any reinforcement learning Composer 2 is trained on code in three phases (report §3.1; claims P1–P3):
most of the compute at 32k tokens, a shorter extension to 256k, a short supervised phase on targeted tasks.
One loop over `Batch`es serves all; what differs is a row of numbers, `Phase`. Whatever is random is a
function of (seed, purpose, sample index), the learning rate one of the step: three integers, `Cursor`, resume
a run exactly.

    files ──► Corpus: one row of tokens on disk, package after package
    sample i ──► (source, index there) ──► documents ──► row of a Batch      attention stays within a document
    loss = −Σ log p(token t | its document before t) / number of targets in the whole optimizer step

Measures: `codebase_nll`, `state_tracking`, `knowledge_probe` (P5; report App. B, Table 2); `loss_by_position`
and `recall_by_distance` for the long phase; `log_linear_fit` of held-out loss against tokens (P3).

Legend: B rows, T tokens of a row, D width, N targets.

Differences from the report, which gives phases and lengths but no budgets:
1. The default corpus is the installed standard library; its asyncio is held out as "the team's own codebase".
2. Budgets, rates, mix and the weight of the MTP loss are ours. The schedule is warm-up–stable–decay (arXiv
   2404.06395): its stable part can be cut anywhere, as the checkpoint for the MTP layers must be (T2).
3. Rotary positions are the same in all phases: Kimi K2.5 already covers 256k, so only the length changes.
4. The long phase may mix in `track` documents (a file, diffs, the file after them): little else in a corpus
   of this size teaches a model of a million parameters to copy over a distance.

    python pretrain.py           corpus, two short phases, resume, measures; under 20 seconds
    python pretrain.py --bench   tokens/s beside transformers' DeepseekV3 where installed; last line JSON

Left out: checkpoint files, meshes and Figure 2 (train.py); the released tokenizer's rule for splitting words:
`BPE.from_tiktoken` reads its vocabulary, but `PIECE` cuts the text, so some texts get other (valid) ids.
"""
from __future__ import annotations

import argparse
import ast
import base64
import copy
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import string
import subprocess
import sysconfig
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe
from mtp import Engine, distill_loss

# ------------------------------------------------------------------------------------------------- tokenizers


class Bytes:
    """One id per byte; what is not UTF-8 passes through text as surrogate escapes, so every file round-trips.

    Ids 0 … size − 1 are text. The turn protocol's structural ids follow them: ⟨document⟩ is size + 1.
    """
    size, name = 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("utf-8", "surrogateescape")


# A word and the space before it, up to three digits, line breaks and the next indentation, punctuation, other
# space: each byte fits one of them. Merging is quadratic in a piece's length, hence the upper bounds.
PIECE = re.compile(rb" ?[A-Za-z_\x80-\xff]{1,32}| ?[0-9]{1,3}|\n{1,8}[ \t]{0,32}"
                   rb"| ?[^\sA-Za-z0-9_\x80-\xff]{1,16}|\s{1,32}")


class BPE:
    """Byte pair encoding; `table[i]` is what token i spells. All bytes are tokens, so every text has a code.

    To encode a piece, join the two neighbours whose union has the lowest id, until no union is a token.
    """

    def __init__(self, table: Sequence[bytes]):
        self.table, self.size = list(table), len(table)
        self.ids = {token: i for i, token in enumerate(self.table)}
        if len(self.ids) != self.size or not all(bytes([b]) in self.ids for b in range(256)):
            raise ValueError("a byte-level vocabulary needs all 256 bytes, and no token twice")
        spelled = b" ".join(token.hex().encode() for token in self.table)
        self.name = f"bpe{self.size}-{hashlib.sha256(spelled).hexdigest()[:8]}"
        self._known: dict[bytes, list[int]] = {}                # pieces repeat: each is merged once

    @classmethod
    def from_tiktoken(cls, path: str | Path) -> BPE:
        """Read a vocabulary in tiktoken's format, which Kimi K2.5's has: a line per token, base64 and id."""
        lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        table = {int(i): base64.b64decode(token) for token, i in lines}
        if sorted(table) != list(range(len(lines))):
            raise ValueError(f"{path}: the ids must be 0 … {len(lines) - 1} without gaps or repeats")
        return cls([table[i] for i in range(len(table))])

    @classmethod
    def train(cls, text: str, size: int) -> BPE:
        """Learn `size` tokens: the bytes, then again and again the most frequent pair (ties: lowest ids)."""
        pieces = Counter(PIECE.findall(text.encode("utf-8", "surrogateescape")))
        lengths = [len(p) for p in pieces]
        x = np.frombuffer(b"".join(pieces), np.uint8).astype(np.int64)   # the distinct pieces, end to end
        piece = np.repeat(np.arange(len(lengths)), lengths)              # the piece that x[i] is part of
        times = np.repeat(np.array(list(pieces.values()), np.int64), lengths)
        counts = np.zeros((size, size), np.int64)                        # [a, b]: how often b follows a
        top = np.zeros(size, np.int64)                                   # row maxima, quick to search

        def count(at: np.ndarray, sign: int) -> np.ndarray:
            at = at[:-1][piece[at[:-1]] == piece[at[1:]]]
            np.add.at(counts, (x[at], x[at + 1]), sign * times[at])
            return x[at]

        count(np.arange(len(x)), 1)
        top[:] = counts.max(1)
        ids = {bytes([b]): b for b in range(256)}
        while len(ids) < size:
            a = int(top.argmax())
            b = int(counts[a].argmax())
            if counts[a, b] < 2:
                raise ValueError(f"this text yields {len(ids)} tokens, not {size}: give more text")
            at, table = _joins(x, piece, a, b), list(ids)
            # Only pieces with a join change: take their pairs out of the counts, join, and count them again.
            touched = np.isin(piece, piece[at])
            before = count(np.flatnonzero(touched), -1)
            x[at] = ids.setdefault(table[a] + table[b], len(ids))        # other halves may have made it
            x, piece, times, touched = (np.delete(v, at + 1) for v in (x, piece, times, touched))
            rows = np.unique(np.concatenate((before, count(np.flatnonzero(touched), 1))))
            top[rows] = counts[rows].max(1)
        return cls(list(ids))

    def _merge(self, piece: bytes) -> list[int]:
        parts = [piece[i:i + 1] for i in range(len(piece))]
        while len(parts) > 1:
            unions = [self.ids.get(a + b, self.size) for a, b in zip(parts, parts[1:])]
            i = unions.index(min(unions))
            if unions[i] == self.size:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        out = []
        for piece in PIECE.findall(text.encode("utf-8", "surrogateescape")):
            if piece not in self._known:
                self._known[piece] = self._merge(piece)
            out += self._known[piece]
        return out

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.table[i] for i in ids).decode("utf-8", "surrogateescape")


def _joins(x: np.ndarray, piece: np.ndarray, a: int, b: int) -> np.ndarray:
    """Where the pair (a, b) begins, without overlaps: of "aaaa" the first and the third a."""
    at = np.flatnonzero((x[:-1] == a) & (x[1:] == b) & (piece[:-1] == piece[1:]))
    n = np.arange(len(at))
    first = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) == 1, 0, n))          # start of its run
    return at[(n - first) % 2 == 0] if a == b else at


Tokenizer = Bytes | BPE

# ----------------------------------------------------------------------------------------------------- corpus

MAX_FILE_BYTES = 1 << 20        # larger files are data or generated
STDLIB_MIN_BYTES = 2_000_000    # less: an installation without its sources
NO_CODE = {".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", "site-packages", "dist-packages"}
# Of the standard library also tests, tables of character sets, and one file of prose.
NO_STDLIB = NO_CODE | {"test", "tests", "encodings", "pydoc_data", "idlelib", "__phello__"}


@dataclass(frozen=True)
class Document:
    """A file, and its place in the store: ⟨document⟩ at token `start`, the text after it up to `stop`."""
    path: str                                   # below the root, with /
    n_bytes: int
    sha256: str
    start: int = 0
    stop: int = 0

    @property
    def package(self) -> str:
        """Top folder, or the stem of a file that lies at the root."""
        head, _, tail = self.path.partition("/")
        return head if tail else head.rsplit(".", 1)[0]


class Corpus:
    """A source tree as token ids in a memory-mapped file, split into `train` and `heldout` by package.

    Files of a package stand together, by path, so that a long row sees a library and not a heap of files.
    `manifest`: (path, bytes, sha256) of every file; `digest`: its hash; `counts`: files skipped, by reason.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: np.ndarray, train: list[Document],
                 heldout: list[Document], counts: dict[str, int]):
        self.tokenizer, self.tokens, self.counts = tokenizer, tokens, counts
        self.train, self.heldout = train, heldout
        self.manifest = [(d.path, d.n_bytes, d.sha256) for d in train + heldout]
        self.digest = digest(train + heldout)
        self.n_train = train[-1].stop
        packages = itertools.groupby(train, lambda d: d.package)
        self.borders = np.array([next(documents).start for _, documents in packages])
        self._order: tuple = (None,)

    @classmethod
    def load(cls, data: str | None, tokenizer: Tokenizer | str = "bytes",
             heldout: Sequence[str] = ("asyncio",), cache_dir: str | None = None,
             limit_bytes: int | None = None) -> Corpus:
        """Read a source tree (None: the installed standard library), one file at a time.

        tokenizer: an object, or a name that `make_tokenizer` knows. heldout: packages training never sees.
        cache_dir (outside the tree): keeps tokens and vocabulary under the manifest's hash. limit_bytes: of
        training files.
        """
        root = Path(data or sysconfig.get_paths()["stdlib"])
        counts: Counter[str] = Counter()
        paths = _stdlib(root) if data is None else _walk(root, counts)
        kept = select(root, paths, heldout, counts, limit_bytes)
        if data is None and not limit_bytes and sum(d.n_bytes for d in kept) < STDLIB_MIN_BYTES:
            raise ValueError(f"{root} holds hardly any source, as in minimal installations: pass --data DIR")
        train = [d for d in kept if d.package not in heldout]
        if not train or {d.package for d in kept} < {d.package for d in train} | set(heldout):
            names = sorted({d.package for d in kept})
            raise ValueError(f"heldout = {tuple(heldout)} must be packages of {root} and leave some to train "
                             f"on; its {len(names)} packages begin with {', '.join(names[:8])}")
        if isinstance(tokenizer, str):
            tokenizer = make_tokenizer(tokenizer, root, train, cache_dir)
        ordered = train + [d for d in kept if d.package in heldout]
        tokens, documents = _store(root, ordered, tokenizer, cache_dir)
        return cls(tokenizer, tokens, documents[:len(train)], documents[len(train):], dict(+counts))

    def ids(self, document: Document) -> np.ndarray:
        """Token ids of a document's text (a view of the file on disk)."""
        return self.tokens[document.start + 1:document.stop]

    def text(self, document: Document) -> str:
        return self.tokenizer.decode(self.ids(document).tolist())

    def joined(self, split: str = "heldout", limit_bytes: int | None = None) -> tuple[np.ndarray, int]:
        """For `codebase_nll`: ⟨document⟩ and a split's files, alphabetically, without gaps; and their bytes.

        limit_bytes: stop there, within a file where tokens are bytes and otherwise behind it.
        """
        parts, n_bytes = [np.array([self.tokenizer.size + 1])], 0
        for d in sorted({"heldout": self.heldout, "train": self.train}[split], key=lambda d: d.path):
            left = d.n_bytes if limit_bytes is None else limit_bytes - n_bytes
            if left <= 0:
                break
            size = min(left, d.n_bytes) if self.tokenizer.name == "bytes" else d.n_bytes
            parts.append(self.ids(d)[:size])
            n_bytes += size
        return np.concatenate(parts).astype(np.int64), n_bytes

    def row(self, index: int, length: int, seed: int) -> list[tuple[np.ndarray, None]]:
        """Training row `index`: `length` consecutive tokens, split where a package ends.

        An epoch cuts the store into rows and visits each once, in random order; the next one cuts elsewhere.
        """
        per_epoch = self.n_train // length - 1                  # one fewer than fit: room to shift the cuts
        if per_epoch < 1:
            raise ValueError(f"{self.n_train} training tokens are too few for rows of {length}: add data")
        epoch, place = divmod(index, per_epoch)
        key = (seed, zlib.crc32(b"row order"), length, epoch)
        if self._order[0] != key:
            rng = np.random.default_rng(key)
            self._order = key, rng.permutation(per_epoch), int(rng.integers(length))
        start = self._order[2] + int(self._order[1][place]) * length
        inside = self.borders[(self.borders > start) & (self.borders < start + length)] - start
        return [(part, None) for part in np.split(self.tokens[start:start + length], inside)]


def digest(documents: Iterable[Document]) -> str:
    """sha256 of the manifest, written as `sha256sum` would."""
    lines = "".join(f"{d.sha256}  {d.path}\n" for d in documents)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _stdlib(root: Path) -> list[str]:
    paths = (p.relative_to(root) for p in root.rglob("*.py"))
    return [p.as_posix() for p in paths
            if not NO_STDLIB & set(p.parts) and not p.parts[0].startswith("config-")]


def _walk(root: Path, counts: Counter[str]) -> list[str]:
    """Paths below root; of a git repository what git does not ignore. Links to folders are not followed."""
    if not root.is_dir():
        raise ValueError(f"{root} is no folder: pass the root of a source tree")
    out = []
    for folder, folders, files in os.walk(root, onerror=lambda error: counts.update(["unreadable"])):
        if ".git" in folders + files:
            files, folders[:] = _git_files(folder, counts), []
        links = [f for f in folders if os.path.islink(os.path.join(folder, f))]
        counts["link"] += len(links)
        folders[:] = [f for f in folders if f not in links and f not in NO_CODE]
        out += [Path(os.path.relpath(os.path.join(folder, f), root)).as_posix() for f in files]
    return out


def _git_files(folder: str, counts: Counter[str]) -> list[str]:
    """Files that git tracks or would add. The monitor program that a repository may configure is not run."""
    def ls(*options: str) -> set[str]:
        run = subprocess.run(["git", "-c", "core.fsmonitor=false", "-C", folder, "ls-files", "-z", *options],
                             capture_output=True)
        if run.returncode:
            raise ValueError(f"git cannot list {folder}: {os.fsdecode(run.stderr).strip()}; mend it first")
        return {os.fsdecode(name) for name in run.stdout.split(b"\0") if name}

    counts["git-ignored"] += len(ls("--others", "--exclude-standard", "--ignored", "--directory"))
    return sorted(ls("--cached", "--others", "--exclude-standard"))


def read_source(path: Path) -> bytes | str:
    """The bytes of a source file; or, as a str, the reason why it is none."""
    try:
        if path.is_symlink() or not path.is_file():
            return "link" if path.is_symlink() else "no file"
        if path.stat().st_size > MAX_FILE_BYTES:
            return "too large"
        data = path.read_bytes()
        if b"\0" in data:
            return "binary"
        return data if data.decode().strip() else "empty"
    except OSError:
        return "unreadable"
    except UnicodeDecodeError:
        return "not UTF-8"


def sketch(data: bytes, size: int = 16) -> set[int]:
    """The `size` smallest hashes of three lines in a row: two sketches overlap about as much as the files."""
    lines = [line for line in map(bytes.strip, data.splitlines()) if line]
    return set(sorted({zlib.crc32(b"\n".join(lines[i:i + 3])) for i in range(len(lines) - 2)})[:size])


def select(root: Path, paths: Iterable[str], heldout: Sequence[str], counts: Counter[str],
           limit_bytes: int | None = None) -> list[Document]:
    """The files to keep, by package and path, held-out ones first: of two equal files training loses its.

    A near duplicate shares three quarters of its sketch with one earlier file. Memory: 16 hashes a file.
    """
    kept, digests, owners, taken = [], set(), {}, 0
    documents = (Document(path, 0, "") for path in paths)
    for d in sorted(documents, key=lambda d: (d.package not in heldout, d.package, d.path)):
        if limit_bytes is not None and taken >= limit_bytes:
            break
        data = read_source(root / d.path)
        if isinstance(data, str):
            counts[data] += 1
            continue
        sha, hashes = hashlib.sha256(data).hexdigest(), sketch(data)
        shared = Counter(owner for h in hashes for owner in owners.get(h, ()))
        near = len(hashes) == 16 and max(shared.values(), default=0) >= 12
        if near or sha in digests:
            counts["duplicate" if sha in digests else "near duplicate"] += 1
            continue
        digests.add(sha)
        for h in hashes:
            owners.setdefault(h, []).append(len(kept))
        kept.append(Document(d.path, len(data), sha))
        taken += len(data) if d.package not in heldout else 0
    return kept


def make_tokenizer(name: str, root: Path, train: list[Document], cache_dir: str | None = None) -> Tokenizer:
    """"bytes", a .tiktoken or .model file, or "bpe", "bpe4096": learned from a megabyte of training files."""
    if name == "bytes":
        return Bytes()
    if name.endswith((".tiktoken", ".model")):
        return BPE.from_tiktoken(name)
    if not (match := re.fullmatch(r"bpe(\d*)", name)):
        raise ValueError(f"tokenizer {name!r}: choose bytes, bpe, bpe<size> or a .tiktoken file")
    size = int(match[1] or 2048)
    cache = cache_dir and Path(cache_dir) / f"bpe{size}-{digest(train)[:16]}.json"
    if cache and cache.exists():
        return BPE([bytes.fromhex(token) for token in json.loads(cache.read_text())])
    text = b""
    for d in sorted(train, key=lambda d: d.sha256):             # as good as a random order, and needs no seed
        text += (root / d.path).read_bytes() if len(text) < 1_000_000 else b""
    bpe = BPE.train(text.decode(), size)
    if cache:
        _write(cache, [token.hex() for token in bpe.table])
    return bpe


def _write(path: Path, value: object) -> None:
    """Write JSON so that the file is either absent or whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value))
    os.replace(part, path)


def _store(root: Path, documents: list[Document], tokenizer: Tokenizer,
           cache_dir: str | None) -> tuple[np.ndarray, list[Document]]:
    """Tokens of all files, written file by file and mapped: memory holds one source file at a time."""
    dtype = np.uint16 if tokenizer.size + 2 <= 1 << 16 else np.uint32
    key = hashlib.sha256((digest(documents) + tokenizer.name).encode()).hexdigest()[:16]
    index = cache_dir and Path(cache_dir) / f"tokens-{key}.json"
    if index and index.exists():
        placed = [Document(*d) for d in json.loads(index.read_text())]
        return np.memmap(index.with_suffix(".bin"), dtype, "r", shape=placed[-1].stop), placed
    if index:
        index.parent.mkdir(parents=True, exist_ok=True)
    placed, at, part = [], 0, index and index.with_suffix(f".{os.getpid()}")
    with open(part, "wb+") if part else tempfile.TemporaryFile() as out:
        for d in documents:
            data = (root / d.path).read_bytes()
            if hashlib.sha256(data).hexdigest() != d.sha256:
                raise ValueError(f"{root / d.path} changed while it was being read: start again")
            ids = np.array([tokenizer.size + 1, *tokenizer.encode(data.decode())], dtype)
            out.write(ids.tobytes())
            placed.append(replace(d, start=at, stop=at + len(ids)))
            at += len(ids)
        out.flush()
        tokens = np.memmap(out, dtype, "r", shape=at)           # outlives the handle, if need be the name
    if index:
        os.replace(part, index.with_suffix(".bin"))             # the index last: it vouches for the tokens
        _write(index, [astuple(d) for d in placed])
    return tokens, placed


# ------------------------------------------------------------------------------------ phases, cursor, batches


@dataclass(frozen=True)
class Phase:
    """One phase of training as data. The report gives the lengths (32k, 256k); every other number is ours."""
    name: str
    length: int                                 # tokens of a row
    rows: int                                   # rows of an optimizer step
    steps: int
    lr: float                                   # at the peak
    warmup: int = 0                             # steps from lr_start up to lr
    decay: float = 0.0                          # share of the steps, at the end, that go down to lr_end
    lr_start: float = 0.0                       # the lr_end of the phase before, to go on without a jump
    lr_end: float = 0.0
    mtp: str = "off"                            # off, only (the model is frozen), joint
    mtp_weight: float = 0.1
    mtp_every: int = 1                          # joint: on every n-th step
    mtp_detach: bool = False                    # joint: keep the MTP loss' gradient out of the model
    mix: dict[str, float] = field(default_factory=lambda: {"code": 1.0})
    precision: str = "fp32"                     # or bf16 (autocast); MXFP8 is the model's `Config.precision`
    clip: float = 1.0                           # largest gradient norm
    balance_rate: float = 1e-3                  # step of the routers' correction biases
    micro_rows: int = 0                         # rows of a backward pass, 0: all

    def __post_init__(self) -> None:
        def need(good: bool, text: str) -> None:
            if not good:
                raise ValueError(f"phase {self.name!r}: {text}")

        for name, least in dict(length=2, rows=1, steps=1, mtp_every=1, warmup=0, micro_rows=0).items():
            need(getattr(self, name) >= least, f"{name} = {getattr(self, name)} must be at least {least}")
        need(self.mtp in ("off", "only", "joint"), f"mtp = {self.mtp!r}: choose off, only or joint")
        need(self.precision in ("fp32", "bf16"), f"precision = {self.precision!r}: choose fp32 or bf16")
        need(0 <= self.decay <= 1 and self.warmup + self.decay_steps <= self.steps,
             f"warmup = {self.warmup} and decay = {self.decay} of {self.steps} steps overlap: shorten one")
        percent = [round(100 * share, 6) for share in self.mix.values()]
        need(sum(percent) == 100 and all(p > 0 and p == int(p) for p in percent),
             f"the shares of mix = {self.mix} must be whole per cents that sum to 1")

    @property
    def decay_steps(self) -> int:
        return round(self.decay * self.steps)

    @property
    def tokens(self) -> int:
        return self.length * self.rows * self.steps


@dataclass(frozen=True)
class Cursor:
    """Where a phase stands, in plain integers: with weights and optimizer all that resuming needs."""
    step: int = 0                               # steps done; the next one is `step`
    sample: int = 0                             # the next sample; epochs follow from it
    tokens: int = 0                             # seen so far, without padding

    def after(self, metrics: dict) -> Cursor:
        """The cursor behind the step that gave `metrics`."""
        return Cursor(metrics["step"] + 1, metrics["sample_ids"][-1] + 1, self.tokens + metrics["tokens"])


def lr_at(phase: Phase, step: int) -> float:
    """Learning rate of `step` (from 0): up, level, down, all linear. It has no state that could be lost."""
    if step < phase.warmup:
        return phase.lr_start + (phase.lr - phase.lr_start) * (step + 1) / phase.warmup
    if (into := step + 1 - (phase.steps - phase.decay_steps)) > 0:
        return phase.lr + (phase.lr_end - phase.lr) * into / phase.decay_steps
    return phase.lr


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents.

    `targets[t]`: token t is to be predicted from t − 1, a token of the same document; in supervised rows
    only where the model wrote it. `labels[t]`: token t + 1 where that is a target, else −1. Labels and
    positions are made on whole rows: `columns`, the share of a context-parallel rank, keeps them right.
    """
    tokens: Tensor                              # [B, T] long
    targets: Tensor                             # [B, T] bool
    doc: Tensor                                 # [B, T] number of the document in its row, −1: padding
    positions: Tensor                           # [B, T] from 0 in every document
    sample_ids: list[int]
    labels: Tensor | None = None                # [B, T]

    def __post_init__(self) -> None:
        if self.labels is None:
            labels = torch.full_like(self.tokens, -1)
            labels[:, :-1] = torch.where(self.targets, self.tokens, -1)[:, 1:]
            object.__setattr__(self, "labels", labels)

    def _map(self, f: Callable[[Tensor], Tensor]) -> Batch:
        fields = (self.tokens, self.targets, self.doc, self.positions)
        return Batch(*map(f, fields), self.sample_ids, f(self.labels))

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda x: x.to(device))

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of at most `rows` rows, 0: one."""
        n = len(self.tokens)
        return [self._map(lambda x: x[i:i + (rows or n)]) for i in range(0, n, rows or n)]

    def columns(self, index: Tensor) -> Batch:
        """The tokens at `index` of every row, such as the two chunks of a zigzag (S3)."""
        return self._map(lambda x: x[:, index])


Row = Sequence[tuple[Sequence[int], "Sequence[int] | None"]]    # its documents: ids, mask (None: all targets)


def lay_out(rows: Sequence[Row], length: int, sample_ids: list[int]) -> Batch:
    """Documents end to end in rows of `length`, padding behind. A document's first token is no target."""
    shape = (len(rows), length)
    tokens, positions, doc = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
    targets = np.zeros(shape, bool)
    for b, row in enumerate(rows):
        at = 0
        for n, (ids, mask) in enumerate(row):
            end = at + len(ids)
            tokens[b, at:end], positions[b, at:end], doc[b, at:end] = ids, np.arange(len(ids)), n
            targets[b, at + 1:end] = True if mask is None else mask[1:]
            at = end
    return Batch(*map(torch.from_numpy, (tokens, targets, doc, positions)), sample_ids)


def pack(rows: Iterable[tuple[Sequence[int], Sequence[int]]], length: int, rows_per_batch: int,
         first: int = 0) -> Iterator[Batch]:
    """Pack documents (ids, mask) in their order, each into the first row of the open batch that has room.

    A document without room closes the batch and opens the next, so a batch depends on its own samples alone:
    `rows` begun anew at `Cursor.sample`, with `first` set to it, gives the batches of an uninterrupted run.
    """
    batch, used, samples = [[] for _ in range(rows_per_batch)], [0] * rows_per_batch, []
    for sample, (ids, mask) in enumerate(rows, first):
        if not 0 < len(ids) <= length or len(ids) != len(mask):
            raise ValueError(f"sample {sample}: {len(ids)} tokens, mask of {len(mask)}: "
                             f"both must agree and fit rows of {length}")
        place = next((i for i, n in enumerate(used) if n + len(ids) <= length), None)
        if place is None:
            yield lay_out(batch, length, samples)
            batch, used, samples, place = [[] for _ in used], [0] * rows_per_batch, [], 0
        batch[place].append((ids, mask))
        used[place] += len(ids)
        samples.append(sample)
    if samples:
        yield lay_out([row for row in batch if row], length, samples)


def interleave(mix: dict[str, float]) -> list[str]:
    """A cycle of 100 samples with as many of each source as its per cent, evenly spread."""
    percent = {name: round(100 * share) for name, share in mix.items()}
    places = [((i + 0.5) / n, name) for name, n in percent.items() for i in range(n)]
    return [name for _, name in sorted(places)]


def code_batches(corpus: Corpus, phase: Phase, cursor: Cursor, seed: int,
                 sources: dict[str, Callable[[int], Row]] | None = None) -> Iterator[Batch]:
    """A phase's batches from the cursor on, endless. Sample i's source and its index there depend on i alone.

    sources: more of them by name, each a pure function from its own index to the documents of a row.
    """
    known = {"code": lambda i: corpus.row(i, phase.length, seed),
             "track": lambda i: [track_row(corpus.tokenizer, seed, i, phase.length)], **(sources or {})}
    if unknown := set(phase.mix) - set(known):
        raise ValueError(f"phase {phase.name!r} mixes in {sorted(unknown)}: the sources are {sorted(known)}")
    cycle = interleave(phase.mix)

    def row(sample: int) -> Row:
        turn, slot = divmod(sample, len(cycle))
        name = cycle[slot]
        return known[name](turn * cycle.count(name) + cycle[:slot].count(name))

    for start in itertools.count(cursor.sample, phase.rows):
        samples = list(range(start, start + phase.rows))
        yield lay_out([row(i) for i in samples], phase.length, samples)


def track_document(key: str, n_lines: int, n_edits: int) -> tuple[str, str]:
    """A small file and diffs; and the file after them: what an agent has to keep in mind while it edits (P5).

    Names have 3, 5 or 6 letters. The benchmark's have 4, so those that it holds out stay unseen.
    """
    rng = random.Random(key)

    def line() -> str:
        name = "".join(rng.choices(string.ascii_lowercase, k=rng.choice((3, 5, 6))))
        return f"{name}={rng.randrange(10, 1000)}\n"

    lines = [line() for _ in range(n_lines)]
    prompt = "".join(lines) + "---\n"
    for _ in range(n_edits):
        i, new = rng.randrange(len(lines)), line()
        kind = rng.choice(("insert", "replace", "delete")[:3 if len(lines) > 1 else 2])
        old = lines[i]
        prompt += {"insert": f" {old}+{new}", "replace": f"-{old}+{new}", "delete": f"-{old}"}[kind]
        lines[i:i + 1] = {"insert": [old, new], "replace": [new], "delete": []}[kind]
    return prompt + "---\n", "".join(lines) + "---\n"


def track_row(tokenizer: Tokenizer, seed: int, index: int, length: int) -> tuple[list[int], list[int]]:
    """Row `index` of the source "track": (ids, mask) of such documents up to `length`.

    Targets are the files after the diffs: only they follow from what stands before them.
    """
    ids: list[int] = []
    mask: list[int] = []
    while len(ids) < length:
        key = f"{seed}/track/{index}/{len(ids)}"
        rng = random.Random(key)
        n_lines = rng.randint(2, max(2, min(24, length // 32)))
        prompt, result = track_document(f"{key}/text", n_lines, rng.randint(0, n_lines // 2))
        asked, wanted = [tokenizer.size + 1, *tokenizer.encode(prompt)], tokenizer.encode(result)
        ids, mask = ids + asked + wanted, mask + [0] * len(asked) + [1] * len(wanted)
    return ids[:length], mask[:length]


def recall_document(tokenizer: Tokenizer, key: str, n_lines: int, n_asked: int) -> tuple[list[int], list[int]]:
    """A small file whose lines are then asked for by name, in any order: (ids, mask). Targets are the values: only
    they follow from the file. Names as in `track_document`.

    Looking up a value by its key is what an agent does with everything it has read; corpora teach it too, but
    seldom.
    """
    rng = random.Random(key)
    lines = [("".join(rng.choices(string.ascii_lowercase, k=rng.choice((3, 5, 6)))) + "=",
              f"{rng.randrange(10, 1000)}\n") for _ in range(n_lines)]
    ids = [tokenizer.size + 1, *tokenizer.encode("".join(name + value for name, value in lines) + "---\n")]
    mask = [0] * len(ids)
    for name, value in rng.choices(lines, k=n_asked):
        asked, wanted = tokenizer.encode(name), tokenizer.encode(value)
        ids, mask = ids + asked + wanted, mask + [0] * len(asked) + [1] * len(wanted)
    return ids, mask


# --------------------------------------------------------------------------------------------------- training


def _head_nll(head: nn.Module, hidden: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    logits = head(hidden)
    wide = torch.promote_types(logits.dtype, torch.float32)     # bf16 would lose a long sum
    return F.cross_entropy(logits.to(wide), labels, reduction=reduction)


def loss(model: moe.Transformer, batch: Batch, norm: float, chunk: int = 4096) -> tuple[Tensor, dict, Tensor]:
    """Σ NLL of the targets / norm. With `norm` the target count of the step, micro-batches and ranks add up.

    Only positions with a label meet the head, `chunk` at a time; several chunks are computed again in the
    backward pass: 32k tokens of 163,840 logits would be 21 GB. Returns loss, {nll, targets} (sums) and hidden
    [B, T, D].
    """
    # One document a row, no padding: causal, no mask. A share of a row does not show whether it is so.
    whole = bool(((batch.doc == batch.doc[:, :1]) & (batch.doc >= 0)).all()) and not model.split_rows
    doc, real = (None, None) if whole else (batch.doc, batch.doc >= 0)
    hidden = model(batch.tokens, model.context(batch.positions, doc=doc, real=real))     # [B, T, D]
    wanted = batch.labels >= 0
    picked, labels = hidden[wanted], batch.labels[wanted]                                # [N, D], [N]
    if len(labels) <= chunk:
        nll = _head_nll(model.lm_head, picked, labels)
    else:
        nll = sum(checkpoint(_head_nll, model.lm_head, h, y, use_reentrant=False)
                  for h, y in zip(picked.split(chunk), labels.split(chunk)))
    return nll / norm, {"nll": nll.detach(), "targets": len(labels)}, hidden


def make_optimizer(modules: Iterable[nn.Module], lr: float, weight_decay: float = 0.1,
                   betas: tuple[float, float] = (0.9, 0.95)) -> torch.optim.AdamW:
    """AdamW (P2) over the modules' parameters. Only matrices decay: a norm's weight should not go to 0.

    Decay and betas are DeepSeek-V3's; the report gives none.
    """
    parameters = list(dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad))
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)
    placed = Counter(id(p) for g in optimizer.param_groups for p in g["params"])
    if placed != Counter(map(id, parameters)):
        raise AssertionError("every parameter belongs to exactly one group")
    return optimizer


def _gradients(model: moe.Transformer, mtp: nn.Module | None, phase: Phase, batch: Batch, with_mtp: bool,
               total: Callable[[float], float]) -> dict[str, float]:
    """Add up the gradients of one optimizer step over its micro-batches; returns the step's metrics."""
    only = phase.mtp == "only"
    targets, real = int(total(int(batch.targets.sum()))), int(total(int((batch.doc >= 0).sum())))
    if not targets:
        raise ValueError(f"samples {batch.sample_ids} hold no target: there is nothing to learn from them")
    sums: Counter[str] = Counter()
    for part in batch.split(phase.micro_rows):
        with torch.autocast(part.tokens.device.type, torch.bfloat16, enabled=phase.precision == "bf16"):
            with torch.set_grad_enabled(not only):
                value, metrics, hidden = loss(model, part, targets)
            if with_mtp:
                distance, agreement = distill_loss(model, mtp, hidden, part.tokens, part.doc, part.positions,
                                                   detach_trunk=only or phase.mtp_detach, norm=real)
                value = distance if only else value + phase.mtp_weight * distance
                share = len(part.tokens) / len(batch.tokens)
                sums.update({f"mtp_{name}": total(float(x) * share) / total(1.0) for name, x in agreement.items()})
        value.backward()
        sums["nll"] += float(metrics["nll"])
    return {"loss": total(sums.pop("nll")) / targets, "tokens": real, "targets": targets, **sums}


def spike(history: Sequence[float], value: float, factor: float) -> bool:
    """Is a value more than `factor` times the median of the 32 before it?"""
    recent = sorted(history[-32:])
    return len(recent) >= 8 and value > factor * recent[len(recent) // 2]


def train_phase(model: moe.Transformer, mtp: nn.Module | None, optimizer: torch.optim.Optimizer, phase: Phase,
                batches: Iterator[Batch], start_step: int = 0, total: Callable[[float], float] = float,
                clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_) -> Iterator[dict]:
    """Run a phase from `start_step` on. Yields at the border of every step, where it is safe to save.

    total: a number's sum over the ranks; clip: gradient clipping (a sharded run brings its own of both).
    Yields step, loss (nats per target), bits (the same), grad_norm, lr, tokens, targets, sample_ids, seconds,
    data_seconds, spike ("", "loss", "grad_norm" or both), and what `distill_loss` measures as mtp_*.
    Raises FloatingPointError before a loss or gradient that is not finite can reach the weights.
    """
    if phase.mtp != "off" and mtp is None:
        raise ValueError(f"phase {phase.name!r} has mtp = {phase.mtp!r}: pass the MTP layers")
    trained = [m for m, used in ((model, phase.mtp != "only"), (mtp, phase.mtp != "off")) if used]
    parameters = [p for m in trained for p in m.parameters()]
    experts = [m for t in trained for m in t.modules() if isinstance(m, moe.MoE)]
    history, limits, checked = {"loss": [], "grad_norm": []}, {"loss": 1.5, "grad_norm": 5.0}, False
    for step in range(start_step, phase.steps):
        began = time.perf_counter()
        batch = next(batches).to(parameters[0].device)
        loaded = time.perf_counter()
        with_mtp = phase.mtp == "only" or phase.mtp == "joint" and step % phase.mtp_every == 0
        metrics = _gradients(model, mtp, phase, batch, with_mtp, total)
        if not checked and with_mtp == (phase.mtp != "off"):    # once, on the first step that uses every part
            if missing := sum(p.grad is None for p in parameters):
                raise AssertionError(f"{missing} of {len(parameters)} parameters got no gradient")
            checked = True
        metrics["grad_norm"] = float(clip(parameters, phase.clip))
        if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
            raise FloatingPointError(
                f"phase {phase.name!r}, step {step}: loss {metrics['loss']}, gradient norm "
                f"{metrics['grad_norm']}, samples {batch.sample_ids}. Weights are those of the step before: "
                "resume from a checkpoint with a lower lr, or leave these samples out")
        for group in optimizer.param_groups:
            group["lr"] = lr_at(phase, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for m in experts:
            m.balance(phase.balance_rate)
        jumps = [name for name, limit in limits.items() if spike(history[name], metrics[name], limit)]
        for name, past in history.items():
            past.append(metrics[name])
        yield {"step": step, **metrics, "bits": metrics["loss"] / math.log(2), "lr": lr_at(phase, step),
               "sample_ids": batch.sample_ids, "spike": " ".join(jumps), "data_seconds": loaded - began,
               "seconds": time.perf_counter() - began}


# --------------------------------------------------------------------------------------------------- measures


@torch.no_grad()
def row_nll(model: moe.Transformer, tokens: Tensor, chunk: int = 4096) -> Tensor:
    """NLL in nats of each token but the first of rows [B, T], one document each: float64 [B, T − 1]."""
    tokens = tokens.to(next(model.parameters()).device)
    hidden = model(tokens)[:, :-1].flatten(0, 1)                                         # [B · (T − 1), D]
    parts = zip(hidden.split(chunk), tokens[:, 1:].flatten().split(chunk))
    nll = torch.cat([_head_nll(model.lm_head, h, y, "none") for h, y in parts])
    return nll.view(len(tokens), -1).double().cpu()


def codebase_nll(model: moe.Transformer, ids: np.ndarray, n_bytes: int, window: int,
                 stride: int | None = None, batch: int = 8) -> dict[str, float]:
    """Codebase perplexity (report App. B): NLL summed over a rolling window, every byte scored once.

    `ids`, `n_bytes`: from `Corpus.joined`; ids[0] only opens the text. A window gives up to `window` tokens
    of context and scores what no window before it has, the last `stride` tokens (ours: half a window).
    Returns nll (nats), bpb (bits per byte: tokenizers are comparable), ppl (per token) and tokens (scored).
    """
    n, stride = len(ids) - 1, stride or window // 2
    if n < 1 or not 0 < stride <= window:
        raise ValueError(f"stride = {stride} must be in 1 … window = {window}; there are {n} tokens of text")
    text, window = torch.from_numpy(ids), min(window, n)
    # The last window moves back to be full.
    starts = [min(at, n - window) for at in range(0, n - window + stride, stride)]
    nll, scored = 0.0, 0
    for group in _groups(starts, batch):
        rows = torch.stack([text[start:start + window + 1] for start in group])
        for start, values in zip(group, row_nll(model, rows)):
            nll += float(values[scored - start:].sum())         # values[i] belongs to token start + 1 + i
            scored = start + window
    return {"nll": nll, "bpb": nll / math.log(2) / n_bytes, "ppl": math.exp(nll / n), "tokens": scored}


def _groups(items: Sequence, n: int) -> Iterator[Sequence]:
    return (items[i:i + n] for i in range(0, len(items), n))


def loss_by_position(model: moe.Transformer, ids: np.ndarray, edges: Sequence[int],
                     rows: int = 16) -> list[float]:
    """Bits per token between positions `edges` of rows of edges[-1] + 1 tokens: the worth of context (P1)."""
    length = edges[-1] + 1
    cut = torch.from_numpy(ids[:len(ids) // length * length]).view(-1, length)[:rows]
    bits = torch.cat([row_nll(model, part) for part in cut.split(4)]).mean(0) / math.log(2)
    return [float(bits[a:b].mean()) for a, b in zip(edges, edges[1:])]


def _answer_nll(model: moe.Transformer, pairs: Sequence[tuple[list[int], list[int]]],
                batch: int = 16) -> list[float]:
    """NLL of each answer behind its question. Rows are padded behind, where a causal model does not look."""
    out = []
    for group in _groups(pairs, batch):
        rows = [torch.tensor(asked + answer) for asked, answer in group]
        nll = row_nll(model, nn.utils.rnn.pad_sequence(rows, batch_first=True))
        out += [float(row[len(asked) - 1:][:len(answer)].sum()) for row, (asked, answer) in zip(nll, group)]
    return out


def recall_by_distance(model: moe.Transformer, corpus: Corpus, distances: Sequence[int], n: int = 16,
                       seed: int = 0) -> dict[int, float]:
    """Bits per letter of a random name defined `distance` tokens of held-out code earlier (a guess: 4.7)."""
    encode, (filler, _), out = corpus.tokenizer.encode, corpus.joined(), {}
    for distance in distances:
        pairs = []
        for i in range(n):
            rng = random.Random(f"{seed}/recall/{distance}/{i}")
            name = "".join(rng.choices(string.ascii_lowercase, k=6))
            start = rng.randrange(1, len(filler) - distance)
            asked = [*encode(f"KEY={name}\n"), *filler[start:start + distance].tolist(), *encode("\nKEY=")]
            pairs.append(([corpus.tokenizer.size + 1, *asked], encode(name)))
        out[distance] = sum(_answer_nll(model, pairs)) / math.log(2) / (6 * n)
    return out


def knowledge_probe(model: moe.Transformer, tokenizer: Tokenizer, sources: Iterable[str], n: int = 64,
                    options: int = 4, seed: int = 0) -> float:
    """Does the model know these files' functions? (Ours, for the report's knowledge questions.)

    The share of functions whose own parameters are likelier, per token, than those of options − 1 others.
    """
    found = [f for source in sources for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)]
    functions = {f.name: ast.unparse(f.args) for f in found if not f.name.startswith("__")}
    signatures, rng = sorted(set(functions.values())), random.Random(f"{seed}/probe")
    if len(signatures) < options:
        raise ValueError(f"{len(signatures)} signatures are too few for {options} options: give more sources")
    names, pairs = rng.sample(sorted(functions), min(n, len(functions))), []
    for name in names:
        others = rng.sample([s for s in signatures if s != functions[name]], options - 1)
        asked = [tokenizer.size + 1, *tokenizer.encode(f"def {name}(")]
        pairs += [(asked, tokenizer.encode(f"{s}):")[:256]) for s in (functions[name], *others)]
    means = [nll / len(answer) for nll, (_, answer) in zip(_answer_nll(model, pairs), pairs)]
    return sum(group[0] == min(group) for group in _groups(means, options)) / len(names)


def complete(model: moe.Transformer, prompts: Sequence[list[int]], n: int) -> list[list[int]]:
    """The n likeliest next tokens, one by one, of every prompt."""
    engine = Engine(model, len(prompts), max(map(len, prompts)) + n, stop=-1, temperature=0.0)
    for slot, prompt in enumerate(prompts):
        engine.force(slot, prompt, len(prompt) + n, reset=True)
    while engine.live.any():
        engine.step()
    return [engine.window(slot)[0][len(prompt):] for slot, prompt in enumerate(prompts)]


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of a character that turn a into b (Levenshtein)."""
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y)))
        previous = row
    return previous[-1]


def state_tracking(model: moe.Transformer, tokenizer: Tokenizer, edits: Sequence[int] = (0, 1, 2, 4),
                   n: int = 16, n_lines: int = 5, seed: int = 0) -> dict[int, tuple[float, float]]:
    """Write down a file after some edits; scored by edit distance in characters (report App. B, Table 2).

    Returns {edits: (mean distance, that of the file before the edits)}; the latter scores not reading them.
    """
    out = {}
    for k in edits:
        documents = [track_document(f"{seed}/state tracking/{k}/{i}", n_lines, k) for i in range(n)]
        prompts = [[tokenizer.size + 1, *tokenizer.encode(prompt)] for prompt, _ in documents]
        longest = max(len(tokenizer.encode(result)) for _, result in documents)
        texts = [tokenizer.decode(i for i in ids if i < tokenizer.size)             # no structural ids
                 for ids in complete(model, prompts, longest)]
        distances = [[edit_distance(text.split("---\n")[0], result.removesuffix("---\n"))
                      for text, (_, result) in zip(side, documents)]
                     for side in (texts, [prompt for prompt, _ in documents])]
        out[k] = (sum(distances[0]) / n, sum(distances[1]) / n)
    return out


def log_linear_fit(tokens: Sequence[float],
                   losses: Sequence[float]) -> tuple[float, float, float, list[float]]:
    """Least squares for loss ≈ intercept + slope · log₁₀ tokens (P3): slope, intercept, R², residuals."""
    if len(set(tokens)) < 2 or len(tokens) != len(losses):
        raise ValueError(f"a line needs two token counts and as many losses, not {tokens} and {losses}")
    x, y = np.log10(np.asarray(tokens, np.float64)), np.asarray(losses, np.float64)
    slope, intercept = np.polyfit(x, y, 1)
    residuals = y - intercept - slope * x
    # R² = 1 − Σ residual² / Σ (y − mean y)²
    r2 = 1 - (residuals ** 2).sum() / max(((y - y.mean()) ** 2).sum(), 1e-30)
    return float(slope), float(intercept), float(r2), residuals.tolist()


# --------------------------------------------------------------------------------------------- bench and demo

SMALL = moe.Config(
    vocab_size=272, dim=128, n_layers=4, n_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=32, ffn_dim=256, expert_dim=64, n_experts=8, n_experts_per_tok=2,
    route_scale=1.0, rope_theta=10_000.0, rope_factor=4.0, rope_original_len=256, init_std=0.0,
    positional_heads=3)


def _new(lr: float) -> tuple[moe.Transformer, torch.optim.Optimizer]:
    model = moe.Transformer(SMALL)
    model.reset_parameters(0)
    return model, make_optimizer([model], lr)


def flops_per_token(model: moe.Transformer, length: int) -> float:
    """Model FLOPs of training on a token: 6 per active matrix entry, and attention to half the row.

        6 · (matrices, K/E of the experts) + 3 · 2 · H · (dn + dr + dv) · T/2 · L
    """
    c = model.config
    active = sum(p.numel() * (c.n_experts_per_tok / c.n_experts if p.dim() == 3 else 1)
                 for p in model.parameters() if p.dim() > 1 and p is not model.embed_tokens.weight)
    head = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    return 6 * active + 3 * c.n_layers * c.n_heads * head * length


def _seconds(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def _transformers_step(experts: str, batches: Iterator[Batch], length: int) -> Callable[[], None]:
    """A function that does one AdamW step with transformers' DeepseekV3 of the small shape."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    c = SMALL
    shape = DeepseekV3Config(
        vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers,
        moe_intermediate_size=c.expert_dim, num_attention_heads=c.n_heads, num_key_value_heads=c.n_heads,
        n_shared_experts=c.n_shared_experts, n_routed_experts=c.n_experts, n_group=1, topk_group=1,
        num_experts_per_tok=c.n_experts_per_tok, first_k_dense_replace=c.n_dense_layers,
        q_lora_rank=c.q_lora_rank, kv_lora_rank=c.kv_lora_rank, qk_rope_head_dim=c.qk_rope_head_dim,
        qk_nope_head_dim=c.qk_nope_head_dim,
        v_head_dim=c.v_head_dim, max_position_embeddings=length, num_mtp_layers=0, use_cache=False,
        attn_implementation="sdpa", experts_implementation=experts)
    model = DeepseekV3ForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        tokens = next(batches).tokens
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bench(rounds: int = 5, steps: int = 4, length: int = 256, rows: int = 16) -> dict:
    """Training speed at the small shape, ours and transformers' settings in turn: all meet the same machine.

    tokens_per_s: of the best round; vs_transformers: over its best setting's, null where it is not installed;
    data_share: of our time, spent on getting batches; utilisation: model FLOPs over the measured matmul peak.
    """
    corpus, (model, optimizer), log = Corpus.load(None, limit_bytes=2_000_000), _new(1e-3), []
    phase = Phase("bench", length, rows, rounds * steps + 1, 1e-3)
    batches = code_batches(corpus, phase, Cursor(), seed=0)
    run = train_phase(model, None, optimizer, phase, batches)
    players: dict[str, Callable[[], object]] = {"ours": lambda: log.append(next(run))}
    if importlib.util.find_spec("transformers"):
        # Its third setting, batched_mm, copies each token's weights and is slower than these many times over.
        players |= {name: _transformers_step(name, batches, length) for name in ("eager", "grouped_mm")}
    best = {}
    for step in players.values():
        step()                                                  # the first one also allocates
    for _ in range(rounds):
        for name, step in players.items():
            speed = steps * rows * length / _seconds(lambda: [step() for _ in range(steps)])
            best[name] = max(best.get(name, 0.0), speed)
    a = torch.randn(1024, 1024)
    peak = 2 * 1024 ** 3 / min(_seconds(lambda: a @ a) for _ in range(10))
    for name, speed in best.items():
        print(f"{name:12} {speed:9.0f} tokens/s")
    ours, theirs = best.pop("ours"), max(best.values(), default=None)
    return {"tokens_per_s": round(ours), "vs_transformers": theirs and round(ours / theirs, 3),
            "data_share": round(sum(m["data_seconds"] for m in log) / sum(m["seconds"] for m in log), 5),
            "utilisation": round(ours * flops_per_token(model, length) / peak, 3),
            "matmul_gflops": round(peak / 1e9, 1), "threads": torch.get_num_threads()}


def resumes_exactly(corpus: Corpus, phase: Phase, cut: int) -> bool:
    """Train in one go, and with all but weights, optimizer state and cursor thrown away after `cut` steps."""
    def run(stops: Sequence[int]) -> tuple[list, dict]:
        cursor, losses, saved = Cursor(), [], None
        for stop in stops:
            model, optimizer = _new(phase.lr)
            if saved:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            batches = code_batches(corpus, phase, cursor, seed=0)
            steps = train_phase(model, None, optimizer, phase, batches, cursor.step)
            for metrics in itertools.islice(steps, stop - cursor.step):
                cursor = cursor.after(metrics)
                losses.append((metrics["loss"], metrics["sample_ids"]))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return losses, saved[0]

    (losses, weights), (losses_cut, weights_cut) = run([phase.steps]), run([cut, phase.steps])
    return losses == losses_cut and all(torch.equal(w, weights_cut[name]) for name, w in weights.items())


def demo() -> None:
    """Two short phases on the standard library, with held-out loss along the way."""
    corpus, (model, optimizer) = Corpus.load(None), _new(3e-3)
    print(f"corpus: {corpus.n_train / 1e6:.1f}M training tokens in {len(corpus.train)} files, "
          f"{len(corpus.heldout)} held out, manifest {corpus.digest[:12]}, skipped {corpus.counts}")
    ids, n_bytes = corpus.joined(limit_bytes=8_200)
    bulk = Phase("bulk", 256, 10, 12, 3e-3, warmup=4, decay=0.25, lr_end=1e-3)
    long = Phase("long", 1024, 2, 8, 1e-3)
    print("\nphase bulk, rows of 256       tokens   held-out bits/byte")
    seen, bpb, cursor = [], [], Cursor()
    for metrics in train_phase(model, None, optimizer, bulk, code_batches(corpus, bulk, cursor, seed=0)):
        cursor = cursor.after(metrics)
        if cursor.step in (2, 4, 8, 12):
            seen.append(cursor.tokens)
            bpb.append(codebase_nll(model, ids, n_bytes, window=256, stride=256)["bpb"])
            print(f"{cursor.tokens:36,}   {bpb[-1]:.3f}")
    slope, _, r2, residuals = log_linear_fit(seen, bpb)
    print(f"fit: {slope:+.2f} per tenfold, R² {r2:.3f}, residuals {[round(r, 2) for r in residuals]}")

    edges = (0, 64, 256, 512, 1023)
    before = loss_by_position(model, ids, edges)
    for _ in train_phase(model, None, optimizer, long, code_batches(corpus, long, Cursor(), seed=0)):
        pass
    print("\nphase long, rows of 1024      before    after    held-out bits/byte")
    for a, b, x, y in zip(edges, edges[1:], before, loss_by_position(model, ids, edges)):
        print(f"    positions {a:4} … {b - 1:<4}        {x:.3f}    {y:.3f}")
    exact = resumes_exactly(corpus, Phase("resume", 64, 4, 4, 1e-3, warmup=2), cut=3)
    print(f"\nresumed after 3 of 4 steps: losses, sample ids and weights equal bit for bit: {exact}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", action="store_true", help="training speed; the last line is JSON")
    if parser.parse_args().bench:
        print(json.dumps(bench()))
    else:
        demo()


if __name__ == "__main__":
    main()
