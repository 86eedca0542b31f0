"""How long a first request waits for programs: seconds to trace, to lower and to compile them, by method.

Programs kept from before are not used. A prompt is read, compressed and answered with eight tokens.

Usage: python scripts/benchmarks/compile_times.py --model smollm2 --methods centroidkv,auto --ratio 0.125
"""

from collections import defaultdict
from typing import Annotated, Any

import jax
import jax.monitoring
import typer
from rich.console import Console
from rich.table import Table

import clusterkv_jax as ckv

PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
Times = dict[str, dict[str, list[float]]]


def first_request(model: ckv.Model, method: str, ratio: float, tokens: int, noted: Times) -> Times:
    """Seconds of each phase, by program; functions that are traced within another program are part of its time."""
    share = None if method == "full" else ratio
    jax.clear_caches()
    noted.clear()
    ckv.generate(model, [[1 + i % 200 for i in range(tokens)]], method=method, max_new_tokens=8, ratio=share)
    return {name: phases for name, phases in noted.items() if phases["compile"]}


def table_of(times: Times, title: str, least: float) -> tuple[Table, int, float]:
    """The programs of at least so many seconds, the number of all, and their seconds."""
    table = Table("program", "compiled", *PHASES.values(), title=title)
    sums = {name: [sum(phases[phase]) for phase in PHASES.values()] for name, phases in times.items()}
    for name, seconds in sorted(sums.items(), key=lambda item: -sum(item[1])):
        if sum(seconds) >= least:
            table.add_row(name, str(len(times[name]["compile"])), *(f"{x:.1f}" for x in seconds))
    programs = sum(len(phases["compile"]) for phases in times.values())
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    table.add_row("all", str(programs), *(f"{x:.1f}" for x in total))
    return table, programs, sum(total)


def main(
    model: Annotated[str, typer.Option(help="A model as 'clusterkv generate' takes it.")] = "smollm2",
    methods: Annotated[str, typer.Option(help="Methods between commas; the others are compared with the first.")] = (
        "centroidkv,auto"
    ),
    ratio: Annotated[float, typer.Option(help="Share of the cache.")] = 0.125,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    least: Annotated[float, typer.Option(help="Show programs that take at least so many seconds.")] = 0.5,
) -> None:
    """Print a table a method, and how many times as long as the first method the others compile."""
    jax.config.update("jax_enable_compilation_cache", False)
    noted: Times = defaultdict(lambda: defaultdict(list))

    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event in PHASES:
            name = str(kwargs.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
            noted[name][PHASES[event]].append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    network, console, first = ckv.load(model), Console(), None
    for method in methods.split(","):
        times = first_request(network, method, ratio, tokens, noted)
        table, programs, seconds = table_of(times, f"{method} at {ratio:g}", least)
        first = seconds if first is None else first
        console.print(table)
        console.print(f"{method}: {seconds:.1f} s for {programs} programs, {seconds / first:.2f} times the first\n")


if __name__ == "__main__":
    typer.run(main)
