"""A workspace for untrusted code that forks in milliseconds, and the tools that a model uses in it.

The report trains with RL in isolated machines (§6.2, Anyrun; E1) with the product's tools (§2, §6.2, E2).
Here a workspace is a process in Linux namespaces of its own (`Sandbox`), or a dict of files where nothing is
executed (`Memory`). Both answer the same calls with the same text; a fresh copy of the files is graded.

    trainer ── control socket ─> zygote: small Python, PID 1 of its own namespaces, no network, read-only root
       │                            │ forks
       └─── one socket for each ──> workspace: own user, mount and process namespace, tmpfs, no privileges,
                                    seccomp. PID 1 is the tool server. A command is its child, and all that
                                    the command started is gone when the call returns

Differences from the report, and why:
  1. Namespaces on a shared kernel, not Firecracker machines, so that it runs on a laptop. They hold code that
     a model wrote about as well as bubblewrap does. Out of scope: kernel bugs, side channels, a cap on total
     memory (it is processes x memory). For hostile code use a virtual machine, as the report does.
  2. Snapshot and fork copy files. Memory is out of reach: that takes a virtual machine or CRIU.
  3. No scheduler and no live migration: one machine, one warm process that forks.
  4. Egress (Anygress) is an offline index of pages that the task supplies; the rest is refused, with the why.
  5. Semantic search (outside of the workspace, as there) ranks by rare shared words, without a model.

`python sandbox.py` shows forks that drift apart and attacks that fail; `python sandbox.py --bench` measures.
Left out: all but Linux on x86_64 (aarch64's numbers stand here but never ran); elsewhere `auto` takes Memory.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import math
import os
import platform
import posixpath
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import weakref
from _thread import allocate_lock  # `threading` would add a hundred pages to what each fork has to copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

ROOT = "/workspace"  # where the files lie inside

# ---- 1. What goes in and what comes out ------------------------------------------------------------------


class Result(NamedTuple):
    """What a tool call answers. `ok=False` is an observation too (its text begins with "!"), no exception.
    `text` is valid Unicode: a byte that is not UTF-8 shows as \\xNN (`snapshot()` has the exact bytes)."""

    ok: bool
    text: str


@dataclass(frozen=True)
class Limits:
    """What a workspace may use (ours). CPU time is tight, wall time generous: under load that clock lies."""

    wall: float = 10.0  # seconds that a command may last
    cpu: int = 5  # CPU seconds of each of its processes
    memory: int = 512 << 20  # bytes of address space of each
    processes: int = 24
    open_files: int = 64
    file_size: int = 16 << 20
    disk: int = 64 << 20  # bytes in the workspace, and as many in /tmp
    inodes: int = 4096
    output: int = 16_000  # bytes of a file or of a command's output that a result shows
    patience: float = 20.0  # seconds beyond `wall` after which a silent tool server counts as dead

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} = {value!r} must be greater than 0")


class File(NamedTuple):
    """An entry of a snapshot: its bytes (a link's: the target) and `st_mode`: kind and permissions."""

    data: bytes = b""
    mode: int = stat.S_IFREG | 0o644


FOLDER = File(mode=stat.S_IFDIR | 0o755)  # as the tools make them; in a snapshot only if it is empty
KINDS = {stat.S_IFDIR: "folder", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


class Snapshot(dict[str, File]):
    """Path -> File, sorted. Odd names are `os.fsdecode`d, hard links copies, empty folders have entries."""

    def texts(self) -> dict[str, str]:
        """Path -> text of each regular file; bytes that are not UTF-8 become surrogates (PEP 383)."""
        return {path: os.fsdecode(file.data) for path, file in self.items() if stat.S_ISREG(file.mode)}


class SandboxUnavailable(RuntimeError):
    """This system refuses isolation: `step` is what failed, `errno` how, `remedy` what to do about it."""

    def __init__(self, step: str, number: int):
        remedy = "It takes Linux 5.12 or later with user namespaces."
        if number in (errno.EPERM, errno.EACCES):
            remedy = ("Docker: --privileged, or --security-opt seccomp=unconfined --security-opt "
                      "apparmor=unconfined (as root also --cap-add SYS_ADMIN). Ubuntu: sysctl -w "
                      "kernel.apparmor_restrict_unprivileged_userns=0.")  # fmt: skip
        elif number == errno.ENOSPC:
            remedy = "Allow user namespaces: sysctl -w user.max_user_namespaces=10000."
        self.step, self.errno, self.remedy = step, number, remedy + " Or use Memory."
        name = errno.errorcode.get(number, number)
        super().__init__(f"no sandbox here: {step} failed with {name} ({os.strerror(number)}). {self.remedy}")


class SandboxDied(RuntimeError):
    """The workspace is gone and one retry did not help. `policy`: a command had run in it, so it is the
    model's doing and scores as a failure. Otherwise the machine is at fault and the rollout is masked."""

    def __init__(self, why: str, policy: bool = False):
        super().__init__(why)
        self.policy = policy


class Overloaded(SandboxDied):
    """No processes, memory or descriptors for one more workspace, and one retry did not help."""


class TooBig(ValueError):
    """The files exceed the limits (sparse files, many hard links): the model's doing, so a failure."""


class ToolError(Exception):
    """Inside this file: ends a tool with the observation "!text"."""


def show(data: bytes | str) -> str:
    """Bytes, or a string with surrogates in place of bytes, as valid Unicode."""
    data = data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape")
    return data.decode("utf-8", "backslashreplace")


def show_name(path: str) -> str:
    """A file name on one line: control characters are escaped."""
    text = show(path)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cut(text: str, most: int) -> str:
    """Too long a text becomes head, true size, tail."""
    half, note = most // 2, f"\n[{most // 2 * 2} of {len(text)} characters]\n"
    return text if len(text) <= most else text[:half] + note + text[-half:]


# ---- 2. The registry of tools ----------------------------------------------------------------------------


class Param(NamedTuple):
    name: str
    kind: str  # a type of JSON schema: "string" or "integer"
    required: bool


class Tool(NamedTuple):
    """A tool as the model sees it; `letter` is its one-character name for byte-level models."""

    name: str
    letter: str
    params: list[Param]
    doc: str


def _tool(name: str, letter: str, params: str, doc: str) -> Tool:
    """`params` in short: "old new" are strings, "[path]" may be left out, "[start#]" is an integer."""
    found = re.findall(r"(\[?)(\w+)(#?)", params)
    return Tool(name, letter, [Param(n, "integer" if i else "string", not o) for o, n, i in found], doc)


TOOLS: dict[str, Tool] = {tool.name: tool for tool in (
    _tool("read", "r", "path [start#] [count#]", "Text of a file, or `count` of its lines from `start` on."),
    _tool("grep", "g", "pattern [path] [numbers#]", "Lines that match a regular expression, as path:text, "
          "or with numbers=1 as path:line:text."),
    _tool("edit", "e", "path old new", "Replace `old`, which must occur exactly once in the file, by `new`."),
    _tool("write", "w", "path text", "Create or replace a file; folders are made as needed."),
    _tool("ls", "l", "[path]", "Names in a folder; folders end in /, links in @."),
    _tool("check", "x", "", "Run the task's own check on the files as they are."),
    _tool("run", "b", "command", "Run a shell command in the workspace."),
    _tool("search", "s", "query", "Files whose words fit the query best, each with its best line."),
    _tool("todo", "t", "[item] [done#]", "Add a to-do item, mark it with done=1, or (no item) list them."),
    _tool("web_search", "u", "query", "Search the web pages that this task may see."),
)}  # fmt: skip
_BY_LETTER = {tool.letter: tool for tool in TOOLS.values()}


def find(name: str) -> Tool:
    """The tool of that name or letter; a ValueError that lists them all if there is none."""
    tool = TOOLS.get(name) or _BY_LETTER.get(name)
    if tool is None:
        raise ValueError(f"no tool {name!r}; there are {', '.join(TOOLS)}")
    return tool


def schemas(names: Sequence[str]) -> list[dict]:
    """JSON schemas of the named tools in the function-calling convention of OpenAI's chat API."""
    out = []
    for tool in map(find, names):
        parameters = {
            "type": "object",
            "properties": {p.name: {"type": p.kind} for p in tool.params},
            "required": [p.name for p in tool.params if p.required],
            "additionalProperties": False,
        }
        function = {"name": tool.name, "description": tool.doc, "parameters": parameters}
        out.append({"type": "function", "function": function})
    return out


_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # surrogates that stand for no byte


def bind(tool: Tool, args: Mapping[str, object] | Sequence[object], strict: bool) -> list:
    """Arguments in the order of `tool.params`, None where left out; ToolError("args ...") if they do not fit.

    Strict (in training, §6.2): unknown, missing, surplus and wrongly typed ones are errors. Lenient: they
    are converted or ignored if possible. Positional ones come as text, so there digits are integers."""
    usage = "args " + " ".join(p.name if p.required else f"[{p.name}]" for p in tool.params)
    named = isinstance(args, Mapping)
    if not named:
        if not isinstance(args, (list, tuple)) or (strict and len(args) > len(tool.params)):
            raise ToolError(usage)
        args = {p.name: value for p, value in zip(tool.params, args, strict=False)}
    elif strict and not args.keys() <= {p.name for p in tool.params}:
        raise ToolError(usage)
    values = []
    for p in tool.params:
        value = args.get(p.name)
        if p.kind == "string":
            value = str(value) if not strict and type(value) in (int, float, bool) else value
            fits = type(value) is str and not _NO_BYTE.search(value)
        else:
            if type(value) is str and not (strict and named) and re.fullmatch("[0-9]{1,9}", value):
                value = int(value)
            fits = type(value) is int and 0 <= value < 10**9
        if not fits and (p.required or value is not None):
            raise ToolError(usage)
        values.append(value)
    return values


# ---- 3. File tools, written once over a store of files: a dict out here, or the disk in there ------------


class Dict:
    """Files in memory that behave, as far as the tools can see, like the disk: folders, links, quotas."""

    def __init__(self, files: Mapping[str, File], limits: Limits):
        self.limits, self.files = limits, {"": FOLDER}
        for path, file in files.items():
            self.make_folders(posixpath.dirname(path))
            self.files[path] = file
        self.used = sum(len(file.data) for file in files.values())

    def make_folders(self, path: str) -> None:
        while path not in self.files:
            self.files[path] = FOLDER
            path = posixpath.dirname(path)

    def kind(self, path: str) -> str:
        """"folder", "file", "link", or "" where nothing is."""
        return KINDS[stat.S_IFMT(self.files[path].mode)] if path in self.files else ""

    def target(self, path: str) -> str:
        """Where a link points to."""
        return os.fsdecode(self.files[path].data)

    def load(self, path: str) -> bytes:
        """All of a file."""
        data, mode = self.files[path]
        if not mode & 0o400:
            raise PermissionError(errno.EACCES, "")
        return data

    def save(self, path: str, data: bytes) -> None:
        """Create or replace a file, whole or not at all, and its parents; permissions stay."""
        old = self.files.get(path, File())
        if len(data) > self.limits.file_size:
            raise OSError(errno.EFBIG, "")
        if self.used + len(data) > self.limits.disk or len(self.files) >= self.limits.inodes:
            raise OSError(errno.ENOSPC, "")
        self.make_folders(posixpath.dirname(path))
        self.files[path] = File(data, old.mode)
        self.used += len(data) - len(old.data)

    def names(self, path: str) -> set[str]:
        """Names in a folder."""
        prefix = path + "/" if path else ""
        return {p[len(prefix):].split("/", 1)[0] for p in self.files if p.startswith(prefix)} - {""}


class Disk:
    """The same over the working directory inside a workspace. Nothing here guards the host: the kernel
    resolves every path in the workspace's own root, and there is no host in it."""

    def __init__(self, limits: Limits):
        self.limits = limits

    def kind(self, path: str) -> str:
        try:
            return KINDS.get(stat.S_IFMT(os.lstat(path or ".").st_mode), "odd")
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def target(self, path: str) -> str:
        return os.readlink(path)

    def load(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # were it a pipe after all, do not wait for a writer
        try:
            return os.read(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def save(self, path: str, data: bytes) -> None:
        make_folders(posixpath.dirname(path), {""})
        mode = stat.S_IMODE(os.lstat(path).st_mode) if os.path.lexists(path) else 0o644
        fd = os.open(".~new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:  # a temporary file and a rename, so that a full disk never cuts the old content
            write_all(fd, data)
            if mode != 0o644:
                os.fchmod(fd, mode)
            os.rename(".~new", path)
        except OSError:
            os.unlink(".~new")
            raise
        finally:
            os.close(fd)

    def names(self, path: str) -> list[str]:
        return os.listdir(path or ".")


def make_folders(path: str, made: set[str]) -> None:
    """Make a folder and its parents but for those `made`, where they are noted. os.makedirs calls itself for
    each parent, and so many can stand in a path that the tool server would die of it."""
    missing = []
    while path not in made:
        missing.append(path)
        path = posixpath.dirname(path)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
    made.update(missing)


def write_all(fd: int, data: bytes) -> None:
    """os.write until all is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


_WRONG = {("file", ""): "no file", ("any", ""): "no file", ("folder", ""): "no folder",
          ("file", "folder"): "is a folder", ("new", "folder"): "is a folder",
          ("folder", "file"): "not a folder"}  # fmt: skip


def place(store: Dict | Disk, path: str, want: str) -> str:
    """A path as the model wrote it -> the same below ROOT, if there is a "file", a "folder", "any" of them,
    or room for a "new" file. Links are not followed; the answer says where they lead."""
    if "\0" in path or len(path) > 4000:
        raise ToolError("args path")
    full = posixpath.normpath(path if path.startswith("/") else f"{ROOT}/{path}")
    if full != ROOT and not full.startswith(ROOT + "/"):
        raise ToolError("outside")
    here, kind = "", "folder"
    for part in full[len(ROOT):].split("/")[1:]:
        if kind not in ("folder", ""):
            raise ToolError("not a folder")
        if len(os.fsencode(part)) > 255:
            raise ToolError("name too long")
        here = posixpath.join(here, part)
        kind = store.kind(here)
        if kind == "link":
            raise ToolError(f"link to {show_name(store.target(here))}")
    if kind == "odd" or (want, kind) in _WRONG:
        raise ToolError(_WRONG.get((want, kind), "no regular file"))
    return here


def tool_read(store: Dict | Disk, path: str, start: int | None, count: int | None) -> str:
    """The text as it is; after `limits.output` bytes it is cut, with a note of the true size."""
    data, most = store.load(place(store, path, "file")), store.limits.output
    if b"\0" in data:
        raise ToolError(f"binary {len(data)} bytes")
    if (start, count) != (None, None):
        data = b"".join(data.splitlines(keepends=True)[max(start or 1, 1) - 1:][:count])
    return show(data[:most]) + (f"\n[{most} of {len(data)} bytes]" if len(data) > most else "")


def tool_write(store: Dict | Disk, path: str, text: str) -> str:
    """Parents are made, an old file is replaced whole."""
    store.save(place(store, path, "new"), os.fsencode(text))
    return "ok"


def tool_edit(store: Dict | Disk, path: str, old: str, new: str) -> str:
    """Byte-exact: only the matched span changes; tabs, CRLF, permissions, a missing last newline stay."""
    path, before, after = place(store, path, "file"), os.fsencode(old), os.fsencode(new)
    if not before:
        raise ToolError("args old is empty")
    if before == after:
        raise ToolError("same")
    data = store.load(path)
    at = data.find(before)
    if at < 0 or data.find(before, at + 1) >= 0:  # overlapping matches are two
        raise ToolError(f"{0 if at < 0 else max(data.count(before), 2)} matches")
    store.save(path, data[:at] + after + data[at + len(before):])
    return "ok"


def tool_ls(store: Dict | Disk, path: str | None) -> str:
    """Sorted, one name a line."""
    path, marks = place(store, path or ".", "folder"), {"folder": "/", "link": "@"}
    names = sorted(store.names(path))
    lines = (show_name(name) + marks.get(store.kind(posixpath.join(path, name)), "") for name in names)
    return cut("\n".join(lines), store.limits.output)


def walk(store: Dict | Disk, path: str) -> Iterator[str]:
    """Regular files at and below a path, in order."""
    pending = [path]
    while pending:
        here = pending.pop()
        kind = store.kind(here)
        if kind == "file":
            yield here
        elif kind == "folder":
            pending += [posixpath.join(here, name) for name in sorted(store.names(here), reverse=True)]


MOST_STEPS, TOO_SLOW = 2e8, "pattern: too slow"  # `re` takes a second or two for so many


def tool_grep(store: Dict | Disk, pattern: str, path: str | None, numbers: int | None) -> str:
    """Lines in order of path; binary and unreadable files are skipped; nothing found is an empty answer."""
    try:
        search = re.compile(os.fsencode(pattern)).search
    except (re.error, RecursionError, OverflowError) as error:
        raise ToolError(f"pattern: {error}"[:80]) from None
    # Nothing interrupts `re` outside of the main thread, where Memory may well be called, so there a bomb
    # such as (a+)+$ is refused beforehand. The tool server has a main thread, and an alarm.
    power, work = growth(pattern) if isinstance(store, Dict) else 0, 0.0
    out, size, most = [], 0, store.limits.output
    for name in walk(store, place(store, path or ".", "any")):
        try:
            data = store.load(name)
        except PermissionError:
            continue
        lines = data.splitlines() if b"\0" not in data else []
        work += sum(float(len(line)) ** power for line in lines) if power else 0
        if work > MOST_STEPS:
            raise ToolError(TOO_SLOW)
        if size > most:
            continue  # what is shown is full, but whether a pattern is refused must not depend on that
        found = ((number, line) for number, line in enumerate(lines, 1) if search(line))
        for number, line in islice(found, most):
            out.append(f"{show_name(name)}:{f'{number}:' if numbers else ''}{show(line[:300])}")
            size += len(out[-1]) + 1
    return cut("\n".join(out), most)


def growth(pattern: str) -> float:
    """p such that a backtracking match of a line takes at most about length ^ p steps: 1 + the number of
    repeats; ∞ if a group is repeated."""
    return math.inf if re.search(r"\)[*+?{]", pattern) else min(1 + len(re.findall(r"[*+?{]", pattern)), 30)


FILE_TOOLS: dict[str, Callable[..., str]] = {
    "read": tool_read, "grep": tool_grep, "edit": tool_edit, "write": tool_write, "ls": tool_ls}  # fmt: skip
_SHORT = {errno.ENOSPC: "disk full", errno.EFBIG: "file too big", errno.ENAMETOOLONG: "name too long",
          errno.EACCES: "denied", errno.EPERM: "denied"}  # fmt: skip


def file_tool(store: Dict | Disk, name: str, args: Sequence[object]) -> list:
    """[ok, text] of one file tool; whatever goes wrong becomes a short text."""
    try:
        return [True, FILE_TOOLS[name](store, *args)]
    except ToolError as error:
        return [False, f"!{error}"]
    except OSError as error:
        return [False, "!" + _SHORT.get(error.errno, os.strerror(error.errno or 0).lower())]
    except MemoryError:
        return [False, "!out of memory"]


# ---- 4. Tools outside of the workspace, and what both kinds of workspace share ---------------------------

MOST_CHECK = 1 << 20  # characters that a check may answer
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")  # snake_case and CamelCase are taken apart


def words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def rank(query: str, pages: Mapping[str, str], top: int = 5) -> list[tuple[str, str]]:
    """(name, best line) of the pages that share the most and the rarest words with the query, best first.

    score(page) = Σ_w log(1 + N / df(w)) · tf(w) / (tf(w) + ½ + ½ |page| / mean |page|)

    (that is BM25 with k₁ = 1 and b = ½)"""
    pages = {name: text[:20_000] for name, text in pages.items()}
    bags = {name: Counter(words(f"{name}\n{text}")) for name, text in pages.items()}
    mean = sum(bag.total() for bag in bags.values()) / max(len(bags), 1)
    found = {w: sum(w in bag for bag in bags.values()) for w in set(words(query))}
    weight = {w: math.log(1 + len(bags) / df) for w, df in found.items() if df}

    def score(bag: Counter) -> float:
        return sum(weight[w] * bag[w] / (bag[w] + 0.5 + 0.5 * bag.total() / mean) for w in weight)

    def fit(line: str) -> float:
        return sum(weight.get(w, 0.0) for w in set(words(line)))

    best = sorted((-score(bag), name) for name, bag in bags.items())[:top]
    return [(name, max(pages[name].splitlines() or [""], key=fit).strip()[:200]) for s, name in best if s < 0]


def documentation(modules: Sequence[str]) -> dict[str, str]:
    """Pages for `web_search` from the docstrings of installed modules: "module" and "module.name" -> text."""
    import importlib

    pages = {}
    for module in map(importlib.import_module, modules):
        pages[module.__name__] = module.__doc__ or ""
        for name in getattr(module, "__all__", ()):
            pages[f"{module.__name__}.{name}"] = str(getattr(module, name).__doc__ or "")
    return pages


def run_check(source: str, files: dict[str, str]) -> list:
    """[ok, text] of the task author's program, which defines main(files) -> str; what it raises is a text."""
    try:
        names: dict[str, object] = {"__name__": "check"}
        exec(compile(source, "<check>", "exec"), names)
        text = names["main"](files)
        if not isinstance(text, str) or len(text) > MOST_CHECK:
            raise TypeError(f"main must return a text of at most {MOST_CHECK} characters")
        return [True, text.encode("utf-8", "backslashreplace").decode()]
    except (Exception, SystemExit) as error:
        text = f"!{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        return [False, text.split("\n")[0][:200]]


def as_file(path: str, value: str | bytes | File) -> File:
    """A task's file, whose path and kind are checked."""
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"file name {path!r}: give a relative path without empty, '.' or '..' parts")
    if not isinstance(value, File):
        return File(os.fsencode(value))
    if stat.S_IFMT(value.mode) not in KINDS:
        raise ValueError(f"{path!r} has mode {value.mode:#o}: only files, folders and links are kept")
    return value


class Workspace:
    """What Memory and Sandbox share: checks of arguments, tool switches, tools outside, fork, `with`."""

    def __init__(self, files: Mapping[str, str | bytes | File] | Snapshot = {}, *,
                 tools: Sequence[str] | None = None, strict: bool = True, check: str | None = None,
                 limits: Limits = Limits(), pages: Mapping[str, str] | None = None,
                 sealed: Sequence[str] = ()):  # fmt: skip
        """files: path -> content. tools: names or letters that are on (None: all). strict: see `bind`. check:
        the source for the tool `check`. pages: title or address -> text, all that `web_search` sees. sealed:
        standard modules whose source the workspace must not show (a Memory shows none anyway)."""
        self.tools = frozenset(TOOLS if tools is None else (find(name).name for name in tools))
        self.strict, self.check_program, self.limits, self.pages = strict, check, limits, pages
        self.sealed = tuple(sealed)
        self.todos: dict[str, bool] = {}  # item -> done
        self._closed = False
        self._open({path: as_file(path, value) for path, value in sorted(files.items())})

    def call(self, tool: str, args: Mapping[str, object] | Sequence[object] = ()) -> Result:
        """One tool call, by name or letter, with named or positional arguments: always one result. Raises
        ValueError after `close`, and in a Sandbox SandboxDied."""
        if self._closed:
            raise ValueError("this workspace is closed")
        found = (TOOLS.get(tool) or _BY_LETTER.get(tool)) if isinstance(tool, str) else None
        try:
            if found is None or found.name not in self.tools:
                raise ToolError(f"no tool {ascii(tool)[:40]}")
            values = bind(found, args, self.strict)
            if found.name in FILE_TOOLS:
                return self._file_tool(found.name, values)
            return getattr(self, "_" + found.name)(*values)
        except (ToolError, TooBig) as error:
            return Result(False, f"!{error}")

    def _check(self) -> Result:
        if self.check_program is None:
            raise ToolError("no check")
        result = self.check(self.check_program)
        return Result(result.ok, cut(result.text, self.limits.output))

    def _search(self, query: str) -> Result:
        hits = rank(query, self.snapshot().texts())
        return Result(True, "\n".join(f"{show_name(name)}:{show(line)}" for name, line in hits))

    def _todo(self, item: str | None, done: int | None) -> Result:
        if item is None:
            lines = "\n".join(show_name(item) for item, done in self.todos.items() if not done)
            return Result(True, cut(lines, self.limits.output))
        if done and item not in self.todos:
            raise ToolError("no such item")
        self.todos[item] = bool(done)
        return Result(True, "ok")

    def _web_search(self, query: str) -> Result:
        """The egress policy, closed by default: only pages that the task supplies can be seen."""
        if self.pages is None:
            raise ToolError("refused: no network, and this task has no pages")
        host = re.search(r"https?://([^/\s]+)", query)
        if host and not any(host[1] in name for name in self.pages):
            raise ToolError(f"refused: no network, and this task has no page of {show_name(host[1])[:80]}")
        return Result(True, "\n".join(f"{name}: {line}" for name, line in rank(query, self.pages)))

    def fork(self):
        """A new workspace with the same files, settings, to-do list; then they go separate ways."""
        twin = type(self)(self.snapshot(), tools=tuple(self.tools), strict=self.strict, limits=self.limits,
                          check=self.check_program, pages=self.pages, sealed=self.sealed)  # fmt: skip
        twin.todos.update(self.todos)
        return twin

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Memory(Workspace):
    """Files in a dict. Nothing that the model wrote is executed, so it is safe on every system: `run` is
    refused, and `check` runs the task author's program in this process, with the files as data."""

    def _open(self, files: Mapping[str, File]) -> None:
        self._store = Dict(files, self.limits)

    def _file_tool(self, name: str, args: list) -> Result:
        return Result(*file_tool(self._store, name, args))

    def _run(self, command: str) -> Result:
        raise ToolError("no shell here")

    def check(self, source: str) -> Result:
        """What main(files) of `source`, the task author's trusted program, returns."""
        return Result(*run_check(source, self.snapshot().texts()))

    def snapshot(self) -> Snapshot:
        """All files as they are now."""
        files = self._store.files
        full = {"", *(posixpath.dirname(path) for path in files)}
        return Snapshot(sorted((p, f) for p, f in files.items() if f != FOLDER or p not in full))

    def close(self) -> None:
        """Refuses further calls; there is nothing to release."""
        self._closed = True


# ---- 5. Frames on a socket: a line of JSON [object, size of what follows], then those bytes. Never pickle

MOST_HEADER = 8 << 20


def send(fd: int, value: object, payload: bytes = b"") -> None:
    write_all(fd, json.dumps([value, len(payload)]).encode() + b"\n" + payload)


def receive(fd: int, most: int, seconds: float = math.inf) -> tuple[object, bytes]:
    """The next frame, with a payload of at most `most` bytes. The sender may be hostile: any other shape and
    bytes beyond the frame (each side speaks once and waits) are a ValueError, silence is an OSError."""
    data, end, value, size = bytearray(), math.inf, None, 0
    deadline = time.monotonic() + seconds
    while len(data) < end:
        chunk = os.read(fd, 1 << 16 if data else 1 << 12)  # most frames are small
        if not chunk:
            raise EOFError("the other side closed")
        seen = len(data)
        data += chunk
        if end == math.inf and (at := data.find(b"\n", seen)) >= 0:
            value, size = json.loads(data[:at].decode())
            if type(size) is not int or not 0 <= size <= most:
                raise ValueError("payload of a wrong size")
            end = at + 1 + size
        if len(data) > min(end, MOST_HEADER + most) or time.monotonic() > deadline:
            raise ValueError("answer too long")
    return value, bytes(data[end - size:])


def receive_fds(control: socket.socket) -> tuple[bytes, list[int]]:
    """(message, descriptors sent with it). socket.recv_fds of Python 3.11 ignores its flags, and without
    close-on-exec every command would inherit the tool server's socket."""
    message, extra, _, _ = control.recvmsg(1 << 16, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    return message, [fd for _, _, data in extra for (fd,) in struct.iter_unpack("i", data)]


def pack(files: Mapping[str, File]) -> tuple[list, bytes]:
    """Files -> ([path, mode, size] of each, all their bytes)."""
    index = [[path, file.mode, len(file.data)] for path, file in files.items()]
    return index, b"".join(file.data for file in files.values())


def unpack(index: list, payload: bytes) -> Snapshot:
    """The other way. The sender may be hostile: what is no such list is a ValueError or TypeError."""
    files, at = {}, 0
    for path, mode, size in index:
        if [type(path), type(mode), type(size)] != [str, int, int] or _NO_BYTE.search(path):
            raise ValueError("wrong entry in a snapshot")
        if not 0 <= size <= len(payload) - at or not 0 <= mode < 1 << 16:
            raise ValueError("wrong number in a snapshot")
        files[path] = as_file(path, File(payload[at:at + size], mode))
        at += size
    return Snapshot(sorted(files.items()))


# ---- 6. Inside: kernel calls that Python 3.11 lacks, the filter, the root, the zygote, the tool server ---

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE = 1, 2, 4, 1 << 12, 1 << 14, 1 << 18  # flags of mount(2)
PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS = 1, 4, 22, 38  # of prctl(2)
SPARE_UID = 64998  # who a workspace is if the trainer is root: root is exempt from the limit on processes
_C = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter lock: the zygote has one thread

# Refused with EPERM: name -> number on (x86_64, aarch64). `socket` covers vsock, which a network namespace
# does not hold; bind and connect would make half a socketpair a mailbox with an abstract name; memfd and
# shared memory escape the limits, io_uring the filter; at a FIFO (mknod) readers hang.
DENIED = {
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51),
    "pivot_root": (155, 41), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "mknod": (133, 33),
    "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "personality": (135, 92), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "syslog": (103, 116), "fanotify_init": (300, 262), "quotactl": (179, 60),
    "acct": (163, 89),
}  # fmt: skip


def filter_program(machine: str) -> bytes:
    """The seccomp filter as classic BPF. An instruction is (code, skip if true, skip if false, constant). It
    can load: at 0 the number of the call, at 4 the architecture, at 16 and 24 halves of two arguments."""
    column = ("x86_64", "aarch64").index(machine)
    arch, clone, prlimit, pair = ((0xC000003E, 56, 302, 53), (0xC00000B7, 220, 261, 199))[column]
    load, equal, at_least, has_bit, keep, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x80000000)
    eperm, enosys = (give, 0, 0, 0x50000 | errno.EPERM), (give, 0, 0, 0x50000 | errno.ENOSYS)
    code = [(load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 1 << 30), kill]  # x32: the same calls under other numbers
    code += [(equal, 0, 1, 435), enosys]  # clone3 hides its flags; libc falls back to clone
    for call, *test in (
        (clone, (load, 0, 0, 16), (has_bit, 0, 1, 0x7E020000)),  # no new namespaces
        (prlimit, (load, 0, 0, 16), (equal, 1, 0, 0)),  # only of oneself, not of the tool server
        # streams (1) only: a datagram socket loses its partner when that is closed, and gets a name by itself
        (pair, (load, 0, 0, 24), (keep, 0, 0, 0xF), (equal, 1, 0, 1)),
    ):
        code += [(equal, 0, len(test) + 2, call), *test, eperm, allow]
    code += [(equal, len(DENIED) - i, 0, numbers[column]) for i, numbers in enumerate(DENIED.values())]
    return b"".join(struct.pack("HBBI", *line) for line in [*code, allow, eperm])


def libc(step: str, name: str, *args: object) -> None:
    """Call a C function; OSError(errno, step) if it fails. getattr, unlike indexing, keeps what it found."""
    if getattr(_C, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), step)


def trouble(error: OSError) -> list:
    """[step, errno] of a failed set-up, for SandboxUnavailable at the other end."""
    return [f"{error.strerror} {error.filename or ''}".strip(), error.errno or 0]


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    strings = [os.fsencode(text) for text in (source, target, kind, options)]
    step = f"mount {kind or source} on {target}"
    libc(step, "mount", *strings[:3], ctypes.c_ulong(flags), strings[3])


def hide(path: str) -> None:
    """An empty folder over a folder; over a file /dev/null, which the import system takes for no module."""
    if os.path.isdir(path):
        mount("hidden", path, "tmpfs", RDONLY | NOSUID | NODEV, "size=4k,mode=755")
    elif os.path.exists(path):
        mount("/dev/null", path, "", BIND)


def write_proc(proc: int, name: str, text: str) -> None:
    """Write a file of /proc through the descriptor of a /proc that the tree no longer holds."""
    fd = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"write /proc/{name}") from None
    finally:
        os.close(fd)


def unshare(proc: int, flags: int, inside: int) -> None:
    """Leave these namespaces. A new user namespace has one user, this one, under the number `inside`."""
    uid, gid = os.geteuid(), os.getegid()  # asked before, as afterwards they are not mapped
    libc("unshare(user, ...)" if flags & NEWUSER else "unshare(mount, pid, net, ...)", "unshare", flags)
    if flags & NEWUSER:
        write_proc(proc, "self/setgroups", "deny")  # the price of mapping a group without privileges
        write_proc(proc, "self/uid_map", f"{inside} {uid} 1")
        write_proc(proc, "self/gid_map", f"{inside} {gid} 1")


PREFIX = os.path.realpath(sys.base_prefix)
LIBRARY = f"{PREFIX}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
HIDDEN = ("site-packages", "test", "ensurepip", "idlelib", "lib2to3", "pydoc_data")  # of the library
ENVIRONMENT = {"PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp",
               "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}  # fmt: skip


def build_root() -> None:
    """The root that all workspaces share, read-only: programs, libraries, this Python, three devices."""
    base = "/proc"  # a folder that surely exists; its descriptor was taken before
    mount("none", "/", "", REC | PRIVATE)  # nothing from here on reaches the host's own tree of mounts
    mount("root", base, "tmpfs", NOSUID, "mode=755,size=1m")
    for name in ("usr", "dev", "etc", "tmp", ROOT[1:]):
        os.mkdir(f"{base}/{name}")
    # paths stay what they are outside, so that the interpreter and its libraries need not notice the move
    tops = [f"{top}/{name}" for top in ("", "/usr") for name in ("bin", "sbin", "lib", "lib32", "lib64")]
    for path in (*tops, "/usr/libexec", "/etc/alternatives", PREFIX):
        if os.path.islink(path):
            os.symlink(os.readlink(path), base + path)
        elif os.path.isdir(path) and not os.path.exists(base + path):
            os.makedirs(base + path)
            mount(path, base + path, "", BIND | REC)
    for name in ("null", "zero", "urandom"):
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{name}", f"{base}/dev/{name}", "", BIND)
    # packages may hold anything, and a second standard library would undo `sealed`
    others = [f"/usr/lib/{name}" for name in os.listdir("/usr/lib") if name.startswith("python")]
    for path in [f"{LIBRARY}/{name}" for name in HIDDEN] + [path for path in others if path != LIBRARY]:
        if os.path.isdir(base + path):
            hide(base + path)
    os.chdir(base)
    # mount(2) with a remount flag would leave the mounts below writable
    attributes = struct.pack("QQQQ", RDONLY | NOSUID, 0, 0, 0)
    libc("mount_setattr", "syscall", 442, -100, b".", 0x8000, attributes, 32)  # 0x8000: and all mounts below
    # not chroot: there one cannot make user namespaces. The old root ends up over the new one, and is let go
    libc("pivot_root", "syscall", {"x86_64": 155, "aarch64": 41}[platform.machine()], b".", b".")
    libc("umount2 of the old root", "umount2", b".", 2)  # 2: detach
    os.chdir("/")


def may_drop() -> bool:
    """Is this root, with the spare user to become? Root among a single user is an ordinary user."""
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return os.geteuid() == 0 and any(first <= SPARE_UID < first + count for first, _, count in ranges)


def become_zygote(control: socket.socket) -> tuple[int, int, bool]:
    """Enter the outer namespaces, build the root: (descriptor of /proc, own pid namespace, is it root?)."""
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing inside can hit PID 1 with a signal without handler
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    proc, root = os.open("/proc", os.O_PATH), may_drop()
    write_proc(proc, "self/oom_score_adj", "1000")  # short of memory, the kernel takes a workspace
    unshare(proc, NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | (0 if root else NEWUSER), 0)
    child = os.fork()
    if child:  # stays as the parent of PID 1, so that the trainer has one child to wait for
        control.close()
        os.waitpid(child, 0)
        os._exit(0)
    own_pids = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)
    socket.sethostname("workspace")
    build_root()
    if root:  # the user is changed only in each child: this process still needs its rights for namespaces
        os.setgroups([])
        os.setresgid(SPARE_UID, SPARE_UID, SPARE_UID)
    libc("prctl", "prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last, as a change of user or group clears it
    return proc, own_pids, root


def zygote(control_fd: int) -> None:
    """Main of the process that forks workspaces. It ends with the trainer and, as PID 1, takes all along."""
    control = socket.socket(fileno=control_fd)
    try:
        proc, own_pids, root = become_zygote(control)
        control.send(b"[]")
    except OSError as error:
        control.send(json.dumps(trouble(error)).encode())
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workspaces
    # what checks import: the library, then (last, lest they stand in for it) the files of the workspace
    sys.path[:] = [path for path in sys.path if path.startswith(PREFIX)] + [ROOT]
    program = ctypes.create_string_buffer(filter_program(platform.machine()))
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, pages that the workspaces share
    while True:
        message, fds = receive_fds(control)
        if not message:
            os._exit(0)
        try:
            limits, sealed = json.loads(message)
            child = fork_into_pids(own_pids)
            if not child:
                control.close()
                os.close(own_pids)
                enter(fds[0], proc, root, Limits(**limits), sealed, program)
            handle = os.pidfd_open(child)  # unlike its number, this never comes to mean another process
            socket.send_fds(control, [b"[]"], [handle])
            os.close(handle)
        except OSError as error:
            control.send(json.dumps(trouble(error)).encode())
        os.close(fds[0])


def fork_into_pids(own_pids: int) -> int:
    """fork() whose child is PID 1 of a new namespace. unshare(pid) moves only the children to come, so this
    process can return to its own afterwards, and one fork does where two are usual."""
    libc("unshare(pid)", "unshare", NEWPID)
    child = -1
    try:
        child = os.fork()
        return child
    finally:
        if child:
            libc("setns(pid)", "setns", own_pids, NEWPID)


def enter_namespaces(proc: int, root: bool, limits: Limits) -> None:
    """A user and a mount namespace of its own, with two empty folders to write in. The user namespace gives
    the right to mount, and in each one RLIMIT_NPROC counts anew. Network, IPC and host name are the zygote's
    for all workspaces: the filter leaves them no call by which to meet there."""
    if root:
        os.setresuid(SPARE_UID, SPARE_UID, SPARE_UID)
        libc("prctl", "prctl", DUMPABLE, 1, 0, 0, 0)  # setresuid cleared it, and then root owns self/uid_map
    unshare(proc, NEWUSER | NEWNS, 1000)
    for path in (ROOT, "/tmp"):
        options = f"size={limits.disk},nr_inodes={limits.inodes},mode=755"
        mount("tmpfs", path, "tmpfs", NOSUID | NODEV, options)


def enter(sock: int, proc: int, root: bool, limits: Limits, sealed: list[str], program: ctypes.Array) -> None:
    """PID 1 of a new workspace: take on its namespaces, give up everything else, serve. Never returns."""
    try:
        _C.signal(signal.SIGCHLD, 0)  # default again, or waitpid would find nobody
        enter_namespaces(proc, root, limits)
        os.close(proc)
        for path in sealed:
            hide(path)
        os.chdir(ROOT)
        for what, most in (("NPROC", limits.processes), ("AS", limits.memory), ("NOFILE", limits.open_files),
                           ("FSIZE", limits.file_size), ("MEMLOCK", 0), ("MSGQUEUE", 0)):  # fmt: skip
            resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most))
        # last, as all before needs rights: no capability now, none through a program file, then the filter
        libc("capset", "capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        libc("no_new_privs", "prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        where = struct.pack("HxxxxxxQ", (len(program) - 1) // 8, ctypes.addressof(program))
        libc("seccomp", "prctl", SECCOMP, 2, where, 0, 0)
        Server(sock, limits).serve()
    except OSError as error:
        send(sock, [False, trouble(error)])
    finally:
        os._exit(1)


NEEDED = {stat.S_IFDIR: 0o700, stat.S_IFREG: 0o400}  # permissions without which one's own cannot be read


class Server:
    """PID 1 inside: answers one request at a time, and after each command is alone again. Each do_ method
    answers [ok, text or index] and the bytes that follow."""

    def __init__(self, sock: int, limits: Limits):
        self.sock, self.limits, self.store = sock, limits, Disk(limits)
        self.nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)  # commands give way to the trainer

    def serve(self) -> None:
        """Until the trainer closes its end."""
        while True:
            try:
                (name, *args), payload = receive(self.sock, 1 << 30)
            except EOFError:
                return
            answer = getattr(self, "do_" + name)(payload, *args)
            send(self.sock, *answer if isinstance(answer, tuple) else (answer,))

    def do_tool(self, _: bytes, name: str, args: list) -> list:
        """A file tool. `grep` has one second of CPU time: its pattern may be a bomb (`re` minds signals)."""

        def too_slow(*_: object) -> None:
            raise ToolError(TOO_SLOW)

        if name != "grep":
            return file_tool(self.store, name, args)
        try:
            signal.signal(signal.SIGPROF, too_slow)
            signal.setitimer(signal.ITIMER_PROF, 1.0)
            try:
                return file_tool(self.store, name, args)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except ToolError as error:  # the alarm came just after the last match
            return [False, f"!{error}"]
        finally:  # no handler is left while commands run: with one, they could hit PID 1
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def do_put(self, payload: bytes, index: list) -> list:
        """Write the first files. Folders get permissions last, or they might refuse their own content."""
        at, folders, made = 0, [], {""}
        try:
            for path, mode, size in index:
                data, at = payload[at:at + size], at + size
                make_folders(path if stat.S_ISDIR(mode) else posixpath.dirname(path), made)
                if stat.S_ISDIR(mode):
                    folders.append((path, mode))
                elif stat.S_ISLNK(mode):
                    os.symlink(data, path)
                else:
                    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                    write_all(fd, data)
                    if stat.S_IMODE(mode) != 0o644:
                        os.fchmod(fd, stat.S_IMODE(mode))
                    os.close(fd)
            for path, mode in reversed(folders):
                os.chmod(path, stat.S_IMODE(mode))
            return [True, ""]
        except OSError as error:
            return [False, _SHORT.get(error.errno, str(error))]

    def files(self) -> Snapshot:
        """All that is here. What was made unreadable is read all the same: hiding must not pay at grading."""
        files, pending, lent, size, names = {}, [""], [], 0, 0
        try:
            while pending:
                path = pending.pop()
                info = os.lstat(path or ".")
                mode, kind, data = info.st_mode, stat.S_IFMT(info.st_mode), b""
                size, names = size + info.st_size, names + len(path)
                if size > self.limits.disk + (1 << 20) or names > MOST_HEADER // 8:
                    raise TooBig  # sparse files and hard links take no room here, but would out there
                if (need := NEEDED.get(kind, 0)) & ~mode:
                    os.chmod(path or ".", stat.S_IMODE(mode) | need)
                    lent.append((path or ".", mode))
                if kind == stat.S_IFDIR:
                    inside = [posixpath.join(path, name) for name in os.listdir(path or ".")]
                    pending += inside
                    if not path or (inside and mode == FOLDER.mode):
                        continue  # follows from the files in it
                elif kind == stat.S_IFLNK:
                    data = os.fsencode(os.readlink(path))
                elif kind == stat.S_IFREG:
                    data = self.store.load(path)
                else:
                    continue
                files[path] = File(data, mode)
        finally:
            for path, mode in reversed(lent):
                os.chmod(path, stat.S_IMODE(mode))
        return Snapshot(sorted(files.items()))

    def do_snapshot(self, _: bytes) -> tuple[list, bytes]:
        try:
            index, payload = pack(self.files())
            return [True, index], payload
        except (TooBig, MemoryError, OSError):
            return [False, []], b""

    def do_run(self, _: bytes, command: str) -> list:
        """A shell command. The shell sets its own limit on CPU time: there is no moment without it."""
        if "\0" in command:
            return [False, "!args command"]
        reader, writer = os.pipe()
        line = ["sh", "-c", f"ulimit -t {self.limits.cpu}; {command}"]
        wiring = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_DUP2, writer, 2)]
        try:  # posix_spawn copies no page tables. Python ignores two signals that programs rely on
            pid = os.posix_spawn("/bin/sh", line, os.environ, file_actions=wiring, setsid=True,
                                 setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])  # fmt: skip
            os.setpriority(os.PRIO_PROCESS, pid, self.nice)
        except OSError as error:
            os.close(reader)
            return [False, f"!{os.strerror(error.errno).lower()}"]
        finally:
            os.close(writer)
        output, wrong = self.collect(pid, reader, self.limits.output)
        return [False, f"!{wrong}\n{show(output)}"] if wrong else [True, show(output)]

    def do_check(self, _: bytes, source: str) -> list:
        """The author's program in a fork of this warm process: no start of Python to pay for."""
        try:
            files = self.files().texts()  # read here, where no page has to be copied for it
        except (TooBig, MemoryError, OSError):
            return [False, "!too big"]
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(self.sock)
                os.close(reader)
                os.setsid()
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
                resource.setrlimit(resource.RLIMIT_CPU, (self.limits.cpu, self.limits.cpu))
                write_all(writer, json.dumps(run_check(source, files)).encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        output, wrong = self.collect(pid, reader, 8 * MOST_CHECK)
        try:
            answer = checked(json.loads(output), str)
        except (ValueError, TypeError, RecursionError):  # it left early, or what it ran wrote here
            answer = [False, "!exit 0"]
        return [False, f"!{wrong}"] if wrong else answer

    def collect(self, pid: int, reader: int, most: int) -> tuple[bytes, str]:
        """(output of a child: head, true size, tail; what went wrong or ""). Until the child ends or time is
        up; then kills what is left, as a daemon may hold the pipe open, and only then reads to the end."""
        kept, total, half = bytearray(), 0, most // 2

        def read() -> int:
            nonlocal total
            chunk = os.read(reader, 1 << 16)
            kept.extend(chunk)
            total += len(chunk)
            if total > most:
                del kept[half:len(kept) - half]
            return len(chunk)

        watch, poll, deadline = os.pidfd_open(pid), select.poll(), time.monotonic() + self.limits.wall
        poll.register(reader, select.POLLIN)
        poll.register(watch, select.POLLIN)
        ready: dict[int, int] = {}
        while watch not in ready and (left := deadline - time.monotonic()) > 0:
            ready = dict(poll.poll(left * 1000))
            if reader in ready and watch not in ready and not read():
                poll.unregister(reader)
        code = os.waitstatus_to_exitcode(kill_all(pid))
        while read():  # nobody is left to write, so this ends
            pass
        os.close(reader)
        os.close(watch)
        if total > most:
            kept[half:half] = f"\n[{2 * half} of {total} bytes]\n".encode()
        wrong = f"exit {code}" if code > 0 else f"signal {-code}" if code else ""
        return bytes(kept), wrong if watch in ready else f"timeout {self.limits.wall:g} s"


def kill_all(pid: int) -> int:
    """Kill all but PID 1, reap them; the exit status of `pid`."""
    status = os.waitpid(pid, os.WNOHANG)[1]  # before the kill, for the true status
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            found, code = os.waitpid(-1, 0)  # orphans too: they are given to PID 1
        except ChildProcessError:
            return status
        status = code if found == pid else status


def checked(answer: object, *kinds: type) -> list:
    """[ok, value] with a value of one of these types; ValueError or TypeError if that is not its shape."""
    ok, value = answer
    if type(ok) is not bool or type(value) not in kinds:
        raise ValueError("answer of a wrong shape")
    if type(value) is str:
        value.encode()  # a ValueError if it is no text
    return [ok, value]


# ---- 7. Outside: the trainer's side ----------------------------------------------------------------------


def unavailable(step: str, number: int) -> RuntimeError:
    """The exception for a failed set-up: the machine is full for now, or it refuses at all."""
    if number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return Overloaded(f"no new workspace: {step}: {os.strerror(number)}")
    return SandboxUnavailable(step, number)


def alone(call: str) -> list[str]:
    """Command line of a Python that knows no packages and makes one call of this file. The folder comes last
    on its path, so that no file beside this one stands in for the standard library."""
    folder, name = os.path.split(os.path.abspath(__file__))
    code = f"import sys; sys.path.append({folder!r}); import {name[:-3]} as this; this.{call}"
    return [os.path.realpath(sys.executable), "-s", "-S", "-P", "-X", "utf8", "-c", code]


class Zygote:
    """The trainer's end of its zygote; one per process, started with the first workspace."""

    def __init__(self) -> None:
        import subprocess  # not above: the zygote imports this file too and stays small

        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            raise SandboxUnavailable(f"{sys.platform} on {platform.machine()}", errno.ENOSYS)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        self.lock, self.waiting, null = allocate_lock(), True, subprocess.DEVNULL
        line = alone(f"zygote({theirs.fileno()})")
        with theirs:
            self.process = subprocess.Popen(
                line, env=ENVIRONMENT, cwd="/", stdin=null, stdout=null, stderr=null, start_new_session=True,
                pass_fds=[theirs.fileno()])  # fmt: skip
        ours = weakref.ref(self.control)  # a forked child of the trainer must not keep the zygote alive
        os.register_at_fork(after_in_child=lambda: ours() and ours().close())
        self.answer()

    def answer(self) -> list[int]:
        """Wait for the zygote; the descriptors that it sent."""
        try:
            message, fds = receive_fds(self.control)
            self.waiting = False
        except OSError:
            message = b""
        if not message:
            self.close()
            raise SandboxDied(f"the zygote died with exit code {self.process.returncode}")
        if problem := json.loads(message):
            raise unavailable(*problem)
        return fds

    def new(self, limits: Limits, sealed: Sequence[str]) -> tuple[int, int]:
        """A new workspace, in which these paths are hidden: (its socket, the pidfd of its PID 1)."""
        ours, theirs = socket.socketpair()
        timeout = struct.pack("ll", *divmod(int((limits.wall + limits.patience) * 1e6), 10**6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, timeout)
        with ours, theirs, self.lock:
            if self.waiting:  # Ctrl-C came between an order and its answer: out of step from now on
                self.close()
                raise SandboxDied("the zygote was interrupted")
            self.waiting = True
            order = json.dumps([vars(limits), sealed]).encode()
            socket.send_fds(self.control, [order], [theirs.fileno()])
            handles = self.answer()
            if not handles:  # the kernel drops a descriptor for which this process has no number left
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return ours.detach(), handles[0]

    def close(self) -> None:
        """End the zygote and every workspace it made."""
        self.control.close()
        self.process.kill()
        self.process.wait()


_zygotes: dict[int, Zygote] = {}  # process id -> Zygote, as a forked trainer needs its own
_zygotes_lock = allocate_lock()


def zygote_of_this_process() -> Zygote:
    """Started at the first use, and again should it have died."""
    with _zygotes_lock:
        mine = _zygotes.get(os.getpid())
        if mine is None or mine.control.fileno() < 0 or mine.process.poll() is not None:
            mine = _zygotes[os.getpid()] = Zygote()
        return mine


def end(sock: int, pidfd: int, owner: int) -> None:
    """Kill a workspace: SIGKILL to PID 1 of a pid namespace ends all in it. Waits until that is done."""
    if os.getpid() == owner:  # not in a forked child of the trainer: it does not own the workspace
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(10_000)
    os.close(pidfd)
    os.close(sock)


class Sandbox(Workspace):
    """Real shell and Python, isolated; see the head of the file. Raises SandboxUnavailable where the kernel
    refuses, SandboxDied or Overloaded after one retry, TooBig if the files exceed the limits."""

    def _open(self, files: Mapping[str, File]) -> None:
        self._lock, self._first = allocate_lock(), files
        self._log: list[tuple[tuple, list]] = []  # requests and answers since the start
        self._ran = False  # has a command run in here?
        self._hide = [path for module in self.sealed for path in sealed_paths(module)]
        try:
            self._start()
        except SandboxDied:
            time.sleep(0.1)
            self._start()

    def _start(self) -> None:
        """A fresh workspace with the first files."""
        try:
            sock, pidfd = zygote_of_this_process().new(self.limits, self._hide)
        except OSError as error:
            raise Overloaded(f"no new workspace: {error}") from None
        self._sock, self._end = sock, weakref.finalize(self, end, sock, pidfd, os.getpid())
        index, payload = pack(self._first)
        (good, why), _ = self._ask("put", index, payload=payload)
        if not good:
            self._drop()
            raise unavailable(*why) if type(why) is list else TooBig(f"the files do not fit: {why}")

    def _drop(self) -> None:
        """Kill the workspace and forget its descriptors, whose numbers may soon mean others."""
        self._end()
        self._sock = -1

    def _ask(self, *request: object, payload: bytes = b"", most: int = 0) -> tuple[list, bytes]:
        """One request and its answer. A command runs as the same user as the server, so its answers are not
        trusted: size, shape and silence are checked. A breach ends it, as does an interrupt in between."""
        kinds = {"put": (str, list), "snapshot": (list,)}.get(request[0], (str,))
        try:
            with suppress(BrokenPipeError):  # it may have said why before it went
                send(self._sock, request, payload)
            answer, blob = receive(self._sock, most, self.limits.wall + self.limits.patience)
            return checked(answer, *kinds), blob
        except BaseException as error:
            self._drop()
            if not isinstance(error, (OSError, EOFError, ValueError, TypeError, RecursionError)):
                raise
            raise SandboxDied(f"workspace lost: {type(error).__name__} {error}"[:200], self._ran) from None

    def _retry(self, *request: object, most: int = 0) -> tuple[list, bytes]:
        """Ask; should the workspace die, ask once more in a fresh one that has repeated all calls so far. If
        one of them is answered differently there, the state that the model has seen is lost."""
        with self._lock:
            if self._sock < 0:
                raise SandboxDied("this workspace has died before", self._ran)
            try:
                answer, blob = self._ask(*request, most=most)
            except SandboxDied:
                self._start()
                for old, answer in self._log:
                    if self._ask(*old)[0] != answer:
                        self._drop()
                        raise SandboxDied("workspace lost: its state cannot be restored", self._ran) from None
                answer, blob = self._ask(*request, most=most)
            if request[0] != "snapshot":
                self._log.append((request, answer))
            return answer, blob

    def _file_tool(self, name: str, args: list) -> Result:
        return Result(*self._retry("tool", name, args)[0])

    def _run(self, command: str) -> Result:
        self._ran = True
        return Result(*self._retry("run", command)[0])

    def check(self, source: str) -> Result:
        """What main(files) of `source`, the task author's trusted program, returns; in a warm fork inside."""
        self._ran = True  # it may well run what the model wrote
        return Result(*self._retry("check", source)[0])

    def snapshot(self) -> Snapshot:
        """All files as they are now: contents, permissions, links, odd names."""
        (good, index), payload = self._retry("snapshot", most=self.limits.disk + (2 << 20))
        if not good:
            raise TooBig(f"more than limits.disk = {self.limits.disk} bytes, or paths that are too long")
        try:
            return unpack(index, payload)
        except (ValueError, TypeError) as error:
            self._drop()
            raise SandboxDied(f"workspace lost: {error}", self._ran) from None

    def close(self) -> None:
        """Kill all that is in the workspace; its files go with it. Waits for a call that is under way."""
        with self._lock:
            self._closed = True
            self._drop()


def sealed_paths(module: str) -> list[str]:
    """Where a standard module lies: package, source, compiled files."""
    path, name = f"{LIBRARY}/{module.replace('.', '/')}", module.rsplit(".", 1)[-1]
    cache = f"{os.path.dirname(path)}/__pycache__/{name}.{sys.implementation.cache_tag}"
    return [path, f"{path}.py", *(f"{cache}{level}.pyc" for level in ("", ".opt-1", ".opt-2"))]


SELF_CHECK = '''
import os, socket, time
def bomb():
    for _ in range(200):
        if not os.fork():
            time.sleep(60)
def main(files):
    wrong = [] if os.getppid() == 1 else ["no process namespace"]
    for what, act in (("the network is open", socket.socket),
                      ("files of the host are visible", lambda: os.stat(files["marker"])),
                      ("the system can be written", lambda: open("/usr/bin/x", "w")),
                      ("processes are not limited", bomb)):
        try:
            act()
            wrong.append(what)
        except OSError:
            pass
    return "; ".join(wrong)
'''


def self_check() -> str:
    """Start a workspace and try its walls for real: "" or what is wrong. Raises SandboxUnavailable."""
    with Sandbox({"marker": os.path.abspath(__file__)}) as box:
        return box.check(SELF_CHECK).text


def auto(announce: Callable[[str], None] = print) -> type[Workspace]:
    """Sandbox where a real self-check passes, else Memory; says which and why."""
    try:
        wrong = self_check()
    except (SandboxUnavailable, SandboxDied) as error:
        wrong = str(error)
    announce(f"workspaces: Memory, as {wrong}" if wrong else "workspaces: Sandbox, its self-check passed")
    return Memory if wrong else Sandbox


# ---- 8. The demonstration and the measurements -----------------------------------------------------------

ATTACKS = {
    "network": "python3 -c 'import socket; socket.socket()' 2>&1 | tail -1",
    "host files": "ls -d /home /proc /sys /etc/passwd 2>&1 | tail -1",
    "write outside": "touch /usr/bin/x",
    "become root": "unshare -Ur true",
    "kill PID 1": "kill -9 1; kill -INT 1; echo still here",
    "fork bomb": "bomb() { bomb | bomb & }; bomb 2>&1 | head -1",
    "huge output": "yes | head -c 30000000 | wc -c",
    "full disk": "for i in 1 2 3 4 5; do head -c 15M /dev/zero > f$i; done 2>&1; rm f*",
    "daemon": "setsid sleep 60 & echo started",
    "sleep": "sleep 60",
}  # fmt: skip


def demo() -> None:
    """An edit in a fork, then the attacks."""
    kind = auto()
    check = "def main(files):\n    return 'pass' if '= 2' in files['src/a.py'] else 'want 2'"
    with kind({"src/a.py": "value = 1\n"}, check=check, limits=Limits(wall=1.5)) as box, box.fork() as twin:
        edit = ("e", "src/a.py", "= 1", "= 2")
        for tool, *args in (("g", "value"), edit, ("x",), edit, ("t", "tell the user")):
            print(f"  {find(tool).name:7}{args!s:33}{twin.call(tool, args).text!r}")
        print(f"  the fork says {twin.call('x').text!r}, the original {box.call('x').text!r}")
        for name, command in ATTACKS.items() if kind is Sandbox else ():
            start = time.monotonic()
            text = box.call("run", [command]).text.strip()
            print(f"  {name:15}{(time.monotonic() - start) * 1e3:7.0f} ms  {cut(text, 90)!r}")


def mean_ms(act: Callable[[], object], count: int = 1) -> float:
    """Milliseconds that it takes."""
    start = time.perf_counter()
    for _ in range(count):
        act()
    return (time.perf_counter() - start) / count * 1e3


def floors(count: int = 100) -> None:
    """Prints what no workspace and no call can beat, in milliseconds: fork and exit of a process like the
    zygote; the same with the namespaces; a byte there and back between processes. Needs its own process."""
    control, other = socket.socketpair()
    proc, own_pids, root = become_zygote(control)
    gc.freeze()

    def born(namespaces: bool) -> None:
        pid = fork_into_pids(own_pids) if namespaces else os.fork()
        if not pid:
            if namespaces:
                enter_namespaces(proc, root, Limits())
            os._exit(0)
        os.waitpid(pid, 0)

    forks = [mean_ms(lambda: born(False), count), mean_ms(lambda: born(True), count)]
    if not os.fork():
        while control.send(control.recv(1)):
            pass
    control.close()
    print([*forks, mean_ms(lambda: other.send(b"x") and other.recv(1), 10 * count)])


def bench() -> None:
    """Cycles and episodes from four threads, calls, memory, floors; the last line is one JSON object."""
    import statistics
    import subprocess
    from concurrent.futures import ThreadPoolExecutor

    files = {f"src/m{i}.py": f"value = {i}\n" * 20 for i in range(10)}
    check = "def main(files, names={}):\n    exec(files['src/m1.py'], names)\n    return str(names['value'])"
    turns = (("read", "src/m1.py"), ("read", "src/m2.py"), ("run", "grep -rn 'value = 3' src"),
             ("write", "src/m1.py", "value = 7\n"), ("check",))  # fmt: skip
    calls = (("read", ["src/m1.py"]), ("write", ["src/m1.py", "value = 1\n"]), ("ls",), ("grep", ["= 3"]))

    def cycle() -> None:
        Sandbox(files).close()

    def episode() -> None:
        with Sandbox(files, check=check) as box:
            assert all(box.call(tool, args).ok for tool, *args in turns)
            box.snapshot()

    def rate(act: Callable[[], None], count: int) -> float:
        with ThreadPoolExecutor(4) as pool:
            return 1e3 * count / mean_ms(lambda: list(pool.map(lambda _: act(), range(count))))

    def free_mb() -> float:  # the system's view: counts kernel memory too
        with open("/proc/meminfo") as file:
            return int(re.search(r"MemAvailable: +(\d+)", file.read())[1]) / 1024

    cycle()
    out = {"cycles_per_s": rate(cycle, 600), "episodes_per_s": rate(episode, 300)}
    with Sandbox(files) as box:
        out["tool_call_ms"] = statistics.median(mean_ms(lambda: box.call(*call)) for call in calls * 150)
    before = free_mb()
    boxes = [Sandbox(files) for _ in range(100)]
    out["mb_per_100"] = before - free_mb()
    for box in boxes:
        box.close()
    floor = subprocess.run(alone("floors()"), capture_output=True, check=True).stdout
    out |= zip(("fork_floor_ms", "namespace_floor_ms", "round_trip_floor_ms"), json.loads(floor), strict=True)
    for name, value in out.items():
        print(f"  {name:20}{value:9.3f}")
    share = out["cycles_per_s"] * out["namespace_floor_ms"] / 1e3
    print(f"  cycles are {share:.2f} of what fork and namespaces alone would do one after another")
    print(json.dumps({name: round(value, 3) for name, value in out.items()}))


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--bench"]):
        sys.exit(f"usage: python sandbox.py [--bench], not {' '.join(sys.argv[1:])}")
    bench() if sys.argv[1:] else demo()
