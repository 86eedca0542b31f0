"""The command that measures every aim: what it runs, what it keeps, and how figures become its table."""

import json
import sys

import pytest

from tests.support.scripts import script

LENGTHS = (16384, 32768, 65536, 131072)


@pytest.fixture(scope="module")
def aims():
    return script("benchmarks/aims.py")


def row(method, length, side="clusterkv", **figures):
    cell = {"side": side, "method": method, "length": length, "batch": 1, "budget": None, "cache_dtype": None}
    return {"cell": cell, "failed": None, **figures}


def test_every_aim_has_its_measurements_and_every_command_is_one_of_this_project(aims):
    for found, measurements in ((aims.gpu_aims(), aims.gpu_measurements(10)), (aims.cpu_aims(), aims.CPU_MEASUREMENTS)):
        names = [one.name for one in measurements]
        assert len(set(names)) == len(names)
        assert {name for aim in found for name in aim.of} == set(names)
    scripts = [one.command.split()[1] for one in aims.gpu_measurements(10) if one.command.startswith("python")]
    assert scripts
    assert all((aims.ROOT / path).is_file() for path in scripts)


def test_commands_of_the_benchmark_ask_what_it_takes(aims, tmp_path):
    import clusterkv_jax.cli.benchmark as command

    for one in [*aims.gpu_measurements(6), *aims.CPU_MEASUREMENTS]:
        _, *arguments = one.arguments(tmp_path)
        if not one.command.startswith("clusterkv"):
            continue
        options = {"cache-dtype": "model", "batches": "1", "peers": "transformers", "model": "demo"}
        options |= {"new-tokens": "289", "engine": "0"}
        options |= {name[2:]: value for name, value in zip(arguments[3::2], arguments[4::2], strict=True)}
        asked = command.the_question(
            options["model"], [options["methods"]], [options[x] for x in ("budgets",) if x in options],
            options["lengths"], options["batches"],
            options["peers"], int(options["repeats"]), int(options["new-tokens"]), None,
            (options["cache-dtype"],), int(options["engine"]),
        )  # fmt: skip
        assert asked.entries
        assert (aims.ROOT / options["output"]).resolve() == tmp_path / one.name


def test_a_measurement_is_made_once_and_its_table_read(aims, tmp_path, monkeypatch):
    lines = "| process | compiling |", "|---|---|", "| 1 | 8.30 |", "| 2 | 1.80 |"
    count = "import sys; open(sys.argv[1], 'a').write('x'); print(sys.argv[2])"
    script_file, ran = tmp_path / "count.py", tmp_path / "ran"
    script_file.write_text(count)
    text = "\n".join(["a title", *lines])
    measurements = [aims.Measurement("start", f"python {script_file} {ran} '{text}'")]
    monkeypatch.setattr(aims, "gpu_measurements", lambda full_caches: measurements)
    monkeypatch.setattr(aims, "found_device", lambda: {"platform": "gpu", "name": "a GPU", "jax": "0"})
    monkeypatch.setattr(
        aims, "gpu_aims", lambda: [aims.Aim("compiling", "≤ 3 s", ("start",), lambda r: r[-1]["compiling"])]
    )
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark kept -->\n<!-- end -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["aims", "--output", str(tmp_path / "kept"), "--markdown", str(page)])
    aims.main()
    aims.main()
    assert ran.read_text() == "x"
    assert "| compiling | 1.80 | ≤ 3 s | start |" in page.read_text()
    monkeypatch.setattr(aims, "found_device", lambda: {"platform": "gpu", "name": "another GPU", "jax": "0"})
    aims.main()  # nothing is left to measure, so the table may be printed anywhere
    (tmp_path / "kept" / "start.json").unlink()
    with pytest.raises(SystemExit):
        aims.main()


def test_a_list_of_commands_leaves_nothing_behind(aims, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aims, "found_device", lambda: {"platform": "gpu", "name": "a GPU", "jax": "0"})
    monkeypatch.setattr(sys, "argv", ["aims", "--output", str(tmp_path / "new"), "--list"])
    aims.main()
    assert len(capsys.readouterr().out.splitlines()) == len(aims.gpu_measurements(10))
    assert not (tmp_path / "new").exists()


def test_a_command_that_fails_is_not_kept(aims, tmp_path):
    one = aims.Measurement("start", "python -c 'raise SystemExit(3)'")
    with pytest.raises(SystemExit, match="start ended with status 3"):
        aims.measure(one, tmp_path)
    assert aims.rows_of(one, tmp_path) is None


def test_figures_of_a_gpu(aims, tmp_path):
    def spread(value):
        return {"median": value}

    tokens = [
        row(method, n, ttft=spread(first), tpot=spread(step), over_floor=step / 5)
        for n in LENGTHS
        for method, first, step in (("full", 1.0, 7.5), ("centroidkv", 1.005, 6.0), ("auto", 0.99, 6.6))
    ]
    peers = [row("centroidkv", 65536, tpot=spread(5.0))]
    peers += [row("full", 65536, side, tpot=spread(50.0)) for side in ("transformers", "transformers-static")]
    served = {"of_ideal": spread(0.908), "programs": 0}
    per_second = dict(zip(("full-caches", "bf16", "int8", "eighth"), (400, 1880, 3000, 4800), strict=True))
    benchmarks = {"tokens": tokens, "peers": peers, "engine": [row("centroidkv", 32768, **served)]}
    benchmarks |= {name: [row("any", 65536, tokens_per_s=value)] for name, value in per_second.items()}
    printed = {
        "questions": "| slots | as fast as reading each time |\n|---|---|\n| 16 | 46.3 × |\n",
        "codes": "| rows | of read bandwidth |\n|---|---|\n| bfloat16 | 90% |\n| int8 | 84% |\n| int8 | 76% |\n",
        "needles": "title\n| rows | 12.50% |\n|---|---|\n| none | 0.990 |\n| int8 | 0.984 |\n| int4 | 0.992 |\n",
        "start": "| process | compiling |\n|---|---|\n| 1 | 8.3 |\n| 2 | 1.8 |\n",
    }
    measurements = aims.gpu_measurements(5)
    for one in measurements:
        if one.name in benchmarks:
            (tmp_path / one.name).mkdir()
            (tmp_path / one.name / "results.json").write_text(json.dumps({"rows": benchmarks[one.name]}))
        found = {"command": one.command, "seconds": 1.0, "text": printed.get(one.name, "")}
        (tmp_path / f"{one.name}.json").write_text(json.dumps(found))
    text = aims.table(aims.gpu_aims(), measurements, tmp_path, 5)
    reached = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in text.splitlines()[2:17]}
    assert list(reached.values()) == [
        "1.20 / 1.20 / 1.20 ×", "1.50 / 1.50 / 1.50 ×", "1.10 / 1.10 / 1.10 ×",
        "0.5 / 0.5 / 0.5 / 0.5 %", "− 1.0 / − 1.0 / − 1.0 / − 1.0 %", "10.00 ×", "10.00 ×",
        "4.7 ×", "7.5 ×", "12.0 ×", "91 %, 0 programs compiled meanwhile", "46.3 ×", "84 / 76 %", "− 0.6 / 0.2",
        "1.8 s",
    ]  # fmt: skip
    assert "in the memory of 5 full caches" in text
    (tmp_path / "start.json").unlink()
    assert "| compiling in a second process | not measured | ≤ 3 s | start |" in aims.table(
        aims.gpu_aims(), measurements, tmp_path, 5
    )


def test_what_failed_or_is_missing_has_no_figure(aims, tmp_path, capsys):
    (peers,) = (one for one in aims.gpu_measurements(5) if one.name == "peers")
    rows = [row("centroidkv", 65536), row("full", 65536, "transformers") | {"failed": "transformers has no room."}]
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "results.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "peers.json").write_text(json.dumps({"command": peers.command, "seconds": 1.0, "text": ""}))
    beside = [aim for aim in aims.gpu_aims() if aim.of == ("peers",)]
    growing, static = aims.table(beside, [peers], tmp_path, 5).splitlines()[2:4]
    assert " | failed | " in growing
    assert " | not measured | " in static
    assert "transformers has no room." in capsys.readouterr().err


def test_a_measurement_of_another_command_is_refused(aims, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aims, "found_device", lambda: {"platform": "gpu", "name": "a GPU", "jax": "0"})
    (tmp_path / "bf16.json").write_text(json.dumps({"command": "another", "seconds": 1.0, "text": ""}))
    monkeypatch.setattr(sys, "argv", ["aims", "--output", str(tmp_path), "--only", "bf16"])
    with pytest.raises(SystemExit):
        aims.main()
    assert "holds bf16 of another command: another" in capsys.readouterr().err


def test_figures_of_a_cpu(aims):
    def spread(value):
        return {"median": value}

    rows = [row("full", 4096, tpot=spread(8.0), ttft=spread(1.25))]
    rows += [
        row("full", 4096, side, tpot=spread(16.0), ttft=spread(1.2)) for side in ("transformers", "transformers-static")
    ]
    told = [aim.reached(rows) for aim in aims.cpu_aims()[:2]]
    assert told == ["2.00 ×", "0.96 ×"]
    assert aims.cpu_aims()[2].reached([{"seconds": 21.6}]) == "21.6 s"
