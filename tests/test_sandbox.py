"""sandbox.py by property: walls that hold, two environments that answer alike, faults told apart."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sandbox as sb
from sandbox import File, Limits, Memory, Sandbox, Snapshot

HOME = Path(sb.__file__).resolve().parent
# Skipped only where the kernel itself refuses namespaces, asked without any code of ours: a wall that is
# missing and a set-up that breaks have to fail here.
ASK = "import ctypes; assert not ctypes.CDLL(None).unshare(0x70020000)"  # user, pid, net, mount
KERNEL = subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=False)
isolated = pytest.mark.skipif(KERNEL.returncode != 0, reason="this kernel refuses user namespaces")
BOTH = [Memory, pytest.param(Sandbox, marks=isolated)]
QUICK = Limits(wall=2.0, cpu=2)


@pytest.fixture(scope="module")
def shared():
    """One workspace for probes that leave nothing behind."""
    with Sandbox({"a.txt": "one\n"}, limits=QUICK) as box:
        yield box


def run(box: Sandbox, command: str) -> str:
    return box.call("run", [command]).text


def python(box: Sandbox, code: str) -> str:
    """Output of a cold Python inside; the code must hold no single quotes."""
    code = textwrap.dedent(code)
    assert "'" not in code
    return run(box, f"python3 -I -S -c '{code}'")


def eventually(condition, seconds: float = 10.0) -> bool:
    """Does it come true in time?"""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# ---- registry, arguments ---------------------------------------------------------------------------------


def test_schemas_are_valid_function_calling():
    found = sb.schemas(list(sb.TOOLS))
    assert [s["function"]["name"] for s in found] == list(sb.TOOLS)
    assert all(s["type"] == "function" for s in found)
    edit = sb.schemas(["e"])[0]["function"]["parameters"]
    assert edit["required"] == ["path", "old", "new"] and edit["additionalProperties"] is False
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(ValueError, match="no tool 'x9'"):
        sb.schemas(["x9"])


def test_letters_are_the_fixed_ones():
    letters = {name: tool.letter for name, tool in sb.TOOLS.items()}
    assert letters == dict(read="r", grep="g", edit="e", write="w", ls="l", check="x", run="b", search="s",
                           todo="t", web_search="u")  # fmt: skip


STRICT = [  # tool, arguments, ok when strict, ok when lenient
    ("read", ["a"], True, True),
    ("read", {"path": "a"}, True, True),
    ("read", ["a", "1", "1"], True, True),  # digits from a text protocol
    ("read", {"path": "a", "start": "1"}, False, True),
    ("read", {"path": "a", "start": None}, True, True),
    ("read", {"path": "a", "start": -1}, False, False),
    ("read", {"path": "a", "start": True}, False, False),
    ("read", {"path": "a", "zzz": 1}, False, True),
    ("read", ["a", "1", "1", "1"], False, True),
    ("read", [], False, False),
    ("read", {}, False, False),
    ("read", {"path": None}, False, False),
    ("read", {"path": ["a"]}, False, False),
    ("read", "a", False, False),
    ("read", 5, False, False),
    ("read", ["a\0b"], False, False),
    ("read", ["\ud800"], False, False),  # a surrogate that stands for no byte
    ("write", {"path": "n", "text": 5}, False, True),
    ("edit", ["a", "", "x"], False, False),
]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("strict", [True, False])
def test_arguments_are_checked(kind, strict):
    with kind({"a": "1\n"}, strict=strict) as box:
        for tool, args, *ok in STRICT:
            result = box.call(tool, args)
            assert result.ok == ok[not strict], (tool, args, result)
            assert result.ok or result.text.startswith("!args"), result


@pytest.mark.parametrize("kind", BOTH)
def test_tools_can_be_switched_off(kind):
    with kind({"a": "1"}, tools=["read", "l"]) as box:
        assert box.call("r", ["a"]).text == "1" and box.call("ls").text == "a"
        for tool in ("edit", "b", "nope", "", None, 3):
            result = box.call(tool, ["a", "1", "2"])
            assert not result.ok and result.text.startswith("!no tool")
    with pytest.raises(ValueError, match="closed"):
        box.call("r", ["a"])


# ---- tools, two kinds ------------------------------------------------------------------------------------

CONTRACT = [  # in order, on {"a": "x=1\ny=1\n", "d/b": "\t1\r\n2", "bin": NUL}
    ("r", ["a"], "x=1\ny=1\n"),
    ("r", ["./d/../a"], "x=1\ny=1\n"),
    ("r", ["/workspace/a"], "x=1\ny=1\n"),
    ("r", ["a", 2, 1], "y=1\n"),
    ("r", ["nope"], "!no file"),
    ("r", ["d"], "!is a folder"),
    ("r", ["a/b"], "!not a folder"),
    ("r", ["bin"], "!binary 3 bytes"),
    ("r", ["../etc/passwd"], "!outside"),
    ("r", ["/etc/passwd"], "!outside"),
    ("r", ["/workspace2/a"], "!outside"),
    ("e", ["a", "x=1", "x=2"], "ok"),
    ("e", ["a", "=3", "=4"], "!0 matches"),
    ("e", ["a", "=", "-"], "!2 matches"),
    ("e", ["a", "x", "x"], "!same"),
    ("e", ["nope", "x", "y"], "!no file"),
    ("e", ["d/b", "1", "3"], "ok"),
    ("r", ["d/b"], "\t3\r\n2"),
    ("w", ["n/e/w", "aaa"], "ok"),
    ("e", ["n/e/w", "aa", "b"], "!2 matches"),  # overlapping
    ("w", ["d", "x"], "!is a folder"),
    ("w", ["a/b", "x"], "!not a folder"),
    ("w", [".", "x"], "!is a folder"),
    ("w", ["n" * 300, "x"], "!name too long"),
    ("l", [], "a\nbin\nd/\nn/"),
    ("l", ["d"], "b"),
    ("l", ["a"], "!not a folder"),
    ("l", ["nope"], "!no folder"),
    ("g", ["="], "a:x=2\na:y=1"),
    ("g", ["=", "d"], ""),
    ("g", ["^.$", ".", 1], "d/b:2:2"),
    ("g", ["=", "nope"], "!no file"),
    ("g", ["("], "!pattern: missing ), unterminated subpattern at position 0"),
    ("g", ["(a+)+$"], None),
    ("x", [], "!no check"),
    ("t", ["buy milk"], "ok"),
    ("t", ["go home"], "ok"),
    ("t", ["go home", 1], "ok"),
    ("t", ["nope", 1], "!no such item"),
    ("t", [], "buy milk"),
    ("s", ["y"], "a:y=1"),
    ("u", ["anything"], "!refused: no network, and this task has no pages"),
]


@pytest.mark.parametrize("kind", BOTH)
def test_contract(kind):
    with kind({"a": "x=1\ny=1\n", "d/b": "\t1\r\n2", "bin": b"\0=1"}) as box:
        for tool, args, text in CONTRACT:
            result = box.call(tool, args)
            if text is not None:
                assert result.text == text, (tool, args)
                assert result.ok == (not text.startswith("!"))


@pytest.mark.parametrize("kind", BOTH)
def test_a_path_of_many_folders_is_a_path_like_any_other(kind):
    """A server that dies of a model's path would pass for the machine's fault."""
    deep = "a/" * 1000 + "f"
    with kind({"a/b": "1"}) as box:
        assert box.call("w", [deep, "x"]).text == "ok" and box.call("r", [deep]).text == "x"
        with box.fork() as twin:
            assert twin.call("r", [deep]).text == "x" and twin.snapshot() == box.snapshot()


@pytest.mark.parametrize("kind", BOTH)
def test_long_answers_are_cut_and_say_so(kind):
    with kind({"a": "0123456789" * 100}, limits=Limits(output=100)) as box:
        assert box.call("r", ["a"]).text == "0123456789" * 10 + "\n[100 of 1000 bytes]"
        box.call("w", ["b", "line\n" * 400])
        text = box.call("g", ["line"]).text
        assert text.startswith("b:line\nb:line") and "\n[100 of " in text and len(text) < 200


@pytest.mark.parametrize("kind", BOTH)
def test_edit_changes_only_the_match(kind):
    rng = random.Random(0)
    with kind() as box:
        for _ in range(30):
            data = bytes(rng.choice(b"ab\t\r\n\xff\xc3\xa9 ") for _ in range(rng.randrange(1, 60)))
            i = rng.randrange(len(data))
            old = data[i:i + rng.randrange(1, 12)]
            new = bytes(rng.choice(b"xyz\xe9") for _ in range(rng.randrange(4)))
            box.call("w", ["f", os.fsdecode(data)])
            result = box.call("e", ["f", os.fsdecode(old), os.fsdecode(new)])
            places = [j for j in range(len(data)) if data.startswith(old, j)]
            after = data[:i] + new + data[i + len(old):] if len(places) == 1 else data
            assert result.ok == (len(places) == 1) and box.snapshot()["f"].data == after


@pytest.mark.parametrize("kind", BOTH)
def test_check_runs_the_authors_program(kind):
    with kind({"a": "1", "d/b": b"\xff"}, check="def main(f): return str(sorted(f.items()))") as box:
        assert box.call("x").text == str([("a", "1"), ("d/b", "\udcff")])
        assert box.check("def main(f): return 'n' * 20000").text == "n" * 20000  # not cut
        for source, text in [("def main(f): return 1 / 0", "!ZeroDivisionError: division by zero"),
                             ("def main(f): raise SystemExit(3)", "!SystemExit: 3"),
                             ("def main(f): return 5", "!TypeError: main must return a text"),
                             ("x = 1", "!KeyError: 'main'"),
                             ("def main(f: return", "!SyntaxError: ")]:  # fmt: skip
            result = box.check(source)
            assert not result.ok and result.text.startswith(text), result


@pytest.mark.parametrize("kind", BOTH)
def test_search_ranks_by_rare_words(kind):
    files = {f"m{i}.py": "def get_value(self):\n    return self\n" for i in range(8)}
    files["cache.py"] = "import os\ndef evictOldest(self):\n    return self\n"
    with kind(files) as box:
        assert box.call("s", ["where is the oldest entry evicted, oldest self"]).text.split("\n")[0] == (
            "cache.py:def evictOldest(self):")
        assert box.call("s", ["zzz"]).text == ""


def test_web_search_sees_only_the_tasks_pages():
    pages = sb.documentation(["textwrap", "json"])
    box = Memory(pages=pages)
    assert box.call("u", ["remove common leading whitespace"]).text.startswith("textwrap.dedent: ")
    refused = box.call("u", ["https://evil.example/textwrap?leak=1"])
    assert refused == sb.Result(False, "!refused: no network, and this task has no page of evil.example")


def test_memory_never_executes(tmp_path):
    mark = tmp_path / "mark"
    box = Memory({"a.py": f"open({str(mark)!r}, 'w')"}, check="def main(files): return files['a.py'][:4]")
    assert box.call("b", [f"touch {mark}"]).text == "!no shell here" and box.call("x").text == "open"
    assert not mark.exists()


def test_memory_refuses_regex_bombs_at_once():
    box = Memory({"a": "a" * 40 + "b\n"})
    start = time.monotonic()
    for bomb in ("(a+)+$", "(a|a)*$", "(?:a{1,30}){1,30}$", "a*a*a*a*a*a*a*a*$"):
        assert box.call("g", [bomb]).text == "!pattern: too slow"
    assert time.monotonic() - start < 1
    assert box.call("g", ["a*b"]).ok
    box.call("w", ["long", "a" * 20_000])
    assert box.call("g", ["a*" * 99]).text == "!pattern: too slow"


@isolated
def test_memory_and_sandbox_answer_alike():
    """Hundreds of random calls, the same text from both, the same files at the end."""
    rng = random.Random(1)
    names = ["a", "b.py", "d/c", "d/e/f", "d", "../x", "/etc/p", "nope", "s p", "\u00e9", "x\ny", "l", "l/m",
             "y" * 256, "d/" + "z" * 255]  # fmt: skip
    texts = ["", "x", "x=1\n", "x=1\nx=2\n", "\tx\r\ny", "a\udcffb", "\u00e9\n", "z" * 300 + "\n", "no\0"]
    patterns = ["x", "^x", "x=[0-9]", "[", "z{3}", "(x|y)", ".", "\\d$", "\u00e9", "=.*"]

    def call() -> tuple[str, list]:
        tool = rng.choice("rrwwweegglts")
        args = {
            "r": [rng.choice(names), *rng.sample([0, 1, 2], rng.randrange(3))],
            "w": [rng.choice(names), rng.choice(texts)],
            "e": [rng.choice(names), rng.choice(texts + patterns), rng.choice(texts)],
            "g": [rng.choice(patterns), *rng.sample(names, rng.randrange(2))],
            "l": rng.sample(names, rng.randrange(2)),
            "t": rng.sample(names, rng.randrange(2)),
            "s": [rng.choice(texts)],
        }[tool]  # fmt: skip
        return tool, args[:rng.randrange(len(args) + 1)] if rng.random() < 0.1 else args

    start = Snapshot({"l": File(b"a", stat.S_IFLNK | 0o777), "b.py": File(b"x=1\n", stat.S_IFREG | 0o755)})
    with Memory(start) as memory, Sandbox(start) as box:
        seen = set()
        for _ in range(700):
            tool, args = call()
            ours, theirs = memory.call(tool, args), box.call(tool, args)
            assert ours == theirs, (tool, args)
            seen.add((tool, ours.text[:6]))
        assert memory.snapshot() == box.snapshot() and len(seen) > 60


@isolated
def test_calls_run_in_order_and_each_has_a_result(shared):
    with Sandbox({"n": "\n".join(map(str, range(1, 101)))}) as box:
        turn = [("e", ["n", "50\n", "FIFTY\n"]), ("zz", []), ("e", ["n", "75\n", "X\n"]), ("r", [])]
        assert [box.call(tool, args).ok for tool, args in turn] == [True, False, True, False]
        text = box.call("r", ["n"]).text
        assert "FIFTY" in text and "\nX\n" in text


# ---- the probes, by number -------------------------------------------------------------------------------


@isolated
class TestProbes:
    """Attacks and faults that a sandbox must survive; the numbers are those of the attack list, 1 to 46."""

    def test_01_fork_bomb(self, shared):
        out = python(shared, """
            import os
            n = 0
            try:
                while os.fork(): n += 1
                import time; time.sleep(9)
            except OSError as e: print(e.errno, n)
            """)  # fmt: skip
        number, forks = map(int, out.split())
        assert number == 11 and 10 < forks < 24 and run(shared, "echo fine") == "fine\n"

    def test_02_memory_bomb(self, shared):
        assert "MemoryError" in python(shared, "bytearray(600 << 20)")

    def test_03_many_processes_with_much_memory_are_the_first_to_go(self, shared):
        # a real shortage would harm the machine: what is checked is the mark that the kernel goes by
        pid = host_pid(shared)
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"

    def test_04_disk(self):
        with Sandbox(limits=QUICK) as box:
            assert not box.call("run", ["head -c 100M /dev/zero > f"]).ok
            assert run(box, "stat -c %s f") == f"{16 << 20}\n"
            out = run(box, "for i in 1 2 3 4 5 6; do dd if=/dev/zero of=f$i bs=1M count=15 2>&1; done")
            assert "No space left" in out and int(run(box, "du -sm . | cut -f1")) <= 64

    def test_05_inodes(self):
        with Sandbox(limits=Limits(inodes=64)) as box:
            assert "No space left" in run(box, "for i in $(seq 100); do : > f$i; done 2>&1")
            assert len(box.snapshot()) < 64

    def test_06_huge_output(self, shared):
        text = run(shared, "yes | head -c 30000000")
        assert len(text) < 16_100 and "of 30000000 bytes" in text
        with Sandbox(limits=Limits(output=3)) as box:
            assert run(box, "echo abcdef") == "a\n[2 of 7 bytes]\n\n" and run(box, "echo ab") == "ab\n"

    def test_07_endless_loop_is_stopped_with_its_output(self):
        with Sandbox(limits=Limits(wall=0.5)) as box:
            start = time.monotonic()
            result = box.call("run", ["echo before; while :; do :; done"])
            assert result == sb.Result(False, "!timeout 0.5 s\nbefore\n") and time.monotonic() - start < 5
        with Sandbox(limits=Limits(cpu=1)) as box:
            # by CPU time, long before the clock
            assert box.call("run", ["while :; do :; done"]).text.startswith("!signal 9")

    def test_08_daemon_is_gone_when_the_call_returns(self, shared):
        beat = "(setsid sh -c 'while :; do echo x >> /tmp/beat; sleep 0.02; done' &)"
        run(shared, f"{beat}; while [ ! -s /tmp/beat ]; do sleep 0.02; done")
        first = run(shared, "cat /tmp/beat")
        time.sleep(0.1)
        assert first and run(shared, "cat /tmp/beat") == first

    def test_09_daemon_that_holds_the_pipe(self):
        with Sandbox(limits=Limits(wall=0.5)) as box:
            start = time.monotonic()
            assert "timeout" in run(box, "setsid sleep 6 & sleep 60")
            assert run(box, "setsid sleep 6 & echo x") == "x\n" and time.monotonic() - start < 5

    def test_10_ignores_sigterm(self):
        with Sandbox(limits=Limits(wall=0.5)) as box:
            assert "timeout" in run(box, "trap '' TERM INT HUP; sleep 60")
            assert run(box, "echo fine") == "fine\n"

    def test_11_kill_the_server(self, shared):
        for number in range(1, 65):
            if number not in (32, 33):
                run(shared, f"kill -{number} 1")
        run(shared, "kill -9 -1")
        python(shared, "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))")
        assert run(shared, "echo $PPID") == "1\n"

    def test_12_signal_the_trainer(self, shared):
        outside = [os.getpid(), os.getppid(), sb.zygote_of_this_process().process.pid]
        for pid in outside:  # signal 0 only asks
            assert "No such process" in run(shared, f"kill -0 {pid} 2>&1")

    def test_13_stops_itself(self):
        with Sandbox(limits=Limits(wall=0.5)) as box:
            assert "timeout" in run(box, "kill -STOP $$")

    def test_14_host_files(self, shared):
        gone = f"/home /proc/1 /sys /etc/shadow /etc/passwd /boot {HOME} {__file__}"
        assert run(shared, f"ls -d {gone} 2>/dev/null") == "!exit 2\n"
        assert set(run(shared, "ls /etc; ls /dev").split()) <= {"alternatives", "null", "urandom", "zero"}
        assert run(shared, "uname -n") == "workspace\n"
        # no packages, no second copy of the standard library
        copies = [str(path) for path in Path("/usr/lib").glob("python3*") if str(path) != sb.LIBRARY]
        folders = " ".join([f"{sb.LIBRARY}/site-packages", f"{sb.LIBRARY}/test", *copies])
        assert run(shared, f"find {folders} -type f 2>/dev/null | head -3") == ""

    def test_15_environment(self, shared):
        names = {line.split("=")[0] for line in run(shared, "env").splitlines()}
        assert names - {"PWD", "_", "OLDPWD", "SHLVL"} == set(sb.ENVIRONMENT)
        assert "No such file" in run(shared, "cat /proc/1/environ 2>&1")

    def test_16_traversal_in_tools(self, shared):
        for path in ("../../etc/passwd", "/etc/passwd", "/proc/self/environ", "x/../../usr"):
            assert shared.call("r", [path]).text == "!outside"

    def test_17_symlinks(self):
        with Sandbox({"a": "1"}) as box:
            run(box, "ln -s / up; ln -s a near; ln -s loop loop")
            assert box.call("r", ["up/etc/passwd"]).text == "!link to /"
            assert box.call("l").text == "a\nloop@\nnear@\nup@"
            assert box.call("w", ["near", "x"]).text == "!link to a"
            assert box.call("r", ["loop"]).text == "!link to loop"
            assert box.call("g", ["root"]).text == ""

    def test_18_symlink_in_a_snapshot_is_not_followed(self):
        with Sandbox() as box:
            run(box, "ln -s /etc/passwd x")
            assert box.snapshot() == {"x": File(b"/etc/passwd", stat.S_IFLNK | 0o777)}
            with box.fork() as twin:
                assert run(twin, "readlink x") == "/etc/passwd\n" and twin.snapshot() == box.snapshot()

    def test_19_hard_links(self):
        with Sandbox({"a": "1"}) as box:
            assert "cross-device" in run(box, "ln /usr/bin/env x 2>&1").lower()
            run(box, "ln a b")
            assert box.snapshot()["b"] == File(b"1")

    def test_20_proc_tricks(self, shared):
        assert run(shared, "ls /proc /sys 2>/dev/null") == "!exit 2\n"

    def test_21_network_sockets(self, shared):
        out = python(shared, """
            import socket
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
                try: socket.socket(family, socket.SOCK_RAW); print("open")
                except OSError as e: print(e.errno)
            """)  # fmt: skip
        assert out.split() == ["1"] * 4

    def test_22_vsock(self, shared):
        assert "PermissionError" in python(shared, "import socket; socket.socket(40, socket.SOCK_STREAM)")

    def test_23_dns(self, shared):
        assert "gaierror" in python(shared, 'import socket; socket.getaddrinfo("example.com", 80)')

    def test_24_unix_and_abstract_sockets(self, shared):
        assert "PermissionError" in python(shared, "import socket; socket.socket(socket.AF_UNIX)")
        # asyncio needs these; a datagram socket without its partner would be a mailbox of any name
        assert python(shared, "import socket; print(len(socket.socketpair()))") == "2\n"
        out = python(shared, """
            import socket
            for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                try: socket.socketpair(socket.AF_UNIX, kind); print("open")
                except OSError as e: print(e.errno)
            a, b = socket.socketpair()
            b.close()
            for act in (a.bind, a.connect):
                try: act(chr(0) + "leak"); print("open")
                except OSError as e: print(e.errno)
            """)  # fmt: skip
        assert out.split() == ["1"] * 4

    def test_25_write_outside(self, shared):
        out = run(shared, "touch /usr/x /x /dev/x /etc/x 2>&1")
        assert out.count("Read-only file system") == 4

    def test_26_mount_chroot_unshare_setns(self, shared):
        out = python(shared, """
            import ctypes
            c = ctypes.CDLL(None, use_errno=True)
            for call in ((165, b"t", b"/tmp", b"tmpfs", 0, 0), (161, b"/"), (272, 0x10000000), (308, 0, 0),
                         (155, b".", b"."), (56, 0x10000011, 0, 0, 0, 0)):
                print(c.syscall(*call), ctypes.get_errno())
            """)  # fmt: skip
        assert out.split() == ["-1", "1"] * 6

    def test_27_ptrace_and_process_vm(self, shared):
        out = python(shared, """
            import ctypes
            c = ctypes.CDLL(None, use_errno=True)
            for call in ((101, 16, 1, 0, 0), (310, 1, 0, 0, 0, 0, 0), (311, 1, 0, 0, 0, 0, 0)):
                print(c.syscall(*call), ctypes.get_errno())
            """)  # fmt: skip
        assert out.split() == ["-1", "1"] * 3

    def test_28_setuid_programs_and_capabilities(self, shared):
        assert not shared.call("run", ["su -c true </dev/null"]).ok
        out = python(shared, """
            import ctypes, os
            c = ctypes.CDLL(None)
            mask = bytearray(24)
            head = (ctypes.c_uint * 2)(0x20080522, 0)
            got = (ctypes.c_uint * 6)()
            c.capget(head, got)
            print(os.getuid(), sum(got), c.prctl(39, 0, 0, 0, 0))
            """)  # fmt: skip
        assert out.split() == ["1000", "0", "1"]
        inside = """
            import ctypes
            def main(files):  # no program was started in between, which would drop capabilities on its own
                got = (ctypes.c_uint * 6)()
                ctypes.CDLL(None).capget((ctypes.c_uint * 2)(0x20080522, 0), got)
                return str(sum(got))
            """
        assert shared.check(textwrap.dedent(inside)).text == "0"

    def test_29_devices_and_fifos(self, shared):
        assert run(shared, "mkfifo p 2>&1; mknod n c 1 3 2>&1").count("Operation not permitted") == 2

    def test_30_calls_that_dodge_the_filter_or_the_limits(self, shared):
        out = python(shared, """
            import ctypes
            c = ctypes.CDLL(None, use_errno=True)
            for call in ((425, 1, 0), (321, 0, 0, 0), (323, 0), (250, 0, 0), (319, b"x", 0),
                         (29, 0, 4096, 0o1600), (447, 0), (298, 0, 0, 0, 0, 0)):
                print(c.syscall(*call), ctypes.get_errno())
            """)  # fmt: skip
        assert out.split() == ["-1", "1"] * 8

    def test_31_foreign_call_numbers(self, shared):
        text = python(shared, "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 39)")
        assert "Bad system call" in text

    def test_32_raise_own_limits(self, shared):
        for option in ("-n 4096", "-v unlimited", "-p 999", "-t 999"):
            assert not shared.call("run", [f"ulimit {option}"]).ok

    def test_33_binary_output(self, shared):
        assert run(shared, r"printf '\377\000\360\303\251'") == "\\xff\0\\xf0\u00e9"
        run(shared, r"printf '\377\000' > f").encode()
        assert shared.snapshot()["f"].data == b"\xff\0"  # nothing is lost there
        run(shared, "rm f")

    def test_34_line_ends_and_tabs_survive_an_edit(self):
        with Sandbox({"m": b"a:\r\n\techo 1\r\n\xff end"}) as box:
            box.call("e", ["m", "1", "2"])
            assert box.snapshot()["m"].data == b"a:\r\n\techo 2\r\n\xff end"

    def test_35_odd_names(self):
        files = {"a\nb\udcff": "1", "-rf": "2", " lead": "3", "d/\x1b[31m": "4"}
        with Sandbox(files) as box:
            assert box.call("l").text == " lead\n-rf\na\\nb\\xff\nd/"
            assert box.call("l", ["d"]).text == "\\x1b[31m"
            assert all(box.call("r", [name]).text == text for name, text in files.items())
            assert box.snapshot().texts() == files

    def test_36_nul_in_arguments(self, shared):
        assert shared.call("r", ["a\0b"]).text == "!args path"
        assert shared.call("b", ["echo\0"]).text == "!args command"
        assert shared.call("r", ["a.txt"]).text == "one\n"

    def test_37_big_file(self):
        with Sandbox() as box:
            run(box, "yes | head -c 15000000 > f; truncate -s 16000000 hole")
            text = box.call("r", ["f"]).text
            assert len(text) < 16_100 and text.endswith("[16000 of 15000000 bytes]")
            assert box.call("r", ["hole"]).text == "!binary 16000000 bytes"

    def test_38_folder_in_read(self, shared):
        assert shared.call("r", ["."]).text == "!is a folder"

    def test_39_regex_bomb(self):
        with Sandbox({"a": "a" * 40 + "b\n"}) as box:
            start = time.monotonic()
            assert box.call("g", ["(a+)+$"]).text == "!pattern: too slow" and time.monotonic() - start < 8
            assert run(box, "kill -PROF 1; kill -ALRM 1; echo fine") == "fine\n"  # no handler was left
            assert box.call("g", ["b"]).text.endswith("b")

    def test_40_edit_on_a_full_disk(self):
        with Sandbox({"a": "old " * 9000}, limits=Limits(disk=1 << 20)) as box:
            run(box, "dd if=/dev/zero of=fill bs=1k count=2000 2>/dev/null")
            assert box.call("e", ["a", "old " * 9000, "new " * 9000]).text == "!disk full"
            assert box.call("w", ["a", "new " * 9000]).text == "!disk full"
            assert box.snapshot()["a"].data == b"old " * 9000

    def test_41_huge_command(self, shared):
        assert shared.call("run", ["echo " + "x" * 3_000_000]).text == "!argument list too long"

    def test_42_replies_of_a_taken_over_server(self):
        ok = json.dumps([[True, "fine"], 0]).encode() + b"\n"
        big = json.dumps([[True, "x" * (9 << 20)], 0]).encode()
        assert hostile(ok) == "fine"
        for reply in (
            big + b"\n", big[:-2], b"[" * 100_000 + b"\n", b"[[true, 5], 0]\n", b'[[1, "x"], 0]\n', b"{}\n",
            b'[[true, "x", 1], 0]\n', b'[[true, "\\ud800"], 0]\n', b'[[true, "x"], 5]\nabcde', b"\xff\n",
            ok + ok, b'[[true, "x"], -1]\n', b'[["unavailable", "x", 0], 0]\n', b"1e999\n", b"[]\n", b"",
        ):  # fmt: skip
            with pytest.raises(sb.SandboxDied):
                hostile(reply)
        start = time.monotonic()
        with pytest.raises(sb.SandboxDied):
            hostile(None)  # silence
        assert time.monotonic() - start < 10

    def test_42_snapshots_of_a_taken_over_server(self):
        def snapshot(index: object) -> Snapshot:
            return hostile(json.dumps([[True, index], 1]).encode() + b"\nx", lambda box: box.snapshot())

        assert snapshot([["a", 0o100644, 1]]) == {"a": File(b"x")}
        for entry in (
            [5, 0o100644, 1], [["a"], 0o100644, 1], ["a", 1 << 70, 1], ["a", -1, 1], ["a", "x", 1], ["a", 0o100644, 2],
            ["a", 0o100644, -1], ["a", 0o100644, True], ["a", 0o010644, 1], ["../a", 0o100644, 1], ["\ud800", 0o100644, 1],
            ["a", 0o100644], [], "a", 5, None, {},
        ):  # fmt: skip
            with pytest.raises(sb.SandboxDied):
                snapshot([entry])

    def test_43_when_the_trainer_dies_everything_dies(self):
        code = """
            import os, sys, threading, time; sys.path.insert(0, {home!r}); import sandbox
            boxes = [sandbox.Sandbox() for _ in range(5)]
            threading.Thread(target=boxes[0].call, args=("run", ["sleep 77.25 & sleep 77.5"])).start()
            time.sleep(0.3)
            bystander = os.fork()  # inherits every descriptor, and must not keep anything alive by that
            if bystander:
                print(os.getpid(), bystander, flush=True)
            time.sleep(60)
            """
        code = textwrap.dedent(code).format(home=str(HOME))
        trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        pid, bystander = map(int, trainer.stdout.readline().split())
        family = set(descendants(pid)) - {bystander}
        assert len(family) >= 10  # the trainer, two of the zygote, five servers, a shell, its children
        trainer.kill()
        trainer.wait()
        gone = eventually(lambda: not any(alive(p) for p in family), 5)
        os.kill(bystander, signal.SIGKILL)
        assert gone

    def test_44_descriptors(self, shared):
        code = """
            import os
            for fd in range(64):
                try: os.fstat(fd); print(fd)
                except OSError: pass
            """
        assert python(shared, code).split() == ["0", "1", "2"]
        inside = "import os\ndef main(files): return str([f for f in range(64) if good(f)])\n" \
                 "def good(f):\n    try: return os.fstat(f)\n    except OSError: return None\n"
        assert len(json.loads(shared.check(inside).text)) == 4  # those and the pipe for the answer

    def test_45_a_hundred_at_once(self):
        boxes = [Sandbox({"n": str(i)}) for i in range(100)]
        try:
            assert [box.call("r", ["n"]).text for box in boxes] == [str(i) for i in range(100)]
            pids = [host_pid(box) for box in boxes]
            if os.geteuid() == 0:
                rollups = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
                assert sum(map(int, re.findall(r"\nPss: +(\d+) kB", rollups))) < 250 * 1024
        finally:
            for box in boxes:
                box.close()
        assert not any(alive(pid) for pid in pids)

    def test_46_refusals_name_step_errno_and_remedy(self):
        # a user namespace in which no further ones are allowed; a filter as Docker's default profile sets it
        found = refusal("""
            libc.unshare(0x10000000)
            open("/proc/sys/user/max_user_namespaces", "w").write("0")
            """)
        assert found[:2] == ["unshare(user, ...)", 28] and "max_user_namespaces" in found[2]
        assert found[3] == "Memory"
        found = refusal("""
            sandbox.libc("nnp", "prctl", 38, 1, 0, 0, 0)
            code = [(0x20, 0, 0, 0), (0x15, 0, 1, 272), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
            program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
            sandbox.libc("f", "prctl", 22, 2, struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)), 0, 0)
            """)
        assert found[0].startswith("unshare(") and found[1] == 1 and "--privileged" in found[2]
        assert found[3] == "Memory"


def hostile(reply: bytes | None, act=lambda box: box.call("r", ["a"]).text):
    """What a workspace makes of a server that always answers so (None: never)."""

    class Taken(Sandbox):
        def _start(self) -> None:
            self._sock, theirs = (s.detach() for s in socket.socketpair())
            timeout = sb.struct.pack("ll", 0, 300_000)
            with socket.socket(fileno=os.dup(self._sock)) as ours:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._end = lambda sock=self._sock: os.close(sock)

            def serve() -> None:
                try:
                    sb.receive(theirs, 1 << 20)
                    sb.write_all(theirs, reply or b"")
                    time.sleep(1.0 if reply is None else 0.0)
                except OSError:
                    pass  # the other side hung up early, as it should
                os.close(theirs)

            threading.Thread(target=serve, daemon=True).start()

    return act(Taken())


def refusal(prepare: str) -> list:
    """[step, errno, remedy, what `auto` picks] in a process that has been prepared so."""
    code = f"""
import ctypes, json, struct, sys; sys.path.insert(0, {str(HOME)!r}); import sandbox
libc = ctypes.CDLL(None, use_errno=True)
{textwrap.dedent(prepare)}
try:
    sandbox.Sandbox()
except sandbox.SandboxUnavailable as e:
    print(json.dumps([e.step, e.errno, e.remedy, sandbox.auto(lambda text: None).__name__]))
"""
    user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    python3 = sys.executable if not user else "/usr/bin/python3"
    line = [python3, "-I", "-S", "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd="/", **user)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


# ---- processes on this side ------------------------------------------------------------------------------


def host_pid(box: Sandbox) -> int:
    """The number of a workspace's PID 1 on this side."""
    pidfd = box._end.peek()[2][1]
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pid:")))


def alive(pid: int) -> bool:
    """Is there such a process that is not only waiting to be reaped?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in descendants(int(child)))]


def state() -> dict[str, int]:
    """What must not grow: descriptors, processes below this one, mounts, temporary files."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    files = [name for name in os.listdir("/tmp") if "sandbox" in name or name.startswith(".~")]
    fds, processes = os.listdir("/proc/self/fd"), descendants(os.getpid())
    return {"fds": len(fds), "processes": len(processes), "mounts": len(mounts), "files": len(files)}


@isolated
def test_cycles_leave_nothing_behind():
    Sandbox().close()
    before = state()
    for i in range(60):
        box = Sandbox({"a": "1"})
        if i % 3 == 0:
            box.call("run", ["sleep 50 &"])
        if i % 2:
            box.close()
        else:
            del box  # dropped without a word
    assert eventually(lambda: state() == before), (before, state())


# ---- fork and snapshot -----------------------------------------------------------------------------------


@isolated
def test_snapshot_and_fork_keep_everything():
    with Sandbox({"d/a.py": "1", "empty": ""}) as box:
        run(box, r"""chmod 755 d/a.py; ln -s d/a.py link; mkdir -p hollow/deep
            printf '\377\0' > "$(printf 'x\n\376')"; mkdir shut; echo s > shut/in
            chmod 0 shut; echo h > hidden; chmod 0 hidden; chmod 400 empty""")
        shot = box.snapshot()
        assert shot["d/a.py"].mode & 0o777 == 0o755 and shot["link"] == File(b"d/a.py", stat.S_IFLNK | 0o777)
        assert shot["x\n\udcfe"].data == b"\xff\0" and stat.S_ISDIR(shot["hollow/deep"].mode)
        assert shot["shut/in"].data == b"s\n" and shot["hidden"].data == b"h\n" and "hollow" not in shot
        # permissions that were lent for reading are given back
        assert shot["shut"].mode == stat.S_IFDIR and shot["hidden"].mode == stat.S_IFREG
        with box.fork() as twin, Memory(shot) as memory:
            assert twin.snapshot() == shot and box.snapshot() == shot
            assert memory.snapshot() == shot


@pytest.mark.parametrize("kind", BOTH)
def test_forks_go_separate_ways(kind):
    with kind({"a": "1"}, tools=["w", "r", "t"], strict=False) as box:
        box.call("t", ["item"])
        with box.fork() as one, box.fork() as two:
            one.call("w", ["a", 2])
            two.call("w", ["b", "3"])
            two.call("t", ["item", 1])
            texts = [x.snapshot().texts() for x in (box, one, two)]
            assert texts == [{"a": "1"}, {"a": "2"}, {"a": "1", "b": "3"}]
            assert box.todos == one.todos == {"item": False} and two.todos == {"item": True}
            assert not one.call("l").ok


@isolated
def test_files_that_cannot_be_held_are_the_models_failure():
    sparse = "for i in 1 2 3 4 5 6; do truncate -s 15M f$i; done"
    links = "head -c 15M /dev/zero > a; for i in 1 2 3 4 5; do ln a b$i; done"
    deep = "i=0; d=$(printf %0200d 0); while [ $i -lt 30 ]; do mkdir $d; cd $d; i=$((i+1)); done"
    for command in (sparse, links, deep):
        with Sandbox() as box:
            run(box, command)
            with pytest.raises(sb.TooBig):
                box.snapshot()
            assert box.call("s", ["word"]).text.startswith("!") and run(box, "echo fine") == "fine\n"
    with pytest.raises(sb.TooBig):
        Sandbox({"a": "x" * (2 << 20)}, limits=Limits(disk=1 << 20))


@pytest.mark.parametrize("name", ["/a", "../a", "a//b", "", "a/./b", "a\0"])
def test_bad_file_names_are_refused(name):
    with pytest.raises(ValueError, match="file name"):
        Memory({name: ""})


def test_what_is_no_file_folder_or_link_is_refused():
    with pytest.raises(ValueError, match="'a' has mode 0o10644: only files, folders and links"):
        Memory({"a": File(b"", 0o010644)})


@pytest.mark.parametrize("machine, path", [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"),
                                           ("aarch64", "asm-generic/unistd.h")])  # fmt: skip
def test_the_filters_numbers_are_the_kernels(machine, path):
    header = Path("/usr/include") / path
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    numbers = {name: pair[machine == "aarch64"] for name, pair in sb.DENIED.items()}
    found.setdefault("mknod", found["mknodat"])  # aarch64 has no mknod of its own
    assert numbers == {name: int(found[name]) for name in numbers} and len(numbers) > 40
    program = [line for line in sb.struct.iter_unpack("HBBI", sb.filter_program(machine))]
    for name, number in found.items():  # run the filter on every call there is, with arguments of 0
        verdict = interpret(program, int(number))
        assert (verdict == 0x50001) == (name in numbers or name == "socketpair"), name


def interpret(program: list[tuple[int, int, int, int]], number: int) -> int:
    """What a seccomp filter returns for a call of that number of the filter's own architecture."""
    at, value = 0, 0
    while True:
        code, yes, no, k = program[at]
        if code == 0x06:
            return k
        if code == 0x20:
            value = {0: number, 4: program[1][3]}.get(k, 0)
        elif code == 0x54:
            value &= k
        else:
            test = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += yes if test else no
        at += 1


@pytest.mark.parametrize("field", ["wall", "processes", "output"])
def test_limits_must_be_positive(field):
    with pytest.raises(ValueError, match=f"Limits.{field} = 0 must be greater than 0"):
        Limits(**{field: 0})


# ---- faults ----------------------------------------------------------------------------------------------


def strike(box: Sandbox) -> None:
    os.kill(host_pid(box), signal.SIGKILL)


@isolated
def test_a_death_is_retried_once_and_the_state_comes_back():
    with Sandbox({"a": "1"}) as box:
        box.call("w", ["a", "2"])
        run(box, "echo 3 > b")
        strike(box)
        assert box.call("l").text == "a\nb" and box.call("r", ["a"]).text == "2"
        strike(box)
        assert box.snapshot().texts() == {"a": "2", "b": "3\n"}


@isolated
def test_silence_is_a_death():
    with Sandbox({"a": "1"}, limits=Limits(wall=0.3, patience=0.3)) as box:
        os.kill(host_pid(box), signal.SIGSTOP)
        start = time.monotonic()
        assert box.call("r", ["a"]).text == "1" and time.monotonic() - start < 8


@isolated
def test_a_state_that_cannot_come_back_is_reported():
    with Sandbox() as box:
        run(box, "cat /dev/urandom | head -c 8")
        strike(box)
        with pytest.raises(sb.SandboxDied, match="restored") as caught:
            box.call("l")
        assert caught.value.policy  # a command had run: it may have been the model's doing
        with pytest.raises(sb.SandboxDied, match="died before"):
            box.call("l")


@isolated
def test_a_machine_that_kills_twice_is_not_the_models_fault(monkeypatch):
    with Sandbox({"a": "1"}) as box:
        start = box._start
        monkeypatch.setattr(box, "_start", lambda: (start(), strike(box)))
        strike(box)
        with pytest.raises(sb.SandboxDied) as caught:
            box.call("r", ["a"])
        assert not caught.value.policy


@isolated
def test_the_zygote_is_started_again():
    with Sandbox({"a": "1"}) as box:
        sb.zygote_of_this_process().process.kill()
        assert box.call("r", ["a"]).text == "1"


@isolated
def test_an_interrupt_leaves_nothing_out_of_step(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Sandbox({"a": "1"}) as box, Sandbox({"b": "2"}) as other:
        with monkeypatch.context() as patch:
            patch.setattr(sb, "receive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                box.call("r", ["a"])
        with pytest.raises(sb.SandboxDied, match="died before"):  # else it would read the answer to that call
            box.call("l")
        with monkeypatch.context() as patch:
            patch.setattr(sb, "receive_fds", interrupt)
            with pytest.raises(KeyboardInterrupt):
                Sandbox()
        with Sandbox({"c": "3"}) as fresh:
            assert fresh.call("l").text == "c" and other.call("l").text == "b"
            time.sleep(0.2)  # for the one that was interrupted to be gone
            assert alive(host_pid(fresh))  # the handle is that of this workspace, not of that one


@isolated
def test_no_descriptors_left_is_overload_not_failure():
    for most in (30, 31):  # the last descriptor is missed at different places
        code = f"""
import resource, sys; sys.path.insert(0, {str(HOME)!r}); import sandbox
boxes = [sandbox.Sandbox()]
resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))
try:
    while True: boxes.append(sandbox.Sandbox())
except sandbox.Overloaded as e: print(len(boxes), e.policy)
print(boxes[1].call("b", ["echo alive"]).text)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.split()[1:] == ["False", "alive"], done.stderr
        assert 5 < int(done.stdout.split()[0]) < 30


@isolated
def test_a_forked_child_of_the_trainer_does_no_harm():
    with Sandbox({"a": "1"}) as box:
        server, pid = host_pid(box), os.fork()
        if not pid:
            try:
                with Sandbox({"b": "2"}) as own:  # it has a zygote of its own
                    code = 0 if own.call("r", ["b"]).text == "2" else 1
                box.close()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0 and box.call("r", ["a"]).text == "1"
        assert host_pid(box) == server  # the same one still


# ---- how it starts ---------------------------------------------------------------------------------------


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become someone else")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="no Python for ordinary users")
def test_ordinary_users_can_start_it(tmp_path):
    done = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info >= (3, 11))"],
                          capture_output=True, check=False)
    if done.stdout != b"True\n":
        pytest.skip("the Python for ordinary users is older than 3.11")
    folder = Path("/tmp") / f"sandbox_for_nobody_{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        shutil.copy(HOME / "sandbox.py", folder)
        code = f"""
import os, sys; sys.path.insert(0, {str(folder)!r}); sys.dont_write_bytecode = True; import sandbox
sandbox.auto()
with sandbox.Sandbox({{"a": "1"}}) as box:
    box.call("e", ["a", "1", "2"]); print(os.getuid(), box.call("b", ["id -u; cat a; touch /usr/x"]).text)
    with box.fork() as two: print(two.snapshot() == box.snapshot(), two.check("def main(f): return f['a']"))
"""
        done = subprocess.run(["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=False,
                              user=65534, group=65534, extra_groups=[], cwd="/")  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert "Sandbox, its self-check passed" in done.stdout, done.stderr
    assert "65534 !exit 1\n1000\n2touch: " in done.stdout and "Read-only file system" in done.stdout
    assert "True Result(ok=True, text='2')" in done.stdout


@isolated
def test_auto_says_once_what_it_took():
    said = []
    assert sb.self_check() == ""
    assert sb.auto(said.append) is Sandbox and len(said) == 1 and "self-check passed" in said[0]


def test_auto_takes_memory_if_a_wall_is_missing(monkeypatch):
    said = []
    monkeypatch.setattr(sb, "self_check", lambda: "the network is open")
    assert sb.auto(said.append) is Memory and "the network is open" in said[0]


@isolated
def test_sealed_modules_cannot_be_read():
    with Sandbox(sealed=["textwrap", "json"], limits=QUICK) as box, Sandbox(limits=QUICK) as open_box:
        files = f"{sb.LIBRARY}/*.py {sb.LIBRARY}/__pycache__/* {sb.LIBRARY}/json/*"
        find = f"cat {files} 2>/dev/null | grep -c -e 'class TextWrapper:' -e 'class JSONEncoder('"
        assert int(run(open_box, find)) > 0 and run(box, find) == "!exit 1\n0\n"
        for module in ("textwrap", "json"):
            assert not box.call("run", [f"python3 -c 'import {module}; {module}.__doc__.title()'"]).ok
        assert run(box, "python3 -c 'import re; print(1)'") == "1\n"


@isolated
def test_threads_may_use_workspaces_side_by_side():
    wrong = []

    def work(n: int) -> None:
        for i in range(10):
            with Sandbox({"n": f"{n}.{i}"}) as box:
                if box.call("r", ["n"]).text != f"{n}.{i}" or run(box, "cat n") != f"{n}.{i}":
                    wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_demo_and_usage():
    line = [sys.executable, str(HOME / "sandbox.py"), "--nope"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "--bench" in done.stderr


def test_leaf_of_the_standard_library():
    import ast

    tree = ast.parse((HOME / "sandbox.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@isolated
@pytest.mark.slow
def test_soak():
    """2,000 cycles from 8 threads with random kills leave no process, descriptor, mount or file behind."""
    Sandbox().close()
    before, rng, lost = state(), random.Random(2), []

    def work(n: int) -> None:
        for i in range(250):
            try:
                with Sandbox({"a": "1"}) as box:
                    box.call("w", ["b", "2"])
                    if rng.random() < 0.3:
                        run(box, "sleep 30 & echo x")
                    if rng.random() < 0.2:
                        strike(box)
                    if box.snapshot().texts() != {"a": "1", "b": "2"}:
                        lost.append((n, i))
            except sb.SandboxDied as died:
                lost.append(str(died))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not lost and eventually(lambda: state() == before), (lost[:3], before, state())
