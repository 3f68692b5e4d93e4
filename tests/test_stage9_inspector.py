"""The inspector: what is in a trace, that it is the engine's state, and the page that plays it, in a real browser."""

import json
import random
import re
import shutil
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from common.config import EngineConfig, UserError
from stage2_req.build import build_engine as build_stage2
from stage2_req.params import SamplingParams
from stage3_kvcache.build import build_engine as build_stage3
from stage4_batch.build import build_engine as build_stage4
from stage5_paged.build import build_engine as build_stage5
from stage6_cudagraph.build import build_engine as build_stage6
from stage7_radix.build import build_engine as build_stage7
from stage7_radix.params import RequestParams
from stage9_server.inspector import live
from stage9_server.inspector.chrome import events
from stage9_server.inspector.messages import Inspect
from stage9_server.inspector.reader import State, parse
from stage9_server.inspector.record import SCENARIOS
from stage9_server.inspector.show import show
from stage9_server.inspector.trace import VERSION, Trace, geometry, rows_of, runs
from stage9_server.local_server import running
from tests.conftest import PROFILE
from tests.ranks import build_ranks

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "stage9_server" / "inspector"
CHROMIUM = shutil.which("chromium")
TINY = {"model": "dummy:tiny", "device": "cpu", "dtype": "float32", "max_model_len": 64, "max_running": 5}
SMALL = {"max_batch_tokens": 16, "page_size": 4, "kv_tokens": 88}


def tiny(build):
    engine = build(EngineConfig(**TINY, **SMALL))
    engine.cache.reserve = 1  # so that pages run out
    return engine


def truth(engine) -> tuple:
    """What a trace has to say of the engine: queues, lengths, rows of the page table, nodes of the tree."""
    scheduler, cache = engine.scheduler, engine.cache
    reqs = [*scheduler.waiting, *scheduler.running]
    tree = cache.tree.nodes() if hasattr(cache, "tree") else ()
    return (
        [req.uid for req in scheduler.waiting],
        [req.uid for req in scheduler.running],
        {req.uid: [req.cached_len, req.device_len, len(req.token_ids)] for req in reqs},
        {uid: row.tolist() for uid, row in rows_of(cache).items()},
        sorted((node.locks, node.used, node.pages.tolist()) for node in tree),
    )


def told(state: State) -> tuple:
    lengths = {uid: numbers for uid, (_, *numbers) in state.lengths.items()}
    nodes = sorted((locks, used, pages) for _, locks, used, pages in state.nodes.values())
    return list(state.waiting), list(state.running), lengths, {u: list(r) for u, r in state.rows.items()}, nodes


def history(engine, rng: random.Random, steps: int, after_step) -> None:
    """Random adds, aborts and steps."""
    for _ in range(steps):
        if rng.random() < 0.5:
            prompt = [rng.choice((1, 2))] * rng.choice((3, 9, 17, 30)) + [rng.randrange(9)] * rng.randrange(6)
            engine.add(prompt, SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True))
        live = [req.uid for req in (*engine.scheduler.waiting, *engine.scheduler.running)]
        if live and rng.random() < 0.06:
            engine.abort(rng.choice(live))
        engine.step()
        after_step()


@pytest.mark.parametrize("build", [build_stage5, build_stage7], ids=["stage5", "stage7"])
def test_the_state_after_every_step_can_be_rebuilt(build):
    """The page map of every step, from the trace alone, under random histories; and with it all else that a trace holds."""
    tally, engine, states = {"retracted": 0, "evicted": 0, "hits": 0}, tiny(build), {}
    for number in range(8 if PROFILE.derandomize else 300):
        states.clear()
        with Trace(engine) as trace:

            def note(trace=trace):
                trace.record()
                states[trace.total] = truth(engine)

            history(engine, random.Random(number), 60, note)
        _, lines = parse(trace.dump())
        state = State()
        for i, line in enumerate(lines, 1):
            state.apply(line)
            if i in states:
                assert told(state) == states[i]
            for name in tally:
                tally[name] += len(line.get(name, ()))
        owners = state.page_map(geometry(engine.cache)[1])
        owned = {int(page) for group in engine.cache.owned_pages() for page in group}
        assert {page for page, (kind, _) in enumerate(owners) if kind != "free"} == owned
        for req in [*engine.scheduler.waiting, *engine.scheduler.running]:
            engine.abort(req.uid)
        while engine.has_work():
            engine.step()
    assert tally["retracted"] > 3
    assert build is build_stage5 or (tally["evicted"] > 3 and tally["hits"] > 3)


def test_the_ring_forgets_whole_stretches_and_stays_readable():
    engine = tiny(build_stage7)
    with Trace(engine, max_lines=100) as trace:
        history(engine, random.Random(1), 400, lambda: None)
        trace.record()
        expected = truth(engine)
    _, lines = parse(trace.dump())
    stretch = max(np.diff([i for i, line in enumerate(lines) if line.get("key")]))
    assert len(lines) <= 100 + 2 * stretch and lines[0]["key"] and not trace.lines()[0].startswith(b'{"n":1,')
    state = State()
    for line in lines:
        state.apply(line)
    assert told(state) == expected


@pytest.mark.parametrize("build", [build_stage2, build_stage3, build_stage4, build_stage5, build_stage6], ids="23456")
def test_an_engine_that_is_not_watched_any_more_is_as_before(build):
    engine = tiny(build)
    parts = (engine, engine.scheduler, engine.cache, engine.runner)
    before = [set(vars(part)) for part in parts]
    want = engine.generate([[1] * 9, [2] * 5], SamplingParams(max_tokens=6, ignore_eos=True))
    with Trace(engine) as trace:
        got = engine.generate([[1] * 9, [2] * 5], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [req.output_ids for req in got] == [req.output_ids for req in want]
    assert [set(vars(part)) - {"in_flight"} for part in parts] == [names - {"in_flight"} for names in before]
    lines, total = len(trace.ring), engine.stats().steps
    engine.generate([[3] * 4], SamplingParams(max_tokens=3))
    assert len(trace.ring) == lines and engine.stats().steps > total


def test_two_traces_of_one_engine_are_refused():
    engine = tiny(build_stage5)
    with Trace(engine), pytest.raises(UserError, match="watched already"):
        Trace(engine)
    Trace(engine).close()


def test_an_end_that_comes_late_is_marked():
    """And one that was foreseen is not."""
    engine = tiny(build_stage6)
    text = engine.generate([[7] * 5], SamplingParams(max_tokens=12, ignore_eos=True))[0].output_ids
    stop = next(token for i, token in enumerate(text) if i > 1 and token not in text[:i])
    with Trace(engine) as trace:
        late = engine.add([7] * 5, SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids={stop}))
        foreseen = engine.add([8] * 5, SamplingParams(max_tokens=4, ignore_eos=True))
        while engine.has_work():
            engine.step()
    _, lines = parse(trace.dump())
    ends = {uid: (reason, flag) for line in lines for uid, reason, flag in line.get("ends", ())}
    assert ends == {late: ("stop_token", 1), foreseen: ("max_tokens", 0)}


def test_text_is_in_a_trace_only_where_it_was_asked_for():
    for text, secret in ((None, False), (lambda ids: " ".join(f"word{i}" for i in ids), True)):
        engine = tiny(build_stage7)
        with Trace(engine, text) as trace:
            req = engine.generate([[5] * 9], SamplingParams(max_tokens=4, ignore_eos=True))[0]
        assert (b"word" in trace.dump()) is secret
        header, lines = parse(trace.dump())
        assert header["text"] is secret
        said = "".join(f"{piece} " for line in lines for _, piece in line.get("text", ())).split()
        assert said == ([f"word{i}" for i in req.output_ids] if secret else [])


@pytest.mark.parametrize("text", [False, True], ids=["steps", "text"])
def test_live_with_two_ranks(text, monkeypatch):
    """The lines are rank 0's state; the other rank, which nobody watches, keeps step. Without onlookers there is no trace."""
    monkeypatch.setattr(live, "EVERY", 0.0)
    monkeypatch.setattr(live, "SHARE", 1.0)  # a line for every step
    engine = build_ranks(EngineConfig(**TINY, **SMALL), 2)
    unwatched = set(vars(engine.engine)) | {"in_flight"}
    watching, lines = live.Watching(engine, "dummy:tiny"), []
    assert watching.news() is None
    watching.handle(Inspect(on=True, text=text))
    for token in (1, 2, 3):
        engine.add([token] * 9, RequestParams(max_tokens=6, ignore_eos=True))
    while engine.has_work():
        engine.step()
        news = watching.news()
        lines += news.lines
        state = State()
        for line in parse(b"\n".join([news.header, *lines]))[1]:
            state.apply(line)
        assert told(state) == truth(engine.engine)
    assert len(lines) > 6 and (b'"text":[[' in b"".join(lines)) is text
    watching.handle(Inspect(on=False))
    assert watching.news() is None and set(vars(engine.engine)) <= unwatched
    engine.close()


def test_runs():
    assert runs([4, 5, 6, 2, 9, 10]) == [4, 3, 2, 1, 9, 2]
    assert runs([]) == []


def test_what_is_no_trace_is_refused():
    engine = tiny(build_stage5)
    with Trace(engine) as trace:
        engine.generate([[1] * 5], SamplingParams(max_tokens=3))
    whole = trace.dump()
    for data in (b"", b"hello", b"[1]\n", whole[:-20], b'{"schema":"another","version":1}\n'):
        with pytest.raises(UserError, match="no trace"):
            parse(data)
    newer = whole.replace(b'"version":%d' % VERSION, b'"version":%d' % (VERSION + 1))
    with pytest.raises(UserError, match="update the repository"):
        parse(newer)


def test_a_trace_for_perfetto():
    engine = tiny(build_stage6)
    with Trace(engine) as trace:
        engine.generate([[1] * 9, [2] * 5], SamplingParams(max_tokens=6, ignore_eos=True))
    found = events(parse(trace.dump())[1])
    json.dumps(found)
    by = {phase: [e for e in found if e["ph"] == phase] for phase in "XbeC"}
    assert {e["name"] for e in by["X"]} >= {"schedule", "launch", "wait", "update", "step 0"}
    assert sorted(e["id"] for e in by["b"]) == sorted(e["id"] for e in by["e"]) != []
    assert all(e["dur"] >= 0 for e in by["X"])


def test_a_notebook_shows_the_page_for_the_engine_in_hand():
    engine = tiny(build_stage5)
    trace = Trace(engine)
    engine.generate([[1] * 9], SamplingParams(max_tokens=6, ignore_eos=True))
    page = show(trace)._repr_html_()
    assert page.startswith("<iframe") and "inspector.open(" in page and page.count("grown") >= 3
    trace.close()


def scenario_files() -> dict[str, dict]:
    """number -> what the script hands over."""
    found = {}
    for path in sorted((FOLDER / "scenarios").glob("*.js")):
        found[path.stem] = json.loads(path.read_text().removeprefix("inspector.scenario(").rstrip().removesuffix(");"))
    return found


def test_scenarios_are_small_and_whole():
    for number, scenario in scenario_files().items():
        assert number in SCENARIOS
        assert (FOLDER / "scenarios" / f"{number}.js").stat().st_size < 100_000
        assert len(scenario["captions"]) >= 2
        for take in scenario["takes"]:
            parse(b"\n".join(json.dumps(line).encode() for line in take["lines"]))
        for note in scenario["captions"]:
            line = scenario["takes"][note["take"]]["lines"][note["step"] + 1]  # the first is the header
            assert line["n"] == note["n"]
            assert note["en"] and note["zh"]


def test_chapters_open_their_scenarios_at_a_step_that_has_a_caption():
    files, seen = scenario_files(), set()
    for page in sorted(ROOT.glob("stage*/README*.md")):
        for link in re.findall(r"inspector/page\.html#([\w=&;]+)", page.read_text()):
            where = dict(part.split("=") for part in link.replace("&amp;", "&").split("&"))
            places = [(note["take"], note["n"]) for note in files[where["scenario"]]["captions"]]
            assert (int(where.get("take", 0)), int(where["step"])) in places, (page, link)
            seen.add((page.parent.name[5], page.name))
    assert seen == {(number, name) for number in "123456789" for name in ("README.md", "README.zh.md")}


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM:
        pytest.skip("needs Chromium (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A page; at the end it must not have complained."""
    result, complaints = browser.new_page(viewport={"width": 1200, "height": 900}), []
    result.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    result.on("pageerror", lambda error: complaints.append(str(error)))
    yield result
    result.close()
    assert complaints == []


OPEN = "inspector.draw(); return"  # what is asked of the page is asked of what it shows now


def ask(page, expression: str):
    return page.evaluate(f"() => {{ {OPEN} {expression} }}")


def shown(page, name: str) -> int:
    """A number in the row of facts."""
    return int(page.locator(f'[data-fact="{name}"]').inner_text().split()[0].replace(",", ""))


def test_every_scenario_plays_and_its_numbers_are_the_traces(page):
    """One page for all of them: what one has drawn must not stay in the next."""
    page.goto((FOLDER / "page.html").as_uri() + "#lang=en")
    for number, scenario in scenario_files().items():
        for take, recorded in enumerate(scenario["takes"]):
            page.evaluate(f"location.hash = '#lang=en&scenario={number}&take={take}&step=1'")
            page.wait_for_function(f"inspector.trace?.lines.length === {len(recorded['lines']) - 1}")
            state, middle = State(), len(recorded["lines"]) // 2
            pages = recorded["lines"][0]["num_pages"]
            for i, line in enumerate(recorded["lines"][1:]):
                state.apply(line)
                if i not in (0, middle, len(recorded["lines"]) - 2):
                    continue
                page.locator("#slider").fill(str(i))
                rows, nodes, at = ask(
                    page,
                    "[[...inspector.state.rows], [...inspector.state.nodes].map(([id, node]) => [id, node.pages]), inspector.at];",
                )
                assert at == i
                assert dict(map(tuple, rows)) == state.rows
                assert dict(map(tuple, nodes)) == {number: pages for number, (*_, pages) in state.nodes.items()}
                assert page.locator("#step").inner_text() == str(line["n"])
                assert (shown(page, "running"), shown(page, "waiting")) == (len(state.running), len(state.waiting))
                if pages:
                    assert shown(page, "free") == sum(kind == "free" for kind, _ in state.page_map(pages))
    page.locator("#language").click()
    assert page.locator("html").get_attribute("lang") == "zh"
    page.locator("#theme").click()


def test_controls_and_selection(page):
    page.goto((FOLDER / "page.html").as_uri() + "#lang=en&scenario=5")
    page.wait_for_function("inspector.trace")
    page.evaluate("inspector.go(5); inspector.select(null)")
    uid = ask(page, "inspector.state.owner[3];")
    width = int(page.locator("#pages").bounding_box()["width"])
    for x in range(10, width, 6):  # along the first row of the map, until the click meets a page of that request
        page.locator("#pages").click(position={"x": x, "y": 12})
        if ask(page, "inspector.chosen;") == uid:
            break
    assert ask(page, "inspector.chosen;") == uid
    assert f"#{uid}" in page.locator("#detail").inner_text()
    page.keyboard.press("Escape")
    assert ask(page, "inspector.chosen;") is None
    last = len(scenario_files()["5"]["takes"][0]["lines"]) - 2
    for key, at in (("ArrowRight", 6), ("Shift+ArrowRight", 16), ("ArrowLeft", 15), ("Home", 0), ("End", last)):
        page.keyboard.press(key)
        assert ask(page, "inspector.at;") == at
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    page.wait_for_function("inspector.at >= 2")
    page.keyboard.press("Space")
    page.locator("#story .notes button").nth(1).click()
    assert ask(page, "inspector.at;") == scenario_files()["5"]["captions"][1]["step"]


def test_a_newer_or_broken_trace_gets_a_message(page, tmp_path):
    engine = tiny(build_stage7)
    with Trace(engine) as trace:
        engine.generate([[1] * 9], SamplingParams(max_tokens=6, ignore_eos=True))
    whole = trace.dump()
    page.goto((FOLDER / "page.html").as_uri() + "#lang=en")
    cases = [
        (whole.replace(b'"version":1', b'"version":9'), "version 9"),
        (b"no trace\n", "no trace"),
        (whole.splitlines()[0], "no steps"),
        (whole[:-30], f"line {len(whole.splitlines())} can't be read"),
        (b"\n".join([*whole.splitlines()[:1], b'{"n":1,"key":true,"rows":5}']), "line 2"),
    ]
    for data, message in cases:
        page.locator("#file").set_input_files({"name": "t.jsonl", "mimeType": "text/plain", "buffer": data})
        page.wait_for_function("!document.getElementById('message').hidden")
        assert message in page.locator("#message").inner_text()
        page.evaluate("document.getElementById('message').hidden = true")
    page.locator("#file").set_input_files({"name": "t.jsonl", "mimeType": "text/plain", "buffer": whole})
    page.wait_for_function("inspector.trace")
    assert page.locator("#message").is_hidden()


def test_a_live_server_is_followed(page):
    flags = ("--model", "dummy:tiny", "--dtype", "float32", "--port", "0", "--api-key", "sesame", "--inspect", "steps")
    body = {"model": "dummy:tiny", "prompt": [5] * 20, "max_tokens": 400, "ignore_eos": True}
    with running(*flags) as server:
        assert httpx.get(f"{server.url}/inspector/events").status_code == 401
        page.add_init_script("sessionStorage.setItem('inspector-key', 'sesame')")
        page.goto(f"{server.url}/inspector")
        page.wait_for_function("inspector.trace")  # the engine is idle, and its state is there
        call = threading.Thread(
            target=httpx.post,
            args=(f"{server.url}/v1/completions",),
            kwargs={"json": body, "headers": {"Authorization": "Bearer sesame"}, "timeout": 60},
        )
        call.start()
        page.wait_for_function("inspector.state.running.length === 1 && inspector.trace.lines.length > 3")
        assert not ask(page, "inspector.trace.header.text;")
        call.join()
        page.wait_for_function(
            "inspector.state.running.length === 0 && inspector.at === inspector.trace.lines.length - 1"
        )
        page.close()  # before the server ends
