"""Train a tiny model of every type that transformers has for a head, beside plain training.

    python scripts/check_transformers.py [--head causal ...] [--percent 75] [--part 1/2] [--output FILE.md]

Each has random weights, and a configuration in which whatever is known to set a size is small. Types that can't be
built so, have more than six million parameters, or don't train a plain step on tokens or images are left out, and
named with the reason on the standard error. All others are checked as `check_architectures.py` does.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers
from check_architectures import add_options, report
from tiny_architectures import BATCH, BUILDERS, LENGTH, SPECIAL, TINY, VOCABULARY
from torch import nn
from transformers.models.auto import modeling_auto

MOST_PARAMETERS = 6_000_000
CLASSES, SIDE = 3, 64
HEADS: dict[str, tuple[str, dict[str, str]]] = {
    "causal": ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": ("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "sequences": ("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "images": ("AutoModelForImageClassification", modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
}
NAMES_OF: dict[Any, tuple[str, ...]] = {
    1: ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group", "zero_expert_num",
        "first_k_dense_replace", "mamba_n_groups", "mamba_ngroups", "n_mamba_heads", "n_groups", "num_random_blocks",
        "moe_layer_freq"),
    2: ("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
        "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_experts_per_tok", "moe_k",
        "moe_topk", "mamba_expand", "linear_num_key_heads", "multi_query_group_num", "index_n_heads"),
    4: ("n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "attention_heads",
        "num_kv_heads", "num_encoder_attention_heads", "num_decoder_attention_heads", "encoder_num_attention_heads",
        "decoder_num_attention_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads", "num_experts",
        "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads", "mamba_d_conv",
        "rotary_dim", "block_size"),
    7: ("local_radius",),
    8: ("head_dim", "d_kv", "d_head", "dim_head", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
        "state_size", "ssm_state_size", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "mamba_d_head",
        "mamba_head_dim", "mamba_headdim", "mamba_chunk_size", "chunk_size", "linear_key_head_dim",
        "linear_value_head_dim", "index_head_dim", "index_topk", "sliding_window", "window_size", "attention_window",
        "hidden_size_per_layer_input", "num_landmarks"),
    16: ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "input_embedding_size", "output_embedding_size",
         "attention_window_size", "projection_dim", "embed_dim", "patch_size"),
    24: ("segment_means_seq_len",),
    32: ("d_model", "n_embd", "dim", "emb_dim", "embedding_size", "d_embed", "word_embed_proj_dim", "lru_width",
         "encoder_hidden_size", "decoder_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
         "expert_ffn_hidden_size", "expert_hidden_size"),
    64: ("d_ff", "d_inner", "dff", "ffn_dim", "hidden_dim", "intermediate_dim", "n_inner", "n_positions", "n_ctx",
         "encoder_ffn_dim", "decoder_ffn_dim", "encoder_intermediate_size", "decoder_intermediate_size",
         "ffn_hidden_size", "shared_intermediate_size", "max_seq_len", "max_source_positions", "max_target_positions",
         "max_encoder_position_embeddings", "max_decoder_position_embeddings"),
    VOCABULARY: ("vocab_size_per_layer_input",),
}  # fmt: skip
"""Names of sizes in configurations, by the size that a tiny model has."""
SIZES = {
    **TINY,
    **{name: size for size, names in NAMES_OF.items() for name in names},
    "decoder_start_token_id": 0,
    "image_size": SIDE,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 32, 32, 64],
    "tie_word_embeddings": True,
}


def tiny_config(kind: str, **keys: Any) -> Any:
    """A configuration of a type, small wherever it has one of the sizes. One layer of each kind, and two at least."""
    known = transformers.AutoConfig.for_model(kind)
    special = SPECIAL.get(kind, {})
    own_names = getattr(known, "attribute_map", {})  # num_attention_heads: num_heads
    names = {*vars(known), *own_names, *special}
    chosen = {
        name: value
        for name, value in {**SIZES, **special}.items()
        if name in names and (name in special or _alike(vars(known).get(own_names.get(name, name)), value))
    } | keys
    text = getattr(known, "text_config", None)
    if isinstance(text, transformers.PretrainedConfig):
        own = {
            name: value for name, value in SIZES.items() if name in vars(text) and _alike(vars(text)[name], value)
        }
        chosen["text_config"] = {**own, "model_type": text.model_type}
    if kinds := list(dict.fromkeys(vars(known).get("layer_types") or ())):
        chosen["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        chosen["num_hidden_layers"] = len(chosen["layer_types"])
    return transformers.AutoConfig.for_model(kind, **chosen)


def _alike(old: Any, new: Any) -> bool:
    """True if a configuration takes a list where we have one, and a number where we have a number."""
    return old is None or isinstance(old, list | tuple) == isinstance(new, list | tuple)


def build(head: str, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model and its inputs.

    Raises:
        ValueError: it is not tiny.
    """
    config = tiny_config(kind, **({"num_labels": CLASSES} if head == "images" else {}))
    classes = getattr(transformers, HEADS[head][0])
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in classes.from_config(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters")
    model = classes.from_config(config).float()
    if head == "images":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else SIDE
        labels = torch.randint(0, CLASSES, (BATCH,))
        return model, {"pixel_values": torch.randn(BATCH, 3, side, side), "labels": labels}
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    labels = torch.randint(3, VOCABULARY, (BATCH, LENGTH)) if head == "sequences" else tokens
    return model, {"input_ids": tokens, "labels": labels}


def names(heads: list[str], part: str) -> Iterator[str]:
    """Names of the models that train a plain step, each with a builder in `BUILDERS`."""
    this, parts = map(int, part.split("/"))
    kinds = [(head, kind) for head in heads for kind in HEADS[head][1]]
    for head, kind in kinds[this - 1 :: parts]:
        name = f"{kind}, {head}"
        try:
            torch.manual_seed(0)
            model, inputs = build(head, kind)
            model.train()(**inputs).loss.backward()
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:100]
            print(f"left out: {name}: {type(error).__name__}: {reason}", file=sys.stderr)
            continue
        BUILDERS[name] = partial(build, head, kind)
        yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head", nargs="*", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--part", default="1/1", help="1/2 and 2/2: half of the types each, for two processes")
    add_options(parser)
    parser.set_defaults(percent=75.0, device="cpu")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    report("Every type of model of transformers", names(options.head, options.part), options)


if __name__ == "__main__":
    main()
