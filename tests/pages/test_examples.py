"""The Python of every page runs and prints what it says."""

from tests.support.pages import PROGRAMS, ROOT, each, run_python


@each(PROGRAMS)
def test_python_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    """In a folder that shows the checkout, and takes what a page writes."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    run_python(page)
