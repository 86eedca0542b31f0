"""Where a model's numbers cease to be finite, once it is known that they do."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.generation.batch import Batch, bucket, padded
from clusterkv_jax.methods.base import Method
from clusterkv_jax.models import prompt_forward
from clusterkv_jax.sampling import NOT_FINITE
from clusterkv_jax.text.tokenizer import Tokens


def check_finite(
    model: Model,
    method: Method,
    batch: Batch,
    sequences: list[Tokens],
    first: Callable[[Model, Tokens], str | None] | None = None,
) -> None:
    """Raise ValueError for the first sequence in which a step's logits were not finite; `first` says where."""
    for i, sequence in enumerate(sequences):
        if NOT_FINITE in sequence:
            question = batch.questions[i] if batch.questions else []
            text = [*batch.texts[i], *question, *sequence[: sequence.index(NOT_FINITE)]]
            place = (first or first_not_finite)(model, text)
            cause = f"from {place}" if place else f"with what {method} keeps; without compression all are"
            raise ValueError(
                f"Prompt {i}: the model's logits after {len(text)} tokens are not finite numbers; "
                f"the first numbers that are not come {cause}."
            )


def first_not_finite(model: Model, text: Tokens) -> str | None:
    """Where the numbers of a text cease to be finite without compression; None if they do not.

    The layers run once more, now that it is known that something is wrong: else every step would wait for each of them.
    """
    params, config, count = model.params, model.config, len(text)
    tokens = jnp.asarray(padded([text], min(bucket(count, 64), config.max_positions)))
    places = []

    def look(place: str, numbers: jax.Array) -> None:
        if not jnp.isfinite(numbers[:, :count]).all():
            places.append(place)

    hidden, lengths = prompt_forward.embed(params, config, tokens, jnp.asarray([count], jnp.int32))
    look("the embeddings", hidden)
    for number, weights in enumerate(params["layers"]):
        hidden = prompt_forward.read_layer(weights, config.of_layer(number), None, hidden)[0]
        look(f"layer {number} (of 0 to {config.num_layers - 1})", hidden)
    look("the output head", prompt_forward.last_logits(params, config, hidden, lengths)[:, None])
    return places[0] if places else None
