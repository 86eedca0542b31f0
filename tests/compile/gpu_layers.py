"""A prompt's layers, decode steps and experts of a GPU at real shapes, for `gpu_programs.py`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from described import BATCH, BF16, DIM, F32, HEADS, I32, LLAMA, PROMPT, RECALLED

import clusterkv_jax as ckv
from clusterkv_jax.blocks.experts import mixture
from clusterkv_jax.cache.host_store import place
from clusterkv_jax.cache.kinds import alike, with_groups
from clusterkv_jax.cache.layers import groups, take_sequences
from clusterkv_jax.checkpoints.in_codes import code_shapes, kind_of
from clusterkv_jax.decoding import DecodeState, decode_loop
from clusterkv_jax.decoding.appending import step_one_layer
from clusterkv_jax.engine.slot_programs import slot_plans, template
from clusterkv_jax.kernels.weight_codes import QuantisedWeights
from clusterkv_jax.methods.driver import LayerPrompt, compress_layer
from clusterkv_jax.methods.plan import inputs_of_layer, planned_layer, plans_of_width
from clusterkv_jax.methods.prefill_compression import Workspace, _compress_layers, put_into
from clusterkv_jax.models.config import ClampedSwiglu, Experts
from clusterkv_jax.models.decoder import attention_in
from clusterkv_jax.models.parameters import abstract
from clusterkv_jax.planning.shapes import model_config

SHARES = tuple(tuple(0.2 + 0.3 * ((3 * head + layer) % HEADS) for head in range(HEADS)) for layer in range(2))
SHARE = ckv.Budget(ratio=0.2)


def programs(array):
    """Every program by name: the function, its arguments as `array(shape, dtype)` describes them, what it donates."""
    return {name: program for part in (prompts, questions, decoding, experts) for name, program in part(array).items()}


def of_little_memory(array):
    """None of them fills the shared memory of an H100."""
    del array
    return {}


def prompts(array):
    """A layer of a prompt: projected with scores, put among others, and compressed alone or with them."""
    rows, length = array((BATCH, HEADS, PROMPT, DIM), BF16), array((BATCH,), I32)
    number = array((BATCH, HEADS, PROMPT), F32)
    read = LayerPrompt(None, rows, rows, length, scores=number, squares=(number, number))
    workspace = Workspace(jax.tree.map(lambda x: array((2, *x.shape), x.dtype), read), array((), I32))

    def first_layer(method):
        counts = {"reserve": 384, "step_tokens": 1, "max_new_tokens": 384}
        request, plans = plans_of_width(LLAMA, method, BF16, PROMPT, **counts)
        return planned_layer(LLAMA, method, request, np.full(BATCH, PROMPT), plans, 0)

    def compressing(method):
        plan, budgets = first_layer(method)

        def run(k, v, lengths, key):
            return compress_layer(method, LayerPrompt(None, k, v, lengths), budgets, plan, key)

        return run, (rows, rows, length, random_key(array)), ()

    def compressing_at_once(method):
        plan, budgets = first_layer(method)
        return partial(_compress_layers, method, plan.groups[0], (budgets,) * 2), (workspace,), (0,)

    def put(workspace, keys, values, beside):
        """As projections make rows: token after token."""
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (keys, values))
        return put_into(workspace, replace(beside, keys=keys, values=values))

    by_token = array((BATCH, PROMPT, HEADS, DIM), BF16)
    weights = jax.tree.map(lambda spec: array(spec.shape, BF16), abstract(LLAMA)["layers"][0])
    hidden, positions = array((BATCH, 32768, LLAMA.hidden_size), BF16), array((BATCH, 32768), I32)
    return {
        "cluster": compressing(ckv.CentroidKV(SHARE)),
        "cluster by gravity": compressing(ckv.GravityKV(SHARE)),
        "project and score": (
            lambda weights, *args: attention_in(weights, LLAMA, *args, weights["surrogate"]),
            (weights | {"surrogate": surrogate_of(array, LLAMA)}, hidden, positions),
            (),
        ),
        "a layer among two": (
            put,
            (workspace, by_token, by_token, replace(read, keys=None, values=None, squares=None)),
            (0,),
        ),
        "cluster two layers": compressing_at_once(ckv.OrbitKV(SHARE)),
    }


def questions(array):
    """Of 64 tokens, through a layer of two slots, of which an engine asks both at once."""
    return {
        "question": question_to(array, ckv.OrbitKV(SHARE)),
        "question of unequal heads": question_to(array, ckv.OrbitKV(replace(SHARE, shares=SHARES))),
    }


def question_to(array, method):
    """A layer of it, as if its heads might have all slots of the layer."""
    config, slots = replace(LLAMA, num_layers=2), 2
    counts = {"reserve": 384, "step_tokens": 64}
    request, _ = plans_of_width(config, method, BF16, PROMPT, max_new_tokens=384, **counts)
    surrogate = {"surrogate": surrogate_of(array, config)}
    params = jax.tree.map(lambda spec: array(spec.shape, BF16), abstract(config))
    params = params | {"layers": tuple(layer | surrogate for layer in params["layers"])}
    cache, _ = template(params, config, method, slot_plans(config, method, request), PROMPT, **counts)
    held = alike(cache.layers[0], shape_alone=True), cache.state[0]
    layer, state = jax.tree.map(lambda x: array((slots, *x.shape[1:]), x.dtype), held)

    def through(weights, layer, state, *tokens):
        inputs = inputs_of_layer(config, method, 0)
        return step_one_layer(weights, config.of_layer(0), method, inputs, layer, state, tokens[0], None, *tokens[1:])

    tokens = array((slots, 64, config.hidden_size), BF16), array((slots, 64), I32), array((slots, 64), bool)
    return through, (params["layers"][0], layer, state, *tokens), (1, 2)


def random_key(array):
    """A key of random numbers."""
    return array((), jax.eval_shape(lambda: jax.random.key(0)).dtype)


def surrogate_of(array, config):
    """A linear one."""
    return {
        "weights": array((config.hidden_size, config.num_kv_heads), F32),
        "bias": array((config.num_kv_heads,), F32),
    }


def decoding(array):
    """Steps of two layers by methods, types of rows and models."""
    of = partial(decode_of, array)
    recall = ckv.ClusterKV(ckv.Budget(tokens=RECALLED), dense_layers=0)
    windows = {"window": 4096, "sliding_layers": (0,), "local_rope": LLAMA.rope, "soft_cap": 50.0}
    described = {
        "decode": of(ckv.CentroidKV(SHARE)),
        "decode of weights in int4": of(ckv.CentroidKV(SHARE), weights="int4"),
        "decode a batch": of(ckv.CentroidKV(SHARE), batch=24),
        "decode by scores": of(ckv.OrbitKV(SHARE)),
        "decode by shares": of(ckv.OrbitKV(replace(SHARE, shares=SHARES), degree_power=0.5)),
        "decode of int8": of(ckv.CentroidKV(SHARE, cache_dtype="int8")),
        "decode with pages": of(ckv.AdaKV(SHARE)),
        "decode of int4 with pages": of(ckv.AdaKV(SHARE, cache_dtype="int4")),
        "decode with recall": of(recall),
        "decode with sink logits": of(ckv.CentroidKV(SHARE), window=128, sliding_layers=(0,), sink_logits=True),
        "decode with windows": of(ckv.CentroidKV(SHARE), **windows),
        "decode with experts": of(ckv.CentroidKV(SHARE), model_config("qwen3-30b-a3b"), max_positions=2 * PROMPT),
    }
    # From 0.11 on a described argument cannot be moved to the host within the program that takes it.
    if jax.__version_info__ < (0, 11):
        described["decode with recall from the host"] = of(replace(recall, store="host"))
    return described


def decode_of(array, method, model=LLAMA, batch=BATCH, weights=None, **changes):
    """A call of the decode loop, of weights in numbers or rounded to codes."""
    config = replace(model, vocab_size=32768, intermediate_size=1024, num_layers=2, **changes)

    def decode(params, cache, token, ended, key, number):
        # A described device has one memory, so that a host store has to be moved there within the program.
        both = zip(cache.layers, cache.state, strict=True)
        layers = [with_groups(layer, list(map(place, groups(layer), state))) for layer, state in both]
        cache = replace(cache, layers=tuple(layers))
        fixed = {"sampling": ckv.Sampling(), "eos_ids": (), "steps": 32}
        state = DecodeState(cache, token, ended)
        return decode_loop(params, config, method, state, key, number, number, **fixed)

    def held(path, spec):
        coded = code_shapes(spec, path[-1].key, kind_of(path[-1].key, weights), None)
        return jax.tree.map(lambda x: array(x.shape, x.dtype), coded) if coded else array(spec.shape, BF16)

    params = jax.tree.map_with_path(held, abstract(config))
    if "scores" in method.inputs(0):
        surrogate = surrogate_of(array, config)
        params = params | {"layers": tuple(layer | {"surrogate": surrogate} for layer in params["layers"])}
    inputs = (array((BATCH, PROMPT), I32), array((BATCH,), I32))
    caches, _ = jax.eval_shape(
        lambda p, *inputs: ckv.prefill(p, config, method, *inputs, max_new_tokens=384), params, *inputs
    )
    caches = jax.eval_shape(lambda caches: take_sequences(caches, jnp.zeros(batch, I32)), caches)
    caches = jax.tree.map(lambda x: array(x.shape, x.dtype), caches)
    state = params, caches, array((batch,), I32), array((batch,), bool), random_key(array), array((), I32)
    return decode, state, () if getattr(method, "store", None) == "host" else (1, 2, 3)


def experts(array):
    """Tokens through the experts of Qwen3-30B-A3B and of gpt-oss."""

    def through(experts, inputs, tokens, **biases):
        count, inner = experts.count, experts.intermediate_size
        shapes = {"router": (count, inputs), "down": (count, inner, inputs), **biases}
        shapes |= dict.fromkeys(("gate", "up"), (count, inputs, inner))
        weights = {name: array(shape, BF16) for name, shape in shapes.items()}
        return lambda w, x: mixture(w, experts, jax.nn.silu, x), (weights, array((*tokens, inputs), BF16)), ()

    def coded(inputs, outputs):
        codes, scales = array((128, inputs // 2, outputs), jnp.uint8), array((128, inputs // 128, outputs), jnp.float16)
        names = ("experts", "model", "mlp")
        return QuantisedWeights(codes, scales, scales, "int4", (128, inputs, outputs), (1,), names)

    def of_codes(weights, x):
        return mixture(weights, Experts(128, 8, 768), jax.nn.silu, x)

    in_codes = {"router": array((128, 2048), BF16), "gate": coded(2048, 768), "up": coded(2048, 768)}
    in_codes["down"] = coded(768, 2048)
    of_qwen = partial(through, Experts(128, 8, 768), 2048)
    of_gpt_oss = partial(through, Experts(32, 4, 2880, bias=True, clamp=ClampedSwiglu()), 2880)
    biases = {f"{name}_bias": (32, 2880) for name in ("gate", "up", "down")}
    return {
        "experts of a token": of_qwen((1, 1)),
        "experts of a batch": of_qwen((16, 1)),
        "experts in codes": (of_codes, (in_codes, array((1, 1, 2048), BF16)), ()),
        "experts of a prompt": of_qwen((1, 4096)),
        "experts with biases": of_gpt_oss((8, 1), router_bias=(32,), **biases),
    }
