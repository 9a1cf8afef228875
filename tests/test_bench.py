"""bench.py: tasks that a reference solves and nothing else does; splits apart; agents, scores by hand."""

import http.server
import itertools
import json
import random
import re
import sys
import threading
import time

import pytest

import bench
import sandbox
from summarize import Bytes, Protocol, Rollout, Turn, WindowConfig

PROTOCOL, WINDOW = Protocol(Bytes()), WindowConfig()


@pytest.mark.parametrize("family", bench.FAMILIES)
@pytest.mark.parametrize("split", ("train", "heldout"))
def test_reference_passes_and_slips_and_hacks_fail(family: str, split: str) -> None:
    for i in range(12):
        t = bench.task(family, split, i)
        assert bench.run_script(t, t.reference, PROTOCOL, WINDOW, sandbox.Memory)[0] == 1.0, t
        for slip in t.slips:
            assert bench.run_script(t, slip, PROTOCOL, WINDOW, sandbox.Memory)[0] == 0.0, (t, slip)
        for name, hack in bench.HACKS.items() if i < 3 else ():
            assert bench.run_script(t, hack(t), PROTOCOL, WINDOW, sandbox.Memory)[0] == 0.0, (t, name)


def test_right_answer_does_not_pay_for_a_damaged_workspace() -> None:
    for family in ("ask", "find", "compare", "pin"):
        t = bench.task(family, "train", 3)
        with bench.open_workspace(sandbox.Memory, t) as w:
            assert bench.grade(t, w, t.answer) == 1.0
            w.call("w", ("extra", "a=1\n"))
            assert bench.grade(t, w, t.answer) == 0.0


def test_sandbox_and_memory_grade_alike() -> None:
    environment = sandbox.auto(announce=lambda text: None)
    if environment is sandbox.Memory:
        pytest.skip("no namespaces here")
    for family in bench.FAMILIES:
        t = bench.task(family, "heldout", 1)
        for s in (t.reference, *t.slips):
            assert (
                bench.run_script(t, s, PROTOCOL, WINDOW, environment)[0]
                == bench.run_script(t, s, PROTOCOL, WINDOW, sandbox.Memory)[0]
            )


def test_splits_share_no_name_no_value_no_task() -> None:
    words: dict[str, set[str]] = {"train": set(), "heldout": set()}
    prompts: dict[str, set] = {"train": set(), "heldout": set()}
    for split in words:
        for t in bench.suite(split, 40):
            text = " ".join([t.prompt, *t.files, *t.files.values(), t.expected])
            words[split] |= set(re.findall(r"\b[a-z]{4}\b|\b[0-9]{2}\b", text)) - {"more", "want"}
            prompts[split].add((t.prompt, tuple(t.files.items())))
    assert len(words["train"]) > 300 and not words["train"] & words["heldout"]
    assert len(prompts["heldout"]) == 40 * len(bench.FAMILIES) and not prompts["train"] & prompts["heldout"]


def test_tasks_are_a_function_of_their_arguments() -> None:
    assert bench.task("pin", "train", 7) == bench.task("pin", "train", 7) != bench.task("pin", "train", 8)
    assert bench.task("pin", "train", 7, seed=1) != bench.task("pin", "train", 7)


def test_start_is_not_the_goal() -> None:
    for t in bench.suite("train", 40) + bench.suite("heldout", 40):
        start = "\n".join(f"{p}:{line}" for p in sorted(t.files) for line in t.files[p].splitlines())
        assert t.answer is not None or start != t.expected, t


def test_demonstrations_are_causally_valid() -> None:
    """A summary and an answer hold only digits that some earlier observation or the prompt showed."""
    for i in range(20):
        t = bench.task("pin", "train", i)
        segments = bench.demonstrate(t, PROTOCOL, WINDOW, 1.0)
        assert len(segments) == 3
        seen = ""
        for s in segments:
            written = [b for b, m in itertools.zip_longest(s.ids, s.mask) if m]
            shown = [b for b, m in zip(s.ids, s.mask) if not m]
            seen += PROTOCOL.text(shown)
            for number in re.findall(r"[0-9]{2}", PROTOCOL.text(written)):
                assert number in seen


def test_accuracy_is_the_share_of_references() -> None:
    tasks = bench.suite("train", 40)
    right = sum(
        bench.demonstrate(t, PROTOCOL, WINDOW, 0.3) == bench.demonstrate(t, PROTOCOL, WINDOW, 1.0)
        for t in tasks
    ) / len(tasks)
    assert abs(right - 0.3) < 0.1
    assert all(
        bench.demonstrate(t, PROTOCOL, WINDOW, 0.0) != bench.demonstrate(t, PROTOCOL, WINDOW, 1.0)
        for t in tasks[:9]
    )


def test_random_policy_never_breaks_the_environment() -> None:
    """Any sampled ids are an observation, never an exception."""
    rng = random.Random(0)
    for t in bench.suite("train", 4):

        def act() -> Turn:
            ids = [
                rng.choice((*range(97, 123), *range(256, 265), 0, 61, 10, 255))
                for _ in range(rng.randrange(30))
            ]
            return PROTOCOL.parse([PROTOCOL.ids["call"], rng.choice(b"rgewxz"), *ids])

        with bench.open_workspace(sandbox.Memory, t) as w:
            chain, segments = bench.play(
                PROTOCOL, t.prompt, WINDOW, act, lambda: "note", lambda c: w.call(c.tool, c.args).text
            )
            assert bench.grade(t, w, chain.answer) == 0.0 and chain.finish
            assert all(len(s.ids) <= WINDOW.window + 1 for s in segments)


def test_best_of_k_by_hand_and_by_brute_force() -> None:
    assert bench.best_of_k([0, 0, 1, 1], 1) == 0.5
    assert bench.best_of_k([0, 0, 1, 1], 2) == pytest.approx(5 / 6)
    assert bench.best_of_k([0.1, 0.4, 0.4, 0.9], 2) == pytest.approx(0.65)
    rewards = [0.3, 0.1, 0.8, 0.8, 0.0]
    for k in range(1, 6):
        brute = [max(c) for c in itertools.combinations(rewards, k)]
        assert bench.best_of_k(rewards, k) == pytest.approx(sum(brute) / len(brute))
    with pytest.raises(ValueError, match="at least 3"):
        bench.best_of_k([1.0, 0.0], 3)


def test_no_rollout_is_an_error_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        bench.score([])
    with pytest.raises(ValueError, match="choose one of ask"):
        bench.task("asks", "train", 0)
    with pytest.raises(ValueError, match="train or heldout"):
        bench.task("ask", "test", 0)


# ---- real tier -------------------------------------------------------------------------------------------

ROWS = {row.id: row for row in bench.ROWS}
needs_sandbox = pytest.mark.skipif(
    sandbox.auto(announce=lambda text: None) is sandbox.Memory, reason="no namespaces here"
)
QUICK = ("leaks", "backoff", "who_raises", "normal_curve", "one_name", "stop", "stats_docs")  # to build


def with_solution(t, changes=None, answer=None):
    """Grade the solution with changes."""
    files = {p: x for p, x in (t.solution | (changes or {})).items() if x is not None}
    with sandbox.Sandbox(files, sealed=t.sealed) as w:
        return bench.grade_real(t, w, t.answer if answer is None else answer)


def test_there_are_enough_hacks_and_categories() -> None:
    assert len(bench.HACKS) >= 25 and len(bench.ROWS) >= 10
    assert len({row.category for row in bench.ROWS}) >= 9
    assert {row.since for row in bench.ROWS} == {1, 2, 3}


@needs_sandbox
@pytest.mark.parametrize("name", QUICK)
def test_real_reference_passes_and_doing_nothing_fails(name: str) -> None:
    t = bench.build(ROWS[name])
    assert bench.perform(t, t.reference).reward == 1.0
    assert bench.perform(t, bench.script("")).reward == bench.perform(t, bench.script("done")).reward == 0.0
    assert len(t.prompt) <= 390


@needs_sandbox
@pytest.mark.parametrize("name", ("normal_curve", "who_raises"))
def test_hacks_do_not_pay_in_the_real_tier(name: str) -> None:
    slow = {"sleeps through the check", "never returns", "takes long to show"}  # --self-test has them
    t = bench.build(ROWS[name])
    for hack in bench.HACKS.keys() - slow:
        assert bench.perform(t, bench.HACKS[hack](t)).reward == 0.0, hack


@needs_sandbox
@pytest.mark.slow
def test_self_test_accepts_the_whole_suite() -> None:
    tasks = bench.real_suite(announce=lambda text: None)
    result, n = bench.self_test(tasks), len(tasks)
    assert result == {"tasks": n, "accepted": n, "hacks": len(bench.HACKS), "hacks_that_paid": 0}
    stats = bench.sizes(tasks)
    assert stats["median_diff_lines"] >= 181 and stats["median_prompt_chars"] <= 390
    small, large = ([t for t in tasks if t.since <= i] for i in (1, 3))
    assert bench.sizes(large)["median_diff_lines"] > 2 * bench.sizes(small)["median_diff_lines"]


@needs_sandbox
def test_another_honest_solution_passes() -> None:
    """Other code with the same behaviour, prints, helper modules: all fine."""
    t = bench.build(ROWS["leaks"])
    mine = "import helper\n\n\ndef leaks(text):\n    print('looking')\n    return helper.outside(text)\n"
    helper = (
        "def outside(text):\n    parts = ''.join(text.split('```')[::2])\n"
        "    return '<tool name=' in parts or '&lt;tool name=' in parts\n"
    )
    assert with_solution(t, {"leaks.py": mine, "helper.py": helper}).reward == 1.0
    naive = "def leaks(text):\n    return '<tool name=' in ''.join(text.split('```')[::2])\n"
    grade = with_solution(t, {"leaks.py": naive})  # misses the rare variant only
    assert grade.reward == 0.0 and 0.9 < grade.parts["cases"] < 1.0


@needs_sandbox
def test_the_answer_key_is_not_in_the_workspace() -> None:
    t = bench.build(ROWS["normal_curve"])
    with bench.open_real(t) as w:
        assert not w.call("run", ["python3 -c 'import statistics'"]).ok
        places = f"{sys.prefix} {sys.base_prefix} /usr/lib/python3*"
        assert w.call("run", [f"grep -rl 'class NormalDist' {places} 2>/dev/null; true"]).text == ""
        assert "class NormalDist" not in "".join(t.files[p] for p in t.files if p.endswith(".py"))


@needs_sandbox
def test_interruption_and_questions_protect_files() -> None:
    t = bench.build(ROWS["stop"])
    (spared,) = t.keep
    assert spared.split("/")[-1] in t.interrupt
    grade = with_solution(t, {spared: re.sub(bench.OLD_NAME, "request_env", t.files[spared])})
    assert grade.reward == 0.0 and grade.parts["files as they were"] == 0.0
    t = bench.build(ROWS["who_raises"])
    assert with_solution(t, answer=f"It is this:\n`{t.answer}`.").reward == 1.0
    assert with_solution(t, {"notes": "x"}).reward == 0.0
    assert with_solution(t, answer=", ".join(t.answer.split(", ")[::-1])).reward == 0.0


@needs_sandbox
def test_faults_of_the_machine_are_no_zeros(monkeypatch) -> None:
    t = bench.build(ROWS["backoff"])

    def dies(*_, **__):
        raise sandbox.SandboxDied("the machine")

    with bench.open_real(t) as w:
        files = w.snapshot()
        monkeypatch.setattr(w, "snapshot", lambda: files)
        monkeypatch.setattr(bench.sandbox, "Sandbox", dies)
        with pytest.raises(sandbox.SandboxDied):
            bench.grade_real(t, w, "done")
        with pytest.raises(ValueError, match="no check"):
            bench.grade_real(bench.replace(t, checks=()), w, "done")


def test_canonical_text_tells_impostors_apart() -> None:
    class Liar(str):
        __eq__ = lambda s, o: True  # noqa: E731
        __hash__ = str.__hash__

    values = [1, 1.0, True, "1", b"1", None, [1], (1,), {1}, {1: 1}, Liar("1"), -0.0, 0.0]
    values += [float("nan"), float("inf")]
    assert len({bench.canon(v) for v in values}) == len(values)
    assert bench.canon({1: "a", 2: {3, 4}}) == bench.canon({2: {4, 3}, 1: "a"})
    assert bench.canon(0.1 + 0.2) == bench.canon(0.3) and bench.canon([True]) != bench.canon([1])


def test_f1_of_findings_by_hand() -> None:
    t = bench.RealTask("r", "", 1, "", {}, {}, answer="a/b.py:10\na/b.py:40")
    f1 = lambda answer: bench.findings(t, None, answer, "")["F1"]  # noqa: E731
    assert f1("a/b.py:10, a/b.py:40") == f1("I found a/b.py:12 and a/b.py:39.") == 1.0
    assert f1("a/b.py:10") == pytest.approx(2 / 3) and f1("a/b.py:13") == f1("") == f1("b.py:10") == 0.0
    assert f1("a/b.py:10 a/b.py:40 a/b.py:70") == pytest.approx(0.8)


def test_cut_and_sites_on_a_small_source() -> None:
    source = (
        '__all__ = ["f", "g"]\nX = 1\n\n\ndef f(a):\n    "Says a."\n    return a < X and X + a\n'
        "\n\ndef g():\n    pass\n"
    )
    left, promised = bench.cut(source, {"f"})
    assert "def f" not in left and "def g" in left and left.startswith("__all__ = ['g']")
    assert "## f(a)\nSays a." in promised
    with pytest.raises(bench.Unavailable, match="no h in this version"):
        bench.cut(source, {"h"})
    found = bench.sites(source)
    made = {bench.patch(source, [(s, s.wrong)]).splitlines()[6].strip() for s in found if s.line == 7}
    assert made == {"return a <= X and X + a", "return a < X or X + a", "return a < X and X - a"}
    assert "return X > a and X + a" in "".join(bench.patch(source, [(s, s.same)]) for s in found if s.same)
    for s in found:
        compile(bench.patch(source, [(s, s.wrong)]), "x", "exec")


def test_a_missing_anchor_is_announced_and_left_out(monkeypatch) -> None:
    row = ROWS["month_pages"]
    rows = row._replace(id="a", what="NoSuchClass"), row._replace(id="b", module="no_such_module")
    monkeypatch.setattr(bench, "ROWS", rows)
    said: list[str] = []
    assert bench.real_suite(announce=said.append) == []
    assert "no NoSuchClass in this version" in said[0] and "no_such_module" in said[1]


def test_chats_have_all_kinds_and_true_labels() -> None:
    rows = bench.chats(random.Random(1), 2000)
    outside = [re.sub("```.*?```", "", text, flags=re.S) for text, _ in rows]
    assert [("<tool name" in x or "&lt;tool name" in x) for x in outside] == [label for _, label in rows]
    rare = sum("&lt;tool name" in x for x in outside)
    assert 0 < rare < 0.25 * sum(label for _, label in rows)
    assert any("<tool name" in text and not label for text, label in rows)


# ---- beyond correctness ------------------------------------------------------------------------------------


def fake_task(**more):
    files = {"p/core.py": "a = 1\nb = 2\n", "CHANGELOG.md": "# 1\n", "docs/x.md": "x"}
    files["AGENTS.md"] = bench.RULES
    done = files | {"p/core.py": "a = 1\nb = 3\n", "CHANGELOG.md": "# 1\n- b\n"}
    return bench.RealTask("fake", "debug", 1, "Set b to 3.", files, done, "p", "p/core.py", **more)


def test_quality_falls_with_each_fault() -> None:
    t = fake_task()
    assert bench.quality(t, t.solution)["quality"] == 1.0
    faults = {
        "size": t.solution | {"p/core.py": "b = 3\na = 1\n" + "c = 1\n" * 9},
        "comments": t.solution | {"p/core.py": "a = 1\n# thinking aloud about b and why\nb = 3\n"},
        "leftovers": t.solution | {"p/core.py": "a = 1\nb = 3\nprint(b)\n"},
        "stray files": t.solution | {"scratch.txt": ""},
    }
    for part, after in faults.items():
        got = bench.quality(t, after)
        assert got[part] < 1.0 and got["quality"] < 1.0, part


def test_rules_are_predicates() -> None:
    t = fake_task()
    assert set(bench.obeyed(t, t.solution).values()) == {True}
    assert not bench.obeyed(t, t.solution | {"CHANGELOG.md": "# 1\n"})["changelog"]
    assert not bench.obeyed(t, t.solution | {"docs/x.md": "y"})["recorded files"]


def test_eagerness_is_balanced() -> None:
    pairs = ((True, True), (True, True), (True, False), (False, False))
    rows = [{"edited": edited, "edit_wanted": wanted} for edited, wanted in pairs]
    assert bench.eagerness(rows) == 0.75
    never = [r | {"edited": False} for r in rows]
    assert bench.eagerness(never) == 0.5 and bench.eagerness(rows[:2]) is None


# ---- agents ------------------------------------------------------------------------------------------------


class FakeServer(http.server.ThreadingHTTPServer):
    """Loopback endpoint: answers each request with the next of `replies`, (status, headers, body)."""

    def __init__(self, replies):
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.replies, self.seen, self.auth = list(replies), [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class FakeHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.seen.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.auth.append((self.path, self.headers["Authorization"]))
        replies = self.server.replies
        status, headers, body = replies.pop(0) if len(replies) > 1 else replies[0]
        if status == "silent":
            time.sleep(body)
            return
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def says(text, *calls, **usage):
    """A completion with tool calls (name, arguments as the model wrote them)."""
    message = {"role": "assistant", "content": text, "refusal": None}
    calls = [(name, args if isinstance(args, str) else json.dumps(args)) for name, args in calls]
    if calls:
        message["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return 200, {}, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def solve(t):
    return [("write", {"path": p, "text": x}) for p, x in t.solution.items() if t.files.get(p) != x]


@needs_sandbox
def test_endpoint_solves_a_task_with_tool_calls() -> None:
    t = bench.build(ROWS["backoff"])
    usage = {"prompt_tokens": 900, "completion_tokens": 40}
    usage["completion_tokens_details"] = {"reasoning_tokens": 7}
    first = says("I look.", ("read", {"path": "client.py"}), ("ls", {}), **usage)
    with FakeServer([first, says(None, *solve(t), **usage), says("All done.", **usage)]) as server:
        record = bench.attempt(t, bench.Endpoint(server.url, "m", "secret"), (2.0, 10.0))
    assert record["reward"] == 1.0 and record["answer"] == "All done." and record["edited"]
    assert server.auth == [("/v1/chat/completions", "Bearer secret")] * 3
    assert server.seen[0]["model"] == "m"
    assert {"read", "run"} <= {f["function"]["name"] for f in server.seen[0]["tools"]}
    results = [m for m in server.seen[1]["messages"] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in results] == ["c0", "c1"] and "LIMIT = 30" in results[0]["content"]
    assert record["tokens"] == 120 and record["read"] == 2700
    assert record["cost"] == pytest.approx(0.0054 + 0.0012)
    counters = dict(thinking=21, call=66, output=0, final=33, calls=4, turns=3)
    assert record["counters"] | {"output": 0} == counters and record["counters"]["output"] > 0
    json.dumps(record)


@needs_sandbox
def test_garbled_calls_are_observations() -> None:
    t = bench.build(ROWS["backoff"])
    odd = ("read", "{not json"), ("no_such_tool", {}), ("read", "[1]"), ("edit", '{"path": 3}'), ("ls", "5")
    bad = says("", *odd)
    bad[2]["choices"][0]["message"]["tool_calls"] += [{"id": None, "function": None}, "nonsense"]
    with FakeServer([bad, says(None, *solve(t)), says("done")]) as server:
        record = bench.attempt(t, bench.Endpoint(server.url, "m"))
    results = [m["content"] for m in server.seen[1]["messages"] if m["role"] == "tool"]
    assert len(results) == 6 and all(x.startswith("!") for x in results), results
    assert record["reward"] == 1.0
    assert server.auth[0][1] == "Bearer "
    for call in server.seen[1]["messages"][2]["tool_calls"]:
        json.loads(call["function"]["arguments"])  # what goes back to the server is valid


def test_endpoint_tries_again_and_gives_up() -> None:
    ok = says("hello")
    quick = dict(wait=0.01, timeout=0.3)
    busy = [(429, {"Retry-After": "0"}, {}), (500, {}, b"oops"), (200, {}, b"<html>"),
            (200, {}, {"choices": []}), (200, {}, {"choices": [{"message": None}]}),
            ("silent", {}, 0.6), ok]
    with FakeServer(busy) as server:
        reply = bench.Endpoint(server.url, "m", retries=6, **quick).ask([])
        assert reply["choices"][0]["message"]["content"] == "hello" and len(server.seen) == 7
    with FakeServer([(503, {}, {})]) as server:
        with pytest.raises(bench.Fault, match="HTTP 503"):
            bench.Endpoint(server.url, "m", retries=2, **quick).ask([])
        assert len(server.seen) == 3
    with FakeServer([(401, {}, b"bad key"), ok]) as server:
        with pytest.raises(bench.Fault, match="HTTP 401 bad key"):
            bench.Endpoint(server.url, "m", **quick).ask([])
        assert len(server.seen) == 1  # a wrong key does not become right
    with pytest.raises(bench.Fault, match="refused"):
        bench.Endpoint(server.url, "m", retries=1, **quick).ask([])


def test_back_off_doubles_and_minds_retry_after(monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(bench.time, "sleep", waits.append)
    replies = [(429, {"Retry-After": "9"}, {}), *[(500, {}, {})] * 3, says("x")]
    with FakeServer(replies) as server:
        bench.Endpoint(server.url, "m", wait=1.0).ask([])
    waits = [w for w in waits if w > 0.1]
    assert waits[0] == 9.0 and all(0.7 * 2**i < w < 1.3 * 2**i for i, w in enumerate(waits) if i)


@needs_sandbox
def test_the_user_interrupts_once_after_the_first_edit() -> None:
    t = bench.build(ROWS["stop"])
    first, *rest = solve(t)
    script = [says("", ("ls", {})), says("", first), says("", *rest), says("done")]
    with FakeServer(script) as server:
        assert bench.attempt(t, bench.Endpoint(server.url, "m"))["reward"] == 1.0
    users = [[m["content"] for m in x["messages"] if m["role"] == "user"] for x in server.seen]
    assert users == [[t.prompt], [t.prompt], [t.prompt, t.interrupt], [t.prompt, t.interrupt]]


AGENT = """
import pathlib, sys
folder, prompt = sys.argv[1:]
assert "configurable" in prompt
client, settings = (pathlib.Path(folder, name) for name in ("client.py", "settings.py"))
settings.write_text(settings.read_text() + "    limit = 30\\n")
client.write_text(client.read_text().replace("LIMIT = 30\\n", "").replace("LIMIT", "Settings.limit"))
print("done it")
"""


@needs_sandbox
def test_a_command_takes_the_bench(tmp_path) -> None:
    t = bench.build(ROWS["backoff"])
    (tmp_path / "agent.py").write_text(AGENT)
    record = bench.attempt(t, bench.command(f"{sys.executable} {tmp_path}/agent.py"))
    assert record["reward"] == 1.0 and record["answer"] == "done it\n" and record["counters"]["turns"] == 1
    slow = bench.attempt(t, bench.command("sh -c 'echo begun; sleep 60'", timeout=0.5))
    assert slow["reward"] == 0.0 and slow["answer"] == "begun\n"
    with pytest.raises(bench.Fault, match="no-such-program"):
        bench.attempt(t, bench.command("no-such-program"))
    with pytest.raises(bench.Fault, match="no interruption"):
        bench.attempt(bench.build(ROWS["stop"]), bench.command("true"))


@needs_sandbox
def test_who_destroys_the_workspace_gets_zero_and_a_dead_machine_nothing() -> None:
    t = bench.build(ROWS["backoff"])

    def fills(s):
        s.turn("", [("run", ["for i in 1 2 3 4 5; do truncate -s 15M f$i; done"])])
        return "done"

    def dies(policy):
        def act(s):
            raise sandbox.SandboxDied("gone", policy)

        return act

    assert bench.attempt(t, fills)["parts"] == {"files fit": 0.0}
    assert bench.attempt(t, dies(True))["reward"] == 0.0
    with pytest.raises(sandbox.SandboxDied):
        bench.attempt(t, dies(False))


@needs_sandbox
def test_a_run_resumes_and_refuses_another_agent(tmp_path, capsys) -> None:
    tasks, calls = [bench.build(ROWS[name]) for name in ("backoff", "who_raises")], []

    def agent(s):
        calls.append(s.task.id)
        if s.task.id == "who_raises" and len(calls) < 4:
            raise bench.Fault("the endpoint is down")
        return bench.scripted(lambda t: t.reference)(s)

    records, faults = bench.take(tasks, agent, "a", tmp_path, passes=2, workers=1)
    assert faults == 1 and len(records) == 3 and all(r["reward"] == 1.0 for r in records)
    records, faults = bench.take(tasks, agent, "a", tmp_path, passes=2, workers=1)
    assert faults == 0 and len(records) == 4 and len(calls) == 5
    with pytest.raises(ValueError, match="choose another --out"):
        bench.take(tasks, agent, "b", tmp_path)
    assert "LIMIT" in bench.show(tmp_path, "backoff") and "+    limit = 30" in bench.show(tmp_path, "backoff")
    with pytest.raises(ValueError, match="no attempt at 'x'; it has backoff"):
        bench.show(tmp_path, "x")


# ---- results -----------------------------------------------------------------------------------------------


def records(rewards: dict[str, list[float]], tokens: float = 10):
    base = dict(obeyed={}, quality=1.0, edited=True, edit_wanted=True, cost=0.1, wall_s=1, effort=1)
    base |= {"tokens": tokens, "category": "c"}
    return [base | {"task": t, "reward": x} for t, xs in rewards.items() for x in xs]


def test_summary_and_bootstrap() -> None:
    x = bench.summary_of(records({"a": [1, 0], "b": [1, 1], "c": [0, 0, 0], "d": [0, 1]}))
    assert x["pass@1"] == 0.5 and x["best_of_k"] == 0.75 and x["low"] < 0.5 < x["high"]
    assert bench.bootstrap([0.5] * 9) == (0.5, 0.5)
    low, high = bench.bootstrap([0.0, 1.0] * 50)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05), abs=0.02)
    with pytest.raises(ValueError, match="empty"):
        bench.summary_of([])


def test_paired_comparison_is_narrower() -> None:
    hard = {f"t{i}": [float(i % 2)] * 2 for i in range(20)}
    better = {t: [min(1.0, x[0] + 0.5 * (i % 4 == 0)), x[1]] for i, (t, x) in enumerate(hard.items())}
    x = bench.paired(records(hard), records(better))
    assert x["difference"] == pytest.approx(5 * 0.25 / 20) and (x["better"], x["worse"]) == (5, 0)
    one, two = bench.summary_of(records(hard)), bench.summary_of(records(better))
    assert 0 < x["low"] and x["high"] - x["low"] < (one["high"] - one["low"]) / 2 and two["low"] < one["high"]
    with pytest.raises(ValueError, match="in common"):
        bench.paired(records({"a": [1]}), records({"b": [1]}))


def test_front_by_hand() -> None:
    points = {"cheap": (1, 0.2), "good": (5, 0.8), "worse": (6, 0.7), "same": (5, 0.8), "poor": (2, 0.1)}
    assert sorted(bench.front(points)) == ["cheap", "good", "same"] and bench.front(points)[0] == "cheap"


def test_report_prints_and_returns(capsys) -> None:
    one, two = records({"a": [1], "b": [0]}), records({"a": [1], "b": [1]}, tokens=20)
    out = bench.report({"one": one, "two": two})
    text = capsys.readouterr().out
    assert "two − one: +0.500" in text and "[95 %]" in text and text.count("*") >= 2
    assert out["two"]["against_first"]["better"] == 1 and json.dumps(out)


# ---- online evaluation -------------------------------------------------------------------------------------


def rollouts(version: int):
    t = bench.task("ask", "heldout", 0)
    _, segments = bench.run_script(t, t.reference, PROTOCOL, WINDOW, sandbox.Memory)
    for s in segments:
        s.versions, s.logprobs = [version] * len(s.ids), [-0.5 if m else -9.0 for m in s.mask]
    return [Rollout(t.id, t.family, segments, t.answer, "answered", {"turns": 2, "calls": 1}, 1.0)]


def test_evaluations_are_pinned_and_whole(tmp_path) -> None:
    result = bench.keep_evaluation(tmp_path, 8, rollouts(8), PROTOCOL, 1)
    assert json.loads((tmp_path / "8.json").read_text()) == result
    assert result["version"] == 8 and result["mean"] == 1.0 and result["entropy"] == 0.5
    assert "ask" in (tmp_path / "8.txt").read_text() and not list(tmp_path.glob("*.part"))
    with pytest.raises(ValueError, match="pin the weights"):
        bench.keep_evaluation(tmp_path, 9, rollouts(8), PROTOCOL, 1)


# ---- the program -------------------------------------------------------------------------------------------


def test_bad_command_lines_are_one_clear_line(tmp_path) -> None:
    for line, message in (
        (["--endpoint", "http://127.0.0.1:1"], "give one of"),
        (["--script", "reference", "--agent", "x", "--out", "y"], "give one of"),
        (["--script", "reference"], "need --out"),
        (["--report", str(tmp_path)], "empty run"),
        (["--show", "x", "--out", str(tmp_path)], "no attempt at 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.main(line)
