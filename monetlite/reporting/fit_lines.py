"""Lines to paste into a training script: the fastest setting that fits, for libraries that people train with."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from monetlite.planning.card_fit import CardFit, FitSetting
from monetlite.profiling.step_additions import optimizer_kind

EXPANDABLE_SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""Setting of the environment, which torch reads when it is imported."""
_WIDTH = 79
_TRAINER_NAMES = {"sgd": "sgd", "adamw": "adamw_torch", "adamw8bit": "adamw_8bit"}
"""transformers' names of optimizers whose memory is the one that was counted."""
_TITAN_TYPES = ("bfloat16", "float32")
"""Dtypes that torchtitan trains in."""
_TITAN_MODELS = ("Llama", "Llama4", "Qwen3", "Qwen3Moe", "DeepseekV3", "GptOss")
"""Beginnings of transformers' classes of the models that torchtitan has, too."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""Ends of transformers' classes of models that TRL trains."""


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A training as it was asked for, in the words of a script.

    Attributes:
        model_class: of a transformers model; empty for a model of their own.
        loaded_from: the name or path that `from_pretrained` takes; empty where there is none.
        dtype: of the weights. autocast: of `torch.autocast`, or empty.
        rank: of LoRA adapters; 0 without.
        optimizer: by the name that commands know. accumulate: over several batches.
        settings_by_new_name: the installed transformers calls its setting `activation_checkpointing`.
    """

    model_class: str
    loaded_from: str
    dtype: str
    autocast: str
    rank: int
    optimizer: str
    accumulate: bool
    settings_by_new_name: bool


def lines_to_paste(answer: CardFit, request: TrainingRequest) -> dict[str, list[str]]:
    """Lines by the library that they are for, for the fastest way that fits; nothing where none does."""
    way = answer.fastest
    if way is None:
        return {}
    lines = {"plain loop": [*_loading(request), *_scheduling(answer, way, request), *_optimizer(request)]}
    if request.model_class:
        lines["Trainer"] = list(_trainer(answer, way, request))
        if request.model_class.endswith(_LANGUAGE_MODELS):
            lines["TRL"] = list(_trl(answer, way, request))
    lines["Lightning"] = list(_lightning(request))
    # torchtitan trains all weights, by AdamW where nothing else is said.
    titan = request.optimizer == "adamw" and not request.rank and request.dtype in _TITAN_TYPES
    if request.model_class.removesuffix("ForCausalLM") in _TITAN_MODELS and titan and request.autocast != "float16":
        lines["torchtitan"] = list(_torchtitan(answer, request))
    if answer.needs_expandable(way):
        lines = {library: [f"# start with {EXPANDABLE_SEGMENTS}", *text] for library, text in lines.items()}
    return lines


def _loading(request: TrainingRequest) -> Iterator[str]:
    if request.model_class and request.loaded_from:
        yield f"from transformers import {request.model_class}"
        arguments = [f'"{request.loaded_from}"', f'dtype="{request.dtype}"']
        yield from _call(f"model = {request.model_class}.from_pretrained", arguments)
    if request.rank:
        yield "from peft import LoraConfig, get_peft_model"
        yield f'lora = LoraConfig(r={request.rank}, target_modules="all-linear")'
        yield "model = get_peft_model(model, lora, autocast_adapter_dtype=False)"


def _scheduling(answer: CardFit, way: FitSetting, request: TrainingRequest) -> Iterator[str]:
    if way.tolerance is not None:
        options = [f'optimizer="{request.optimizer}"']
        options += [f"tolerance={way.tolerance:g}"] if way.tolerance else []
        options += ["accumulate=True"] if request.accumulate else []
        yield "import monetlite"
        yield from _call("model = monetlite.within", ["model", f'budget="{budget_text(answer)}"', *options])
    elif way.every and request.model_class and request.settings_by_new_name:
        yield f"model.activation_checkpointing_enable(every_n_layers={way.every})"
    elif way.every and request.model_class:
        yield "model.gradient_checkpointing_enable()"
    elif way.every:
        yield f"# torch.utils.checkpoint around {every_layer(way.every)}"


def budget_text(answer: CardFit) -> str:
    """The budget as people write it, never more than it is."""
    unit, size = ("GB", 10**9) if answer.card.budget_bytes >= 10**9 else ("MB", 10**6)
    return f"{answer.card.budget_bytes * 100 // size / 100:g}{unit}"


def every_layer(every: int) -> str:
    """A distance of layers in words: `every layer`, `every 2nd layer`."""
    ordinal = {1: "", 2: " 2nd", 3: " 3rd"}.get(every, f" {every}th")
    return f"every{ordinal} layer"


def _optimizer(request: TrainingRequest) -> Iterator[str]:
    kind = optimizer_kind(request.optimizer)
    settings = [f"{name}={value:g}" for name, value in {"lr": 1e-4, **kind.settings}.items()]
    yield f"import {kind.made_by.partition('.')[0]}"
    yield from _call(f"optimizer = {kind.made_by}", ["model.parameters()", *settings])
    if request.autocast:
        yield f"# run model and loss within torch.autocast(device, torch.{request.autocast})"


def _call(function: str, arguments: list[str]) -> list[str]:
    """A call in as many lines as it takes, none much longer than a terminal is wide."""
    whole = f"{function}({', '.join(arguments)})"
    if len(whole) <= _WIDTH:
        return [whole]
    inner = textwrap.wrap(f"{', '.join(arguments)},", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return [f"{function}(", *(f"    {line}" for line in inner), ")"]


def _arguments(answer: CardFit, way: FitSetting, request: TrainingRequest) -> Iterator[str]:
    """Settings that `TrainingArguments` and TRL's configurations share."""
    yield f"per_device_train_batch_size={answer.batch}"
    if request.optimizer in _TRAINER_NAMES:
        yield f'optim="{_TRAINER_NAMES[request.optimizer]}"'
    if request.accumulate:
        yield "gradient_accumulation_steps=2"
    if request.autocast:
        yield "bf16=True" if request.autocast == "bfloat16" else "fp16=True"
    if way.every and request.settings_by_new_name:
        yield "activation_checkpointing=True"
        yield f'activation_checkpointing_kwargs={{"every_n_layers": {way.every}}}'
    elif way.every:
        yield "gradient_checkpointing=True"


def _trainer_arguments(request: TrainingRequest) -> list[str]:
    own = [] if request.optimizer in _TRAINER_NAMES else ["optimizers=(optimizer, None)"]
    return ["model=model", "args=args", "train_dataset=data", *own]


def _trainer(answer: CardFit, way: FitSetting, request: TrainingRequest) -> Iterator[str]:
    yield from _call("args = TrainingArguments", list(_arguments(answer, way, request)))
    yield from _call("trainer = Trainer", _trainer_arguments(request))


def _trl(answer: CardFit, way: FitSetting, request: TrainingRequest) -> Iterator[str]:
    """TRL turns on checkpointing, autocast and a loss of its own, which the figures don't count."""
    own = [*_arguments(answer, way, request), f"max_length={answer.length}", 'loss_type="nll"']
    own += [] if way.every else ["gradient_checkpointing=False"]
    own += [] if request.autocast else ["bf16=False"]
    yield from _call("args = SFTConfig", own)
    yield from _call("trainer = SFTTrainer", _trainer_arguments(request))


def _lightning(request: TrainingRequest) -> Iterator[str]:
    yield "self.network = model  # in your LightningModule's __init__, made as above"
    options = []
    if request.autocast:
        options.append('precision="bf16-mixed"' if request.autocast == "bfloat16" else 'precision="16-mixed"')
    if request.accumulate:
        options.append("accumulate_grad_batches=2")
    yield f"trainer = lightning.Trainer({', '.join([*options, 'max_epochs=1'])})"


def _torchtitan(answer: CardFit, request: TrainingRequest) -> Iterator[str]:
    """torchtitan 0.3 builds its own model, and checkpoints all of its layers or none."""
    if not any(way is not None and answer.fits(way) for way in (answer.plain, answer.checkpointed)):
        yield "# checkpointing its layers is not enough on this card"
        return
    yield f"--training.local_batch_size={answer.batch} --training.seq_len={answer.length}"
    if request.accumulate:
        yield f"--training.global_batch_size={2 * answer.batch}"
    dtype = request.autocast or request.dtype
    yield f"--training.dtype={request.dtype} --training.mixed_precision_param={dtype}"
    yield f"activation-checkpoint:{'none' if answer.fits(answer.plain) else 'full'}"
