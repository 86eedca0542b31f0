"""The table of kvpress's answers says what is held and seen, which need not be the same."""

from tests.support.scripts import script

study = script("studies/kvpress_scores.py")


def line(method, budget, score, *, rows, nbytes, name):
    asked = {"task": "niah_single_1", "id": name, "metric": "string_match_all", "facts": {}, "tokens": 100, "cut": 0}
    took = {"rows": rows, "cache_bytes": nbytes, "seconds": 1.0, "compressed": True}
    return {"method": method, "budget": budget, "score": score, **asked, **took}


def test_bytes_are_beside_those_of_the_full_cache_and_rows_beside_its_tokens():
    lines = [
        line("masks", "0.25", 1.0, rows=25.0, nbytes=800, name="a"),
        line("drops", "0.25", 0.0, rows=30.0, nbytes=240, name="a"),
        line("full", "1.0", 1.0, rows=100.0, nbytes=800, name="a"),
        line("full", "1.0", 1.0, rows=100.0, nbytes=1600, name="b"),
    ]
    _, _, full, drops, masks, *said = study.markdown(lines).splitlines()
    assert full == "| full | 100% | 100.0 (34-100) | 100.0% | 100.0% |"
    assert drops == "| drops | 25% | 0.0 (0-79) | 30.0% | 30.0% |"
    assert masks == "| masks | 25% | 100.0 (21-100) | 100.0% | 25.0% |"
    assert "Not all examples are answered by masks 25%, drops 25%" in " ".join(said)
