"""The page in a browser: `make test-ui`. Screenshots are left in runs/ui_screenshots."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SHOTS = ROOT / "runs" / "ui_screenshots"


def sibling(path: Path):
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


devtools = sibling(HERE / "devtools.py")
synthetic = sibling(HERE.parent / "synthetic_runs.py")
if devtools.chromium() is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)


@contextmanager
def served(run_dir: Path):
    """The address of the page of a run."""
    command = [sys.executable, "-m", "jaxmux.ui", str(run_dir), "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with devtools.browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(autouse=True)
def no_problems(tab):
    tab.problems.clear()
    yield
    assert tab.problems == []


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The address of a run of 64 tasks in a pipeline, and its directory."""
    path = synthetic.write_run(
        tmp_path_factory.mktemp("runs") / "many", 64, 400, stages=4, steps=520
    )
    with served(path) as address:
        yield address, path


def no_sideways_scrolling(tab) -> bool:
    return tab.value("document.documentElement.scrollWidth <= innerWidth")


def test_demo(tab):
    """Needs the run of `make demo`."""
    run_dir = Path(os.environ.get("JAXMUX_DEMO_RUN", ROOT / "runs" / "demo"))
    if not (run_dir / "rounds.jsonl").exists():
        pytest.skip("runs/demo is missing: make demo")
    with served(run_dir) as address:
        tab.show(address)
        assert tab.value("document.getElementById('status').textContent") == "finished"
        tab.screenshot(SHOTS / "demo.png")
        tab.show(address, dark=True)
        tab.screenshot(SHOTS / "demo_dark.png")
        tab.show(address, 360, 740)
        assert no_sideways_scrolling(tab)
        tab.screenshot(SHOTS / "demo_narrow.png")
        # Otherwise the page would complain that its server has ended.
        tab.call("Page.navigate", url="about:blank")


def test_64_tasks(tab, many):
    address, _ = many
    tab.show(address)
    # docs/figures/run_page.png
    tab.screenshot(SHOTS / "many.png")
    tab.value("document.getElementById('log').click()")
    tab.value("document.getElementById('multiples').click()")
    tab.screenshot(SHOTS / "many_multiples.png")
    assert tab.value("document.querySelectorAll('#grid button').length") == 64
    tab.show(address, 360, 740, dark=True)
    assert no_sideways_scrolling(tab)
    tab.screenshot(SHOTS / "many_narrow_dark.png")


def test_server_of_64_tasks(tab, tmp_path):
    path = synthetic.write_server(tmp_path / "server", 64, 400)
    with served(path) as address:
        tab.show(address)
        own = "[...document.querySelectorAll('#tasks .sub span:first-child')]"
        found = tab.value(f"{own}.map((own) => own.textContent.split(' ')[0])")
        assert found == ["running"] * 48 + ["queued"] * 8 + ["succeeded"] * 8
        selected = "document.querySelectorAll('#tasks [aria-selected=true] .sub span:first-child')"
        assert tab.value(f"[...{selected}].map((own) => own.textContent)") == ["running"] * 5
        assert "tokens computed" in tab.value("document.getElementById('held-note').textContent")
        assert tab.value("document.querySelectorAll('#memory-chart canvas').length") == 1
        tab.screenshot(SHOTS / "server.png")
        tab.show(address, 360, 740)
        assert no_sideways_scrolling(tab)
        tab.screenshot(SHOTS / "server_narrow.png")
        tab.call("Page.navigate", url="about:blank")


def test_search_finds_tasks(tab, many):
    tab.show(many[0])
    tab.value("document.getElementById('search').focus()")
    for letter in "legal":
        tab.press(letter)
    names = "[...document.querySelectorAll('#tasks .name')].map((own) => own.textContent)"
    assert tab.value(names) == [f"legal_{i}" for i in range(8)]
    assert tab.value("document.getElementById('task-count').textContent") == "8 of 64"
    tab.press("Escape")
    assert len(tab.value(names)) == 64


def test_tasks_are_selected_by_keyboard(tab, many):
    tab.show(many[0])
    selected = "document.querySelectorAll('#tasks [aria-selected=true]').length"
    tab.value("document.getElementById('tasks').focus()")
    tab.press("Escape")
    assert tab.value(selected) == 0
    tab.press("ArrowDown", 3)
    tab.press(" ")
    picked = "document.querySelector('#tasks [aria-selected=true] .name').textContent"
    assert tab.value(picked) == "search_0"
    tab.press(" ")
    assert tab.value(selected) == 0


def test_focus_visits_every_control_in_order_and_is_visible(tab, many):
    tab.show(many[0])
    seen = []
    for _ in range(19):
        tab.press("Tab")
        seen.append(tab.value("document.activeElement.id || document.activeElement.tagName"))
        width = tab.value("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
        assert width > 0, seen[-1]
    wanted = ["search", "sort", "tasks", "smooth", "log", "held", "multiples"]
    places = [seen.index(name) for name in wanted]
    assert places == sorted(places)
    assert seen.count("CANVAS") == 3


def test_arrow_keys_move_the_crosshair(tab, many):
    tab.show(many[0])
    tab.value("document.querySelector('#loss-chart canvas').focus()")
    tab.press("ArrowLeft", 2)
    tip = "document.getElementById('tip').textContent"
    assert "step 398" in tab.value(tip)
    tab.press("Escape")
    assert tab.value("document.getElementById('tip').hidden")


def test_page_follows_a_growing_file(tab, many):
    address, path = many
    tab.show(address)
    lines = [synthetic.update(400, "billing_0", 0.25, time.time())]
    synthetic.append(path / "metrics.jsonl", *lines)
    row = "document.querySelector('#tasks li .loss').firstChild.textContent"
    tab.wait(f"{row} === '0.25'")


def test_pipeline_is_shown(tab, many):
    tab.show(many[0])
    tab.wait("!document.getElementById('schedule').hidden")
    assert "passes on 4 stages" in tab.value("document.getElementById('schedule-note').textContent")


def test_hover_highlights_one_task(tab, many):
    tab.show(many[0])
    box = tab.value(
        "(() => { const b = document.querySelectorAll('#tasks li')[2].getBoundingClientRect();"
        " return [b.x + 20, b.y + 10]; })()"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    tab.settle()
    assert tab.value("document.querySelectorAll('#tasks li.hot').length") == 1


def selected_names(tab):
    own = "[...document.querySelectorAll('#tasks [aria-selected=true] .name')]"
    return tab.value(f"{own}.map((name) => name.textContent)")


def click(tab, selector):
    tab.value(f"document.querySelector({selector!r}).click()")
    tab.settle()


def test_address_keeps_what_the_page_shows(tab, many):
    tab.show(many[0])
    assert tab.value("location.search") == ""
    tab.value("document.getElementById('tasks').focus()")
    tab.press("Escape")
    tab.press("ArrowDown", 2)
    tab.press(" ")
    for button in ("smooth", "log", "multiples"):
        click(tab, f"#{button}")
    tab.value("document.getElementById('sort').value = 'loss'")
    tab.value("document.getElementById('sort').dispatchEvent(new Event('change'))")
    tab.value("document.getElementById('search').focus()")
    for letter in "legal":
        tab.press(letter)
    for _ in range(3):
        click(tab, "#earlier")
    tab.wait("document.getElementById('round-unit').textContent !== ''")
    shown = "[...document.querySelectorAll('#tasks .name')].map((name) => name.textContent)"
    state = (
        "[...document.querySelectorAll('[aria-pressed=true][id]')].map((own) => own.id)"
        ".concat(document.getElementById('sort').value, document.getElementById('round-unit')"
        ".textContent, document.getElementById('search').value)"
    )
    names, before = tab.value(shown), tab.value(state)
    assert "newest" not in before and names != sorted(names) and selected_names(tab) == ["legal_0"]
    tab.show(tab.value("location.href"))
    tab.wait("document.getElementById('round-unit').textContent !== ''")
    assert tab.value(state) == before
    assert tab.value(shown) == names and selected_names(tab) == ["legal_0"]
    # An address may name what is not there, or be nonsense.
    tab.show(many[0] + "?select=nobody&select=legal_1&sort=worst&smooth=2&round=x")
    assert selected_names(tab) == ["legal_1"]
    assert tab.value("document.getElementById('sort').value") == "given"


def test_colour_of_a_task_does_not_depend_on_what_else_is_selected(tab, many):
    def colour(name, selected):
        tab.show(many[0] + "?" + "&".join(f"select={own}" for own in selected))
        own = "[...document.querySelectorAll('#tasks li')]"
        own += f".find((li) => li.dataset.name === {name!r})"
        return tab.value(f"{own}.querySelector('.swatch').style.backgroundColor")

    alone = colour("legal_0", ["legal_0"])
    assert alone == colour("legal_0", ["search_3", "legal_1", "legal_0"]) != ""
    assert alone != colour("search_0", ["search_0", "legal_0"])


def test_smoothing_is_a_mean_of_both_sides_with_weights_that_sum_to_one(tab, many):
    """Against the definition, at each point the sum of weights times values by weights. A line
    stays where it is, but at its ends."""
    import numpy as np

    tab.show(many[0])
    numbers = np.random.default_rng(0)
    xs, ys = np.cumsum(numbers.integers(1, 5, 60)), numbers.normal(2, 1, 60)
    call = "import('/static/chart.js').then((own) => own.smoothed({}, {}))"
    found = tab.value(call.format(xs.tolist(), ys.tolist()))
    weights = np.exp(-np.abs(xs[None] - xs[:, None]) / ((xs[-1] - xs[0]) / 50))
    np.testing.assert_allclose(found, weights @ ys / weights.sum(1), rtol=1e-9)
    np.testing.assert_allclose(tab.value(call.format(xs.tolist(), [3.0] * 60)), 3.0)
    line = np.arange(500)
    found = tab.value(call.format(line.tolist(), (-line).tolist()))
    np.testing.assert_allclose(found[200:300], -line[200:300], atol=0.01)
    assert tab.value(call.format([7], [2.5])) == [2.5]


def test_task_is_opened_by_click_or_enter_and_closed_by_escape(tab, many):
    tab.show(many[0])
    is_open = "document.getElementById('detail').open"
    tab.value("document.getElementById('tasks').focus()")
    tab.press("ArrowDown", 2)
    before = selected_names(tab)
    tab.press("Enter")
    assert tab.value(is_open) and "task=legal_0" in tab.value("location.search")
    rows = "document.querySelectorAll('#detail-specification tr')"
    tab.wait(f"{rows}.length > 1")
    found = tab.value(f"[...{rows}].map((row) => [...row.children].map((c) => c.textContent))")
    assert found == [["adapter.kind", "lora"], ["adapter.rank", "16"], ["steps", "520"]]
    label = "document.querySelector('#detail-{} canvas').getAttribute('aria-label')"
    tab.wait(f"{label.format('rate')}.includes('learning rate 0.001')")
    assert "norm 1" in tab.value(label.format("norm")) and "loss 0." in tab.value(
        label.format("loss")
    )
    tab.screenshot(SHOTS / "task.png", whole=False)
    tab.press("Escape")
    tab.wait(f"!{is_open} && location.search === ''")
    # Opening has not changed the selection.
    assert selected_names(tab) == before
    click(tab, "#tasks li .name")
    assert tab.value("document.getElementById('detail-name').textContent") == "billing_0"
    tab.show(tab.value("location.href"), 390, 844, dark=True)
    assert tab.value(is_open) and no_sideways_scrolling(tab)
    assert tab.value("detail.scrollWidth <= detail.clientWidth")
    tab.screenshot(SHOTS / "task_narrow_dark.png", whole=False)
    click(tab, "#detail-close")
    tab.wait(f"!{is_open} && location.search === ''")


def test_sweep_has_the_table_and_the_ranking_of_sweep_json(tab, tmp_path):
    from jaxmux.runs.sweep_results import ranked, result_of

    path = synthetic.write_sweep(tmp_path / "swept", (4, 8, 16), (1e-4, 2e-4, 5e-3))
    values = json.loads((path / "run.json").read_text())["sweeps"]["pirate"]["values"]
    results = json.loads((path / "summary.json").read_text())["tasks"]
    for own in results.values():
        own |= {"eval_target_tokens": 9}
    summary = SimpleNamespace(tasks=results, sweeps={"pirate": values})
    task = SimpleNamespace(best_metric="loss")
    order = ranked(SimpleNamespace(name="pirate", task=task), summary)
    with served(path) as address:
        tab.show(address, 1280, 900)
        rows = "[...document.querySelectorAll('#sweeps tbody tr')]"
        found = tab.value(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")
        assert [row[1] for row in found] == [str(values[n]["adapter.rank"]) for n in order]
        assert [float(row[2]) for row in found] == [
            values[name]["optimizer.learning_rate"] for name in order
        ]
        assert [row[-1] for row in found] == [result_of(results[name]) for name in order]
        losses = [results[name]["eval_loss"] for name in order]
        assert [float(row[-2]) for row in found] == pytest.approx(losses, rel=1e-3)
        assert "steps 10, 20" in tab.value("document.querySelector('#sweeps .unit').textContent")
        plots = tab.value("[...document.querySelectorAll('#sweeps h3')].map((h) => h.textContent)")
        assert plots == list(values[order[0]])
        # Names that are alike in long parts have different labels, on small multiples too.
        click(tab, "#multiples")
        labels = tab.value(
            "[...document.querySelectorAll('#grid b')].map((own) => own.textContent)"
        )
        assert labels[:2] == ["4, 1e-4, all…", "4, 1e-4, q_p…"]
        assert len(set(labels)) == len(values) == 18
        tab.screenshot(SHOTS / "sweep.png")
        click(tab, "#sweeps tbody button")
        assert tab.value("document.getElementById('detail-name').textContent") == order[0]
        tab.show(address, 390, 844, dark=True)
        assert no_sideways_scrolling(tab)
        tab.screenshot(SHOTS / "sweep_narrow_dark.png")
        tab.call("Page.navigate", url="about:blank")


def test_labels_tell_names_apart_wherever_they_differ(tab, many):
    tab.show(many[0])
    long = "a-rather-long-name-of-a-customer"
    groups = [
        [f"{long}-{i}" for i in range(30)],
        [f"{i}-{long}" for i in range(30)],
        [f"{long}-{i}-{long}" for i in range(30)],
        [long, f"{long}-{long}", f"{long}-{long}-{long}"],
        [f"{long}{a}{long}{b}{long}" for a in "xyz" for b in "uvw"],
        ["a" * n for n in range(20, 60)],
        [f"acme.config_lr_0.{i:03}" for i in range(40)] + ["short", "other"],
        ["one"],
        [],
    ]
    call = "import('/static/format.js').then((own) => [...own.labelsOf({}, {{}}, 17).values()])"
    for names in groups:
        labels = tab.value(call.format(json.dumps(names)))
        assert len(set(labels)) == len(labels) == len(names), labels
        assert all(len(label) <= 17 for label in labels), labels


def test_a_failed_run_shows_why_and_a_task_its_answers(tab, tmp_path):
    from jaxmux.runs.run_directory import FolderLock

    path = synthetic.write_run(tmp_path / "failed", 3, 30, steps=90)
    answers = {0: " nothing\n<b>", 30: " a chat"}
    synthetic.append(
        path / "samples.jsonl",
        *(
            {"task": "legal_0", "task_step": step, "prompt": "le?", "completion": text, "time": 1.0}
            for step, text in answers.items()
        ),
    )
    FolderLock(path).close(error=MemoryError())
    with served(path) as address:
        tab.show(address + "?task=legal_0", 390, 844)
        text = "document.getElementById('{}').textContent"
        assert tab.value(text.format("status")) == "failed"
        why = "The process failed: the host has no memory left"
        assert tab.value(text.format("failure")) == why
        states = "[...document.querySelectorAll('#tasks .sub:not(.ill) span:first-child')]"
        found = tab.value(f"{states}.map((own) => own.textContent.split(' ')[0])")
        assert found == ["stopped"] * 3
        tab.wait("!document.getElementById('detail-answers').hidden")
        cells = "[...document.querySelectorAll('#detail-samples dl > *')]"
        assert tab.value(f"{cells}.map((own) => own.textContent)") == [
            *("prompt", "le?"),
            *("without the adapter", answers[0]),
            *("after step 30", answers[30]),
        ]
        assert no_sideways_scrolling(tab)
        tab.call("Page.navigate", url="about:blank")
