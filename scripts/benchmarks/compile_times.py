"""How long a first request waits for programs: seconds to trace, to lower and to compile them, by method.

Programs kept from before are not used. A prompt is read, compressed and answered with eight tokens; with `--engine` by
an engine of 16 slots, which is asked a question about it. Of a packaged shape, such as llama-3.1-8b, weights are
random, and so are the shares that `auto` gives its heads.

Usage: python scripts/benchmarks/compile_times.py --model smollm2 --methods centroidkv,auto --ratio 0.125
       python scripts/benchmarks/compile_times.py --model llama-3.1-8b --methods centroidkv,auto
"""

from collections import defaultdict
from dataclasses import replace
from typing import Annotated, Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.benchmark.own_runner import random_params
from clusterkv_jax.planning.shapes import model_config, packaged_shapes
from clusterkv_jax.presets import completed, method_for

PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
Times = dict[str, dict[str, list[float]]]


def the_model(name: str) -> ckv.Model:
    """The model, or a packaged shape with random weights."""
    if name not in packaged_shapes():
        return ckv.load(name)
    config = model_config(name)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.dtype(config.dtype)
    return ckv.Model(random_params(config, dtype), config, None, None, name)


def the_method(model: ckv.Model, name: str, ratio: float) -> Any:
    """The method as it is completed for the model; heads of `auto` without a calibration get shares of a fixed draw."""
    method: Any = completed(model, method_for(model, name, ratio=None if name == "full" else ratio))
    if name != "auto" or method.budget.shares is not None:
        return method
    draw = np.random.default_rng(0).lognormal(0, 0.5, (len(model.config.global_layers), model.config.num_kv_heads))
    shares = tuple(map(tuple, (draw / draw.mean()).tolist()))
    return replace(method, budget=replace(method.budget, shares=shares))


def first_request(model: ckv.Model, method: Any, tokens: int, engine: bool, noted: Times) -> Times:
    """Seconds of each phase, by program; functions that are traced within another program are part of its time."""
    prompt = [1 + i % 200 for i in range(tokens)]
    jax.clear_caches()
    noted.clear()
    if engine:
        served = ckv.Engine(model, method=method, slots=16, max_tokens=tokens + 256, reserve=256, context_bytes=0)
        served.add(prompt, prompt[:32], max_new_tokens=8)
        served.run()
    else:
        ckv.generate(model, [prompt], method=method, max_new_tokens=8)
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
    model: Annotated[str, typer.Option(help="A model as 'clusterkv plan' takes it.")] = "smollm2",
    methods: Annotated[str, typer.Option(help="Methods between commas; the others are compared with the first.")] = (
        "centroidkv,auto"
    ),
    ratio: Annotated[float, typer.Option(help="Share of the cache.")] = 0.125,
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    engine: Annotated[bool, typer.Option("--engine", help="Ask an engine of 16 slots.")] = False,
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
    network, console, first = the_model(model), Console(), None
    for method in methods.split(","):
        times = first_request(network, the_method(network, method, ratio), tokens, engine, noted)
        table, programs, seconds = table_of(times, f"{method} at {ratio:g}", least)
        first = seconds if first is None else first
        console.print(table)
        console.print(f"{method}: {seconds:.1f} s for {programs} programs, {seconds / first:.2f} times the first\n")


if __name__ == "__main__":
    typer.run(main)
