"""The Python of every page runs and prints what it says."""

from tests.support.pages import PROGRAMS, ROOT, each, run_python


@each(PROGRAMS)
def test_python_runs_and_prints_what_it_says(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    run_python(page)
