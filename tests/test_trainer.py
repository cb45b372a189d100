"""transformers' Trainer with a scheduled model does what it does with a plain one: losses, files, keys and numbers.

Each run trains thirty steps, is killed in the middle and resumed, evaluates and saves at every tenth step, and
loads the best checkpoint in the end.
"""

import os

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from thoroughness import often
from transformers import Trainer, TrainerCallback, TrainingArguments

import monetlite


def gpt2():
    config = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, bos_token_id=0, eos_token_id=1))


def llama():
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = {"vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, num_key_value_heads=2, **tokens))


def vit():
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**config, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


def adapted(build, **settings):
    return lambda: peft.get_peft_model(build(), peft.LoraConfig(r=4, **settings))


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "gpt2 with lora": adapted(gpt2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
    "llama with lora, of no task": adapted(llama, target_modules=["q_proj", "v_proj"]),
    "vit with lora": adapted(vit, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]),
}


def examples(kind):
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        if kind.startswith("vit"):
            yield {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": number % 5}
        else:
            tokens = torch.randint(2, 64, (16,), generator=generator)
            yield {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


class Killed(Exception):
    pass


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 15:
            raise Killed


def trained(kind, folder, scheduled, **arguments):
    """The log, files, tensors and best checkpoint of a run."""
    data = list(examples(kind))

    def trainer(*callbacks):
        torch.manual_seed(0)
        model = MODELS[kind]()
        if scheduled:
            monetlite.within(model, budget="90%", device="rtx-3090", time_limit=1)
        settings = TrainingArguments(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=8,
            max_steps=30,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            logging_steps=1,
            load_best_model_at_end=True,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **arguments,
        )
        return Trainer(
            model=model, args=settings, train_dataset=data, eval_dataset=data[:16], callbacks=list(callbacks)
        )

    with pytest.raises(Killed):
        trainer(Kill()).train()
    second = trainer()
    second.train(resume_from_checkpoint=True)
    second.save_model(str(folder / "final"))
    if scheduled:
        assert monetlite.schedule_of(second.model).peak_bytes > 0
    log = [
        {name: value for name, value in item.items() if name in ("step", "loss", "eval_loss", "grad_norm")}
        for item in second.state.log_history
    ]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    tensors = {
        (file, key): tensor
        for file in files
        if file.endswith(".safetensors")
        for key, tensor in load_file(folder / file).items()
    }
    best = second.state.best_model_checkpoint.removeprefix(str(folder))
    return log, files, tensors, best


OFTEN = ("llama with lora, of no task",)
THOROUGH = "MONETLITE_THOROUGH" in os.environ


@pytest.mark.parametrize("kind", often(MODELS, *OFTEN))
def test_a_scheduled_run_is_the_plain_run(kind, tmp_path):
    plain, scheduled = (trained(kind, tmp_path / str(way), way) for way in (False, True))
    assert scheduled[1] == plain[1]
    assert scheduled[3] == plain[3]
    assert scheduled[2].keys() == plain[2].keys()
    if "llama" in kind:  # capture adds the gradients of rotary embeddings in another order
        for found, expected in zip(scheduled[0], plain[0], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
    else:
        assert scheduled[0] == plain[0]
        assert all(torch.equal(tensor, plain[2][key]) for key, tensor in scheduled[2].items())
    adapter = [file for file in plain[1] if file.startswith("final/adapter")]
    assert bool(adapter) == ("lora" in kind)


@pytest.mark.thorough
def test_a_scheduled_run_in_bfloat16_is_the_plain_run(tmp_path):
    plain, scheduled = (trained("gpt2", tmp_path / str(way), way, bf16=True) for way in (False, True))
    assert scheduled[0] == plain[0]
