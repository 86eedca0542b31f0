"""gpt-oss against transformers: its sinks and biases one by one, and experts in MXFP4 by transformers' conversion."""

import json

import pytest
from safetensors.numpy import load_file, save_file

import clusterkv_jax as ckv

torch = pytest.importorskip("torch", reason="the parity tests compare with transformers on torch: pip install torch")
import transformers  # noqa: E402  (transformers decides on import what it can do with torch)

from tests.parity import test_families as families  # noqa: E402

checkpoint = families.checkpoint


@pytest.mark.parametrize("part", ["sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias"])
def test_a_slightly_wrong_sink_or_bias_fails(checkpoint, tmp_path, part):
    reference, folder = checkpoint("gpt-oss")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: 1.001 * x if name.endswith(part) else x for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    tokens = families._prompt(300)
    assert (
        families._relative(families._logits(ckv.load(tmp_path), tokens), families._reference_logits(reference, tokens))
        > 1e-5
    )


def test_gpt_oss_as_published(checkpoint, tmp_path):
    """Experts in MXFP4, against transformers with the numbers that its own conversion makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference, folder = checkpoint("gpt-oss")
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    again = transformers.AutoModelForCausalLM.from_config(reference.config, attn_implementation="eager").eval().float()
    again.load_state_dict(reference.state_dict())
    numbers = dict(again.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        numbers[name].data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        tensors |= {f"{name}_blocks": blocks.numpy(), f"{name}_scales": scales.numpy()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    published = json.loads((folder / "config.json").read_text())
    published["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(published))
    model, tokens = ckv.load(tmp_path), families._prompt(300)
    assert families._relative(families._logits(model, tokens), families._reference_logits(again, tokens)) <= 1e-5
    assert families._greedy(model, families._prompt(40), 64) == families._reference_greedy(
        again, families._prompt(40), 64
    )
